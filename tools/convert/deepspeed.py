"""Reads DeepSpeed's folders: ZeRO 1, 2 and 3, and universal checkpoints. Takes parameters from the optimizer's fp32
copies.
"""

import math
import pathlib

import torch

from . import optimizers, torch_file
from .checkpoint import Checkpoint, ConvertError, Tensor


def folder_of(path):
    """The folder of one step: named by "latest" or "latest_universal", or the path itself."""
    path = pathlib.Path(path)
    for name in ("latest_universal", "latest"):
        if (path / name).exists():
            return path / (path / name).read_text().strip()
    return path


def is_deepspeed(path):
    folder = folder_of(path)
    return (folder / "zero").is_dir() or any(folder.glob("*mp_rank_*_optim_states.pt"))


def by_rank(path):
    return int(path.name.split("pp_rank_")[1].split("_")[0])


def refuse_parts(files):
    if any("mp_rank_00" not in file.name for file in files):
        raise ConvertError(f"{files[0].parent}: is of a model that is cut over ranks (mp_rank_01): make a universal checkpoint of it")


def read_deepspeed(path, options):
    folder = folder_of(path)
    if (folder / "zero").is_dir():
        return read_universal(folder, options)
    files = sorted(folder.glob("*pp_rank_*_mp_rank_*_optim_states.pt"), key=by_rank)
    refuse_parts(files)
    states = [torch_file.load(file, options)["optimizer_state_dict"] for file in files]
    stage, ranks = int(states[0]["zero_stage"]), states[0]["partition_count"]
    if (max(ranks) if isinstance(ranks, list) else ranks) != len(files):
        raise ConvertError(f"{folder}: is of {ranks} ranks, but has the files of {len(files)}")
    model_files = sorted(folder.glob("*model_states.pt"))
    refuse_parts(model_files)
    model = torch_file.load(model_files[0], options)
    shapes = [{name: list(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    if model.get("frozen_param_shapes"):
        raise ConvertError(f"{folder}: has frozen parameters, which are not read")
    parts = parts_of_stage3(states, shapes) if stage == 3 else parts_of_stage2(states, shapes)
    result = Checkpoint([], extra={"step": int(model.get("global_steps", 0))})
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        aliases = [alias for alias, own in model.get("shared_params", {}).items() if own == name and alias != name]
        result.tensors.append(Tensor(name, "parameter", torch.float32, shape, parts[name]["fp32"][2], aliases))
    for name in model["buffer_names"]:
        tensor = model["module"][name]
        result.tensors.append(Tensor(name, "buffer", tensor.dtype, list(tensor.shape), lambda t=tensor: t.contiguous()))
    if options.optimizer:
        add_optimizer(result, base_of(states[0], stage)["param_groups"], shapes, parts, options)
    return result


def add_optimizer(result, groups, shapes, parts, options):
    if len(groups) != len(shapes):
        kind = optimizers.kind_of(groups[0], options.optimizer_kind)
        if any(optimizers.options_to_ours(group, kind) != optimizers.options_to_ours(groups[0], kind) for group in groups):
            raise ConvertError(f"the optimizer's {len(groups)} groups have options of their own, and which parameters are in which is "
                               "not in the files: --no-optimizer leaves it out")
        groups = [groups[0]]
        shapes = [{name: shape for group in shapes for name, shape in group.items()}]
    named = [{**group, "params": list(names)} for group, names in zip(groups, shapes)]
    result.optimizer = optimizers.groups_to_ours(named, options.optimizer_kind)
    for group in shapes:
        for name, shape in group.items():
            state = {key: value for key, value in parts[name].items() if key != "fp32"}
            optimizers.add_state(result.optimizer, result.tensors, name, shape, state)


def base_of(state, stage):
    """The state dict of the optimizer that ZeRO wraps."""
    if stage == 3:
        return state["optimizer_state_dict"]
    base = state["base_optimizer_state"]
    if not isinstance(base, dict) or "param_groups" not in base:
        raise ConvertError("a checkpoint that was saved with elastic_checkpoint: make a universal checkpoint of it")
    return base


def flat_parts(states, stage, group):
    """By key, each rank's part of a group as flat tensors; and the values common to all: "step"."""
    fp32 = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    parts, alike = {"fp32": [state[fp32][group] for state in states]}, {}
    for state in states:
        for key, value in base_of(state, stage)["state"].get(group, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                parts.setdefault(key, []).append(value)
            else:
                alike[key] = float(value)
    return parts, alike


def parts_of_stage2(states, shapes):
    """The concatenated partitions of the ranks are the concatenated parameters of a group, plus padding."""
    found = {}
    for group, own in enumerate(shapes):
        parts, alike = flat_parts(states, 2, group)
        paddings = (states[0].get("param_alignment_paddings") or [[0] * len(own)] * len(shapes))[group]
        begin = 0
        for (name, shape), padding in zip(own.items(), paddings):
            numel = math.prod(shape)
            found[name] = {key: (flat[0].dtype, shape, lambda f=flat, b=begin, n=numel, s=shape: cut(f, b, n).view(s))
                           for key, flat in parts.items()}
            found[name].update(alike)
            begin += numel + padding
        if (have := sum(part.numel() for part in parts["fp32"])) < begin or have - begin >= 2 * len(states) + len(states):
            raise ConvertError(f"group {group} has {have} elements, its parameters {begin}: this layout is not known")
    return found


def cut(flat, begin, numel):
    """A copied range of concatenated tensors."""
    pieces = []
    for part in flat:
        first, last = max(begin, 0), min(begin + numel, part.numel())
        if first < last:
            pieces.append(part[first:last])
        begin -= part.numel()
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=flat[0].dtype)


def parts_of_stage3(states, shapes):
    """Each rank has an equal part of each parameter, the last with padding; parts of all groups are concatenated."""
    ranks = len(states)
    groups = [flat_parts(states, 3, group) for group in range(len(states[0]["fp32_flat_groups"]))]
    found, begin = {}, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        numel = math.prod(shape)
        own = -(-numel // ranks)

        def load(key, b=begin, n=numel, o=own, s=shape):
            by_rank = [[parts[key][rank] for parts, _ in groups] for rank in range(ranks)]
            return torch.cat([cut(flat, b, o) for flat in by_rank])[:n].view(s)

        found[name] = {key: (flat[0].dtype, shape, lambda k=key, f=load: f(k)) for key, flat in groups[0][0].items()}
        found[name].update(groups[0][1])
        begin += own
    if (have := sum(part.numel() for part in states[0]["fp32_flat_groups"])) != begin:
        raise ConvertError(f"each rank has {have} elements, the parameters need {begin}: this layout is not known")
    return found


def read_universal(folder, options):
    """zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt: one file for each state of each parameter."""
    model_files = sorted(folder.glob("*model_states.pt"))
    refuse_parts(model_files)
    model = torch_file.load(model_files[0], options)
    shapes = [{name: list(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    common = torch_file.load(folder / "zero" / "optimizer_state.pt", options)
    result = Checkpoint([], extra={"step": int(model.get("global_steps", 0))})
    parts = {}
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        parts[name] = {}
        for file in sorted((folder / "zero" / name).glob("*.pt")):
            value = torch_file.load(file, options)
            value = value["param"] if isinstance(value, dict) else value
            if file.stem == "step" or not isinstance(value, torch.Tensor) or (value.dim() == 0 and shape):
                parts[name][file.stem] = float(value)
            else:
                parts[name][file.stem] = (value.dtype, shape, lambda f=file, s=shape: load_universal(f, s, options))
        if "fp32" not in parts[name]:
            raise ConvertError(f"{folder}: has no zero/{name}/fp32.pt")
        result.tensors.append(Tensor(name, "parameter", parts[name]["fp32"][0], shape, parts[name]["fp32"][2]))
    for name in model["buffer_names"]:
        tensor = model["module"][name]
        result.tensors.append(Tensor(name, "buffer", tensor.dtype, list(tensor.shape), lambda t=tensor: t.contiguous()))
    if options.optimizer:
        groups = common.get("param_groups") or base_of(common, int(common["zero_stage"]))["param_groups"]
        add_optimizer(result, groups, shapes, parts, options)
    return result


def load_universal(file, shape, options):
    value = torch_file.load(file, options)
    return (value["param"] if isinstance(value, dict) else value).reshape(shape).contiguous()
