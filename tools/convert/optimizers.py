"""Maps torch.optim's names of an optimizer's state and options to those of Tessera's manifest."""

import torch

from .checkpoint import ConvertError, Tensor

ADAM = {"lr", "betas", "eps", "weight_decay", "amsgrad"}
OPTIONS = {
    "Adam": ADAM, "AdamW": ADAM,
    "SGD": {"lr", "momentum", "dampening", "weight_decay", "nesterov"},
    "RMSprop": {"lr", "alpha", "eps", "weight_decay", "momentum", "centered"},
    "Adagrad": {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"},
}
# Options of the loop's execution or of a schedule; they do not change the saved state.
HARMLESS = {"params", "param_names", "foreach", "capturable", "differentiable", "fused", "initial_lr", "decoupled_weight_decay",
            "bias_correction", "name", "param_group_id", "step", "swap_tensors"}


def kind_of(group, asked):
    """AdamW's and Adam's groups differ only in "decoupled_weight_decay", which newer versions have."""
    if asked:
        if asked not in OPTIONS:
            raise ConvertError(f"--optimizer-kind {asked}: expected one of {', '.join(OPTIONS)}")
        return asked
    if "betas" in group and "decoupled_weight_decay" in group:
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    if "betas" in group:
        raise ConvertError("whether the optimizer is Adam or AdamW is not in the file: give --optimizer-kind")
    for kind, mark in (("SGD", "dampening"), ("RMSprop", "alpha"), ("Adagrad", "lr_decay")):
        if mark in group:
            return kind
    raise ConvertError(f"an optimizer with the options {', '.join(sorted(group))} is not known: give --optimizer-kind")


def options_to_ours(group, kind):
    options = {}
    for name, value in group.items():
        value = value.item() if isinstance(value, torch.Tensor) else value
        if name == "betas":
            options["beta1"], options["beta2"] = map(float, value)
        elif name in OPTIONS[kind]:
            options[name] = value if isinstance(value, bool) else float(value)
        elif name not in HARMLESS and value not in (None, False, 0):
            raise ConvertError(f"the optimizer's option {name} = {value} is not one that {kind} has in Tessera")
    return options


def groups_to_ours(groups, asked_kind):
    """`groups`: torch's, with the parameters' names as "params"."""
    kind = kind_of(groups[0], asked_kind)
    return {"kind": kind, "numbers": {},
            "groups": [{"options": options_to_ours(group, kind), "parameters": list(group["params"])} for group in groups]}


def add_state(optimizer, tensors, fqn, shape, state):
    """`state`: of one parameter, {"exp_avg": (dtype, shape, load), "step": 7, ...}."""
    for key, value in state.items():
        if value is None:
            continue
        if key == "step":
            step = float(value)
            if step != int(step):
                raise ConvertError(f"the step of '{fqn}' is {step}")
            optimizer["numbers"].setdefault(fqn, {})["step"] = int(step)
        elif isinstance(value, tuple):
            dtype, own, load = value
            if list(own) != list(shape):
                raise ConvertError(f"the optimizer's '{key}' of '{fqn}' is {list(own)}; the parameter is {list(shape)}")
            tensors.append(Tensor(f"optim.{key}.{fqn}", "state", dtype, list(own), load))
        else:
            raise ConvertError(f"the optimizer's '{key}' of '{fqn}' is neither a tensor nor a step")


def groups_to_torch(optimizer):
    """Returns complete groups as in torch.optim, with its defaults for options that Tessera does not know."""
    kind = optimizer["kind"]
    if kind not in OPTIONS:
        raise ConvertError(f"torch.optim has no {kind}: its state cannot be written for torch; --no-optimizer leaves it out")
    groups = []
    for group in optimizer["groups"]:
        options = dict(group["options"])
        if "beta1" in options:
            options["betas"] = (options.pop("beta1"), options.pop("beta2"))
        made = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], **options).param_groups[0]
        groups.append({**made, "params": list(group["parameters"])})
    return groups
