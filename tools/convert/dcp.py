"""torch.distributed.checkpoint's folders (.metadata, *.distcp)."""

import dataclasses
import os
import pathlib
import shutil

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import optimizers
from .checkpoint import DTYPES, Checkpoint, ConvertError, Tensor
from .dcp_folder import Folder
from .untrusted import NeedsTrust


def split(paths):
    """Splits keys into the model's and the optimizer's: the longest prefixes of "param_groups" are the optimizer's,
    other keys with tensors the model's."""
    optimizer = next((keys[: keys.index("param_groups")] for keys in paths.values() if "param_groups" in keys), None)
    model, other = {}, {}
    for name, keys in paths.items():
        (other if optimizer is not None and keys[: len(optimizer)] == optimizer else model)[name] = keys
    return optimizer, model, other


def small_value(folder, name):
    """Returns an entry that is a number or a text, or None."""
    try:
        value = folder.read(name)
    except NeedsTrust:
        return None
    return value if isinstance(value, (bool, int, float, str)) else None


def read_dcp(path, options):
    folder = Folder(path, options.trust)
    prefix, of_model, of_optimizer = split(folder.paths)
    tensors = []
    extra = {}
    for name, keys in of_model.items():
        entry = folder.entries[name]
        if options.model and keys[: len(options.model)] != options.model:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            value = small_value(folder, name)
            if value is None:
                options.warn(f"'{name}' is no tensor, and is left out")
            else:
                extra[".".join(map(str, keys))] = value
            continue
        tensors.append((str(keys[-1]), entry, name))
    fronts = {keys[:-1] for name, keys in of_model.items() if isinstance(folder.entries[name], TensorStorageMetadata)}
    if len(fronts) > 1 and not options.model:
        raise ConvertError(f"{path}: tensors are under {', '.join('.'.join(map(str, f)) or '(nothing)' for f in sorted(fronts, key=str))}: "
                           "say with --model which are the model's")
    result = Checkpoint([Tensor(fqn, options.kind_of(fqn), entry.properties.dtype, list(entry.size), lambda n=name: folder.load(n))
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
        elif rest[:1] == ("param_groups",) and len(rest) == 3:  # a list whose entries were flattened
            flat_groups.setdefault(rest[1], {})[rest[2]] = folder.number(name)
        elif rest[:1] == ("param_groups",):
            raise ConvertError(f"'{name}': groups of this form are not known (flatten_optimizer_state_dict is not read)")
        elif rest[:1] == ("state",) and len(rest) == 3:
            # Only the step is a number: the state of a parameter without dimensions is a tensor without dimensions.
            states.setdefault(rest[1], {})[rest[2]] = folder.number(name) if rest[2] == "step" else folder.spec(name)
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
    """Writes tensors in pieces, each read when it is written. `pieces`: by flat name, from checkpoint.Reader.pieces().
    """

    def __init__(self, pieces):
        super().__init__()
        self.pieces, self.read = pieces, {}

    def create_local_plan(self):
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[part for item in plan.items for part in self.parts(item)])
        return self.plan

    def parts(self, item):
        if item.index.fqn not in self.pieces:
            yield item
            return
        for offsets, shape, read in self.pieces[item.index.fqn]:
            index = MetadataIndex(item.index.fqn, offsets)
            self.read[index] = read
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
            yield WriteItem(index, WriteItemType.SHARD,
                            tensor_data=TensorWriteData(chunk, item.tensor_data.properties, item.tensor_data.size))

    def resolve_data(self, item):
        read = self.read.get(item.index)
        return super().resolve_data(item) if read is None else read()


class OneFile(FileSystemWriter):
    """Writes items to one file in sequence. torch's own writer keeps them in memory until the file ends."""

    def write_data(self, plan, planner):
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in plan.items:
                begin, data = stream.tell(), planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(data.getbuffer())
                else:
                    torch.save(data, stream)
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
                del data
            stream.flush()
            os.fsync(stream.fileno())
        written = Future()
        written.set_result(results)
        return written


def write_dcp(target, reader, options):
    """Writes a Tessera checkpoint as {"model": ..., "optim": {"state", "param_groups"}}, as FSDP2's get_state_dict()
    returns."""
    if pathlib.Path(target).exists():
        raise ConvertError(f"{target}: is there already")
    manifest, pieces = reader.manifest, {}

    def lazy(flat_name, saved):
        pieces[flat_name] = reader.pieces(saved)
        entry = manifest["tensors"][saved]
        return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")

    state = {"model": {}}
    for name, entry in manifest["tensors"].items():
        if entry["kind"] in ("parameter", "buffer"):
            for own in (name, *entry.get("aliases", [])):
                state["model"][own] = lazy(f"model.{own}", name)
        elif entry["kind"] == "beside":
            options.warn(f"'{name}' is beside the model, and is left out")
    # torch's state dict of several optimizers has the groups of all; each parameter is in one of them.
    all_optimizers = list(manifest["optimizers"].values()) if manifest.get("optimizers") else [manifest["optimizer"]]
    saved_optimizers = [saved for saved in all_optimizers if saved] if options.optimizer else []
    if saved_optimizers:
        groups = [group for saved in saved_optimizers for group in optimizers.groups_to_torch(saved)]
        by_parameter = {fqn: {} for group in groups for fqn in group["params"]}
        for fqn, numbers in (entry for saved in saved_optimizers for entry in saved["numbers"].items()):
            by_parameter[fqn].update({key: torch.tensor(float(value)) for key, value in numbers.items()})
        for name, entry in manifest["tensors"].items():
            if entry["kind"] == "state":
                key, fqn = name.removeprefix("optim.").split(".", 1)
                by_parameter[fqn][key] = lazy(f"optim.state.{fqn}.{key}", name)
        state["optim"] = {"state": {fqn: own for fqn, own in by_parameter.items() if own}, "param_groups": groups}
    if manifest["extra"]:
        state["extra"] = manifest["extra"]
    try:
        dcp.save(state, storage_writer=OneFile(str(target)), planner=Lazy(pieces), no_dist=True)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        failures = getattr(error, "failures", None)  # of CheckpointException: (exception, traceback) by rank
        raise failures[0][0] if failures and 0 in failures else error from None
