"""torch.distributed.checkpoint's folders (.metadata, *.distcp)."""

import io
import pathlib

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import optimizers
from .checkpoint import DTYPES, Checkpoint, ConvertError, Tensor


class OneMetadata(FileSystemReader):
    """Reads the metadata once for all tensors."""

    def read_metadata(self, *args, **kwargs):
        if not hasattr(self, "known"):
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


class Folder:
    def __init__(self, path):
        self.reader = OneMetadata(str(path))
        metadata = self.reader.read_metadata()
        self.entries = metadata.state_dict_metadata
        # The keys that the state dict had, by the flat name: ("optim", "state", "0.weight", "exp_avg").
        self.paths = {name: tuple(keys) for name, keys in (metadata.planner_data or {}).items() if name in self.entries}
        for name in self.entries:
            self.paths.setdefault(name, (name,))

    def read(self, name):
        entry = self.entries[name]
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else io.BytesIO()}
        dcp.load(state, storage_reader=self.reader, planner=DefaultLoadPlanner(False, False), no_dist=True)
        return state[name]

    def spec(self, name):
        """(dtype, shape, load), or the value where it is small."""
        entry = self.entries[name]
        if not isinstance(entry, TensorStorageMetadata):
            return self.read(name)
        if not entry.size:
            return self.read(name).item()
        return entry.properties.dtype, list(entry.size), lambda: self.read(name)


def split(paths):
    """What is the model's and what the optimizer's: the longest keys in front of "param_groups" are the optimizer's, and
    the model's are the others with tensors."""
    optimizer = next((keys[: keys.index("param_groups")] for keys in paths.values() if "param_groups" in keys), None)
    model, other = {}, {}
    for name, keys in paths.items():
        (other if optimizer is not None and keys[: len(optimizer)] == optimizer else model)[name] = keys
    return optimizer, model, other


def read_dcp(path, options):
    folder = Folder(path)
    prefix, of_model, of_optimizer = split(folder.paths)
    tensors = []
    extra = {}
    for name, keys in of_model.items():
        entry = folder.entries[name]
        if options.model and keys[: len(options.model)] != options.model:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            value = folder.read(name)
            if isinstance(value, (bool, int, float, str)):
                extra[".".join(map(str, keys))] = value
            else:
                options.warn(f"'{name}' is no tensor, and is left out")
            continue
        tensors.append((keys[-1], entry, name))
    fronts = {keys[:-1] for name, keys in of_model.items() if isinstance(folder.entries[name], TensorStorageMetadata)}
    if len(fronts) > 1 and not options.model:
        raise ConvertError(f"{path}: tensors are under {', '.join('.'.join(map(str, f)) or '(nothing)' for f in sorted(fronts, key=str))}: "
                           "say with --model which are the model's")
    result = Checkpoint([Tensor(fqn, options.kind_of(fqn), entry.properties.dtype, list(entry.size), lambda n=name: folder.read(n))
                         for fqn, entry, name in tensors], extra=extra)
    if prefix is not None and options.optimizer:
        read_optimizer(folder, of_optimizer, len(prefix), result, options)
    return result


def read_optimizer(folder, names, depth, result, options):
    shapes = {tensor.name: tensor.shape for tensor in result.tensors}
    states, groups, flat_groups = {}, None, {}
    for name, keys in names.items():
        rest = keys[depth:]
        if rest == ("param_groups",):
            groups = folder.read(name)
        elif rest[0] == "param_groups" and len(rest) == 3:  # a list whose entries were flattened
            flat_groups.setdefault(rest[1], {})[rest[2]] = folder.spec(name)
        elif rest[0] == "param_groups":
            raise ConvertError(f"'{name}': groups of this form are not known (flatten_optimizer_state_dict is not read)")
        elif rest[0] == "state" and len(rest) == 3:
            states.setdefault(rest[1], {})[rest[2]] = folder.spec(name)
        else:
            raise ConvertError(f"'{name}' is not what an optimizer's state is called")
    if groups is None:
        groups = [flat_groups[index] for index in sorted(flat_groups)]
    result.optimizer = optimizers.groups_to_ours(groups, options.optimizer_kind)
    for fqn, state in states.items():
        if fqn not in shapes:
            raise ConvertError(f"the optimizer has a state for '{fqn}', which the model does not have")
        optimizers.add_state(result.optimizer, result.tensors, fqn, shapes[fqn], state)


class Lazy(DefaultSavePlanner):
    """Reads each tensor when it is written."""

    def __init__(self, load):
        super().__init__()
        self.load = load

    def resolve_data(self, item):
        load = self.load.get(item.index.fqn)
        return super().resolve_data(item) if load is None else load()


def write_dcp(target, reader, options):
    """A checkpoint of Tessera's as {"model": ..., "optim": {"state", "param_groups"}}, what FSDP2's get_state_dict()
    gives."""
    if pathlib.Path(target).exists():
        raise ConvertError(f"{target}: is there already")
    manifest, load = reader.manifest, {}

    def lazy(flat_name, saved):
        load[flat_name] = lambda: reader.tensor(saved)
        entry = manifest["tensors"][saved]
        return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")

    state = {"model": {}}
    for name, entry in manifest["tensors"].items():
        if entry["kind"] in ("parameter", "buffer"):
            for own in (name, *entry.get("aliases", [])):
                state["model"][own] = lazy(f"model.{own}", name)
        elif entry["kind"] == "beside":
            options.warn(f"'{name}' is beside the model, and is left out")
    if manifest["optimizer"] and options.optimizer:
        groups = optimizers.groups_to_torch(manifest["optimizer"])
        by_parameter = {fqn: {} for group in groups for fqn in group["params"]}
        for fqn, numbers in manifest["optimizer"]["numbers"].items():
            by_parameter[fqn].update({key: torch.tensor(float(value)) for key, value in numbers.items()})
        for name, entry in manifest["tensors"].items():
            if entry["kind"] == "state":
                key, fqn = name.removeprefix("optim.").split(".", 1)
                by_parameter[fqn][key] = lazy(f"optim.state.{fqn}.{key}", name)
        state["optim"] = {"state": {fqn: own for fqn, own in by_parameter.items() if own}, "param_groups": groups}
    if manifest["extra"]:
        state["extra"] = manifest["extra"]
    # The writer keeps what it has written until its file ends: so each tensor has a file of its own.
    writer = FileSystemWriter(str(target), thread_count=1, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, planner=Lazy(load), no_dist=True)
