"""Reads files of torch.save: a model's state dict, or one with an optimizer's state dict; also FairScale's consolidated
states.
"""

import math
import re

import torch

from . import optimizers, untrusted
from .checkpoint import Checkpoint, ConvertError, Tensor


def load(path, options):
    return untrusted.load_file(path, options.trust)


def is_tensors(value):
    return isinstance(value, dict) and bool(value) and all(isinstance(entry, torch.Tensor) for entry in value.values())


def is_optimizer(value):
    return isinstance(value, dict) and "param_groups" in value and "state" in value


def at(state, keys, path):
    for key in keys:
        if isinstance(state, (list, tuple)) and key.isdigit():
            key, state = int(key), dict(enumerate(state))
        if not isinstance(state, dict) or key not in state:
            raise ConvertError(f"{path}: has no '{'.'.join(keys)}'")
        state = state[key]
    return state


def the_one(state, fits, what, option, path):
    found = {}
    for name, value in state.items():
        if fits(value):
            found[name] = value
        elif isinstance(value, (list, tuple)):  # Lightning's "optimizer_states"
            found.update({f"{name}/{i}": entry for i, entry in enumerate(value) if fits(entry)})
    if len(found) > 1:
        raise ConvertError(f"{path}: {', '.join(found)} may each be the {what}: say with {option}")
    return next(iter(found.values()), None)


def read_torch(path, options):
    state = load(path, options)
    if isinstance(state, torch.nn.Module):
        raise ConvertError(f"{path}: is a whole module; save its state_dict()")
    if options.model:
        model = at(state, options.model, path)
    else:
        model = state if is_tensors(state) else the_one(state, is_tensors, "model", "--model", path)
    if not is_tensors(model):
        raise ConvertError(f"{path}: has no state dict of a model: say with --model where it is")
    optimizer = None
    if options.optimizer and model is not state:
        optimizer = at(state, options.optimizer, path) if isinstance(options.optimizer, tuple) else \
            the_one(state, is_optimizer, "optimizer", "--optimizer", path)
    if options.optimizer_file:
        optimizer = load(options.optimizer_file, options)
        if not is_optimizer(optimizer):
            raise ConvertError(f"{options.optimizer_file}: is not an optimizer's state dict")
    extra, left_out = {}, []
    for name, value in state.items() if model is not state else ():
        if isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
            extra[name] = value
        elif value is not model and not (is_optimizer(value) or (isinstance(value, (list, tuple)) and any(map(is_optimizer, value)))):
            left_out.append(str(name))
    if left_out:
        options.warn(f"{path}: left out, beside the model, its optimizer, and numbers and texts: {', '.join(left_out)}")
    return from_state_dicts(model, optimizer, extra, options)


def from_state_dicts(model, optimizer, extra, options):
    """A model's and an optimizer's state dicts, with numbers or names for parameters."""
    by_storage, tensors = {}, []
    for name, tensor in model.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
                 tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and place in by_storage:  # tied
            by_storage[place].aliases.append(name)
            continue
        by_storage[place] = Tensor(name, options.kind_of(name), tensor.dtype, list(tensor.shape), lambda t=tensor: t.detach().contiguous())
        tensors.append(by_storage[place])
    result = Checkpoint(tensors, extra=extra)
    if optimizer is not None:
        add_optimizer(result, optimizer, options)
    return result


def names_of_numbers(result, optimizer, options):
    """Maps the numbers in an optimizer's state dict to parameters. Numbers follow the groups, so with several groups
    the model's order does not determine them."""
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    named = [name for group in optimizer["param_groups"] for name in group.get("param_names", [])]
    if len(named) == len(numbers):
        return dict(zip(numbers, named))
    if options.order:
        parameters = options.order.read_text(encoding="utf-8").split()
    elif len(optimizer["param_groups"]) > 1:
        raise ConvertError(f"the optimizer has {len(optimizer['param_groups'])} groups, whose parameters have numbers and no "
                           "names: give --parameter-order")
    else:
        parameters = [tensor.name for tensor in result.tensors if tensor.kind == "parameter"]
    if len(parameters) != len(numbers):
        raise ConvertError(f"the optimizer has {len(numbers)} parameters, the model {len(parameters)}: "
                           "say with --buffers which names are buffers")
    return dict(zip(sorted(numbers), parameters))


def add_optimizer(result, optimizer, options):
    groups = optimizer["param_groups"]
    if any(isinstance(entry, int) for group in groups for entry in group["params"]):
        names = names_of_numbers(result, optimizer, options)
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in groups]
        states = {names[number]: state for number, state in optimizer["state"].items()}
    else:
        states = optimizer["state"]
    result.optimizer = optimizers.groups_to_ours(groups, options.optimizer_kind)
    shapes = {tensor.name: tensor.shape for tensor in result.tensors}
    for fqn, state in states.items():
        if fqn not in shapes:
            raise ConvertError(f"the optimizer has a state for '{fqn}', which the model does not have")
        specs = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                value = (value.dtype, list(value.shape), lambda v=value: v.detach().contiguous())
            specs[key] = value
        optimizers.add_state(result.optimizer, result.tensors, fqn, shapes[fqn], specs)


def buffers(pattern):
    """Returns whether a name is a buffer's: of torch's own modules, or a match of the pattern."""
    known = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")
    own = re.compile(pattern) if pattern else None
    return lambda name: bool(known.search(name) or (own and own.search(name)))
