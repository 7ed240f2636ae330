"""Tessera's checkpoints, format 2 (checkpoint/FORMAT.md), read and written a tensor at a time."""

import dataclasses
import fcntl
import json
import math
import os
import pathlib
import re
import secrets
import struct
from typing import Callable

import torch
import xxhash

from . import json_text

BLOCK_BYTES = 1 << 20
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class ConvertError(Exception):
    pass


@dataclasses.dataclass
class Tensor:
    """A tensor that is to be had: `load()` gives it whole, and is called once."""

    name: str
    kind: str  # "parameter", "buffer", "state"
    dtype: torch.dtype
    shape: list
    load: Callable[[], torch.Tensor]
    aliases: list = dataclasses.field(default_factory=list)

    @property
    def bytes(self):
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass
class Checkpoint:
    """`optimizer`: None, or {"kind", "groups": [{"options", "parameters"}], "numbers"}, as the manifest has it."""

    tensors: list
    optimizer: dict | None = None
    extra: dict = dataclasses.field(default_factory=dict)


def xxh3(data):
    return xxhash.xxh3_64_hexdigest(data)


def bytes_of(tensor):
    """A tensor's memory, without a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def header_of(entries, checksums, identity):
    """The first bytes of rank 0's only file, sealed; as long whatever the checksums are."""
    sums = {e.name: checksums.get(e.name, "0" * (16 * -(-e.bytes // BLOCK_BYTES))) for e in entries}
    note = {"id": identity, "rank": 0, "block_bytes": BLOCK_BYTES, "checksums": sums}
    places = {e.name: {"saved_offsets": [0] * len(e.shape)} for e in entries}
    header = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "TESSERA": json.dumps(note),
                               "TESSERA_CHECKSUM": "0" * 16, "format": "pt"}}
    begin = 0
    for entry in entries:
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, begin + entry.bytes]}
        begin += entry.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % 64)
    if len(text) > 100_000_000:
        raise ConvertError(f"{len(entries)} tensors: a header of {len(text)} bytes is more than safetensors allows")
    whole = struct.pack("<Q", len(text)) + text
    return whole.replace(b'"TESSERA_CHECKSUM":"' + b"0" * 16, b'"TESSERA_CHECKSUM":"' + xxh3(whole).encode(), 1)


def sum_of_manifest(manifest):
    fields = {name: value for name, value in manifest.items() if name != "checksum"}
    return xxh3(json_text.dumps(fields).encode())


def check_values(value, where):
    """What the manifest's readers would take for something else, or for damage."""
    if isinstance(value, dict):
        for key, entry in value.items():
            check_values(str(key), where)
            check_values(entry, f"{where}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            check_values(entry, f"{where}/{i}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConvertError(f"{where} is {value}, which JSON has no number for")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConvertError(f"{where} is {value}, which has more than 64 bits")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConvertError(f"{where} has characters that UTF-8 does not") from None


def write(target, checkpoint, progress=lambda name: None):
    """Writes a checkpoint of one rank, in the memory of one tensor. The folder appears when it is complete."""
    target = pathlib.Path(target)
    if target.exists():
        raise ConvertError(f"{target}: is there already")
    for entry in checkpoint.tensors:
        if entry.dtype not in NAMES:
            raise ConvertError(f"'{entry.name}' has the dtype {entry.dtype}, which safetensors files have no name for")
    check_values(checkpoint.extra, "extra")
    check_values(checkpoint.optimizer, "optimizer")
    identity = secrets.token_hex(8)
    partial = target.parent / f".{target.name}.converting-{identity}"
    partial.mkdir(parents=True)
    try:
        entries, checksums = checkpoint.tensors, {}
        with open(partial / "rank-00000-0.safetensors", "xb") as file:
            file.write(header_of(entries, {}, identity))
            for entry in entries:
                progress(entry.name)
                tensor = entry.load()
                if list(tensor.shape) != list(entry.shape) or tensor.dtype != entry.dtype:
                    raise ConvertError(f"'{entry.name}' is {tensor.dtype} {list(tensor.shape)}; expected {entry.dtype} {entry.shape}")
                data = bytes_of(tensor)
                checksums[entry.name] = "".join(xxh3(data[i:i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES))
                file.write(data)
                del tensor, data
            file.seek(0)
            file.write(header_of(entries, checksums, identity))
            file.flush()
            os.fsync(file.fileno())
        write_manifest(partial, checkpoint, identity, next_sequence(target.parent))
        partial.rename(target)
        sync_folder(target.parent)
    except BaseException:
        for file in partial.iterdir():
            file.unlink()
        partial.rmdir()
        raise


def next_sequence(folder):
    """One more than the largest among the checkpoints there, so that this one is the newest."""
    largest = 0
    for manifest in folder.glob("[!.]*/tessera.json"):
        with open(manifest, "rb") as file:
            found = re.search(rb'"format": "tessera-checkpoint".*"sequence": (\d+)', file.read(256), re.DOTALL)
        largest = max(largest, int(found[1]) if found else 0)
    return largest + 1


def write_manifest(folder, checkpoint, identity, sequence):
    tensors = {}
    for entry in checkpoint.tensors:
        tensors[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "kind": entry.kind,
                               "runs": [[0, 0, 1, 0, torch.Size(entry.shape).numel()]]}
        if entry.aliases:
            tensors[entry.name]["aliases"] = entry.aliases
    manifest = {"format": "tessera-checkpoint", "version": 2, "sequence": sequence, "id": identity, "world_size": 1,
                "block_bytes": BLOCK_BYTES, "extra": checkpoint.extra, "optimizer": checkpoint.optimizer,
                "tensors": tensors, "rng": False}
    manifest["checksum"] = sum_of_manifest(manifest)
    with open(folder / "tessera.json", "x", encoding="utf-8") as file:
        file.write(json.dumps(manifest, ensure_ascii=False, allow_nan=False))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Reader:
    """A checkpoint of any number of ranks. `tensor(name)` reads one whole, and verifies it. Nobody removes it meanwhile."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        try:
            self.hold = open(self.folder / "tessera.json", "rb")
            try:  # a shared lock on all of it, as FORMAT.md has it
                fcntl.fcntl(self.hold, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
            except OSError:
                pass  # there are no locks on this file system
            self.manifest = json.loads(self.hold.read().decode())
        except FileNotFoundError:
            raise ConvertError(f"{folder}: is not a checkpoint: it has no tessera.json") from None
        if self.manifest.get("version") != 2:
            raise ConvertError(f"{folder}: is of format version {self.manifest.get('version')}; `tessera reshard` makes version 2 of it")
        if sum_of_manifest(self.manifest) != self.manifest["checksum"]:
            raise ConvertError(f"{folder}: tessera.json: its checksum does not match: the manifest is damaged")
        self.files = self.folder / self.manifest.get("folder", "")
        self.slices = {}  # by name: (file, offsets, shape, begin, checksums)
        for path in sorted(self.files.glob("rank-*.safetensors")):
            self.list_file(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hold.close()

    def list_file(self, path):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            text = file.read(length)
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        note, places = json.loads(metadata["TESSERA"]), json.loads(metadata["DCP_SHARDING_INFO"])
        seal = f'"TESSERA_CHECKSUM":"{metadata["TESSERA_CHECKSUM"]}'.encode()
        whole = struct.pack("<Q", length) + text.replace(seal, seal[:-16] + b"0" * 16, 1)
        if xxh3(whole) != metadata["TESSERA_CHECKSUM"]:
            raise ConvertError(f"{path}: the checksum of its header does not match: the file is damaged")
        if note["id"] != self.manifest["id"]:
            raise ConvertError(f"{path}: is of another checkpoint")
        for name, entry in header.items():
            self.slices.setdefault(name, []).append(
                (path, places[name]["saved_offsets"], entry["shape"], 8 + length + entry["data_offsets"][0], note["checksums"][name]))

    def tensor(self, name):
        entry = self.manifest["tensors"][name]
        whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        found = 0
        for path, offsets, shape, begin, checksums in self.slices.get(name, []):
            part = torch.empty(shape, dtype=whole.dtype)
            data, block = bytes_of(part), self.manifest["block_bytes"]
            with open(path, "rb") as file:
                file.seek(begin)
                if file.readinto(data) != len(data):
                    raise ConvertError(f"{path}: is truncated in '{name}'")
            if "".join(xxh3(data[i:i + block]) for i in range(0, len(data), block)) != checksums:
                raise ConvertError(f"{path}: tensor '{name}' is damaged")
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape))] = part
            found += part.numel()
        if found != whole.numel():
            raise ConvertError(f"{self.folder}: '{name}' has {whole.numel()} elements; its files have {found}")
        return whole
