"""Reads and writes Tessera's checkpoints, format 2 (checkpoint/format/FORMAT.md), one piece of a tensor at a time."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import pathlib
import re
import secrets
import struct
from typing import Callable, Iterator

import torch
import xxhash

from . import json_text

BLOCK_BYTES = 1 << 20
PIECE_BYTES = 32 << 20  # memory for a tensor that can be read in pieces
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class ConvertError(Exception):
    pass


def refuse_pointer(beginning, where):
    """Throws if a file is a pointer of Git LFS, as in a clone made without git-lfs."""
    if beginning.startswith(b"version https://git-lfs"):
        raise ConvertError(f"{where}: is a pointer of Git LFS, not the file itself: fetch it by `git lfs pull`")


@dataclasses.dataclass
class Tensor:
    """A tensor to load: `load()` returns it whole, or as consecutive pieces in memory order; must be called once."""

    name: str
    kind: str  # "parameter", "buffer", "state"
    dtype: torch.dtype
    shape: list
    load: Callable[[], torch.Tensor | Iterator[torch.Tensor]]
    aliases: list = dataclasses.field(default_factory=list)

    @property
    def bytes(self):
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass
class Checkpoint:
    """`optimizer`: None, or {"kind", "groups": [{"options", "parameters"}], "numbers"}, as in the manifest."""

    tensors: list
    optimizer: dict | None = None
    extra: dict = dataclasses.field(default_factory=dict)


def xxh3(data):
    return xxhash.xxh3_64_hexdigest(data)


def bytes_of(tensor):
    """A tensor's values in memory, without a copy unless they are conjugated, negated or strided."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


class BlockSums:
    """The checksums of data that arrives in pieces."""

    def __init__(self):
        self.ended, self.open, self.room = [], xxhash.xxh3_64(), BLOCK_BYTES

    def add(self, data):
        while len(data):
            part, data = data[: self.room], data[self.room :]
            self.open.update(part)
            self.room -= len(part)
            if not self.room:
                self.end_block()

    def end_block(self):
        self.ended.append(self.open.hexdigest())
        self.open, self.room = xxhash.xxh3_64(), BLOCK_BYTES

    def text(self):
        if self.room < BLOCK_BYTES:
            self.end_block()
        return "".join(self.ended)


def boxes_of(shape, most_numel):
    """Returns a tensor's boxes of at most this many elements, (offsets, shape), each a range of its memory, in order.
    """
    lead = next((d for d, n in enumerate(shape) if n > 1), None)
    if lead is None or math.prod(shape) <= most_numel:
        yield [0] * len(shape), list(shape)
        return
    rows = max(1, most_numel // math.prod(shape[lead + 1 :]))
    for begin in range(0, shape[lead], rows):
        part = [*shape[:lead], min(rows, shape[lead] - begin), *shape[lead + 1 :]]
        for offsets, sizes in boxes_of(part, most_numel):
            offsets[lead] += begin
            yield offsets, sizes


def header_of(entries, checksums, identity):
    """Returns the first bytes of rank 0's only file, with its checksum. Its length does not depend on the checksums."""
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
    """Refuses values that the manifest's readers would misread or take for damage."""
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
    """Writes a checkpoint of one rank, with one tensor or piece in memory. The folder appears when it is complete."""
    target = pathlib.Path(target)
    if target.exists():
        raise ConvertError(f"{target}: is there already")
    names = [name for entry in checkpoint.tensors for name in (entry.name, *entry.aliases)]
    if len(set(names)) < len(names):
        raise ConvertError(f"there are two tensors '{next(name for name in names if names.count(name) > 1)}'")
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
                checksums[entry.name] = write_tensor(file, entry)
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


def write_tensor(file, entry):
    """Writes a tensor's data. Returns the checksums of its blocks."""
    sums, have = BlockSums(), 0
    loaded = entry.load()
    if isinstance(loaded, torch.Tensor):
        if list(loaded.shape) != list(entry.shape):
            raise ConvertError(f"'{entry.name}' is {list(loaded.shape)}; expected {entry.shape}")
        loaded = iter((loaded,))
    for piece in loaded:
        if piece.dtype != entry.dtype:
            raise ConvertError(f"'{entry.name}' is {piece.dtype}; expected {entry.dtype}")
        data = bytes_of(piece)
        sums.add(data)
        file.write(data)
        have += piece.numel()
        del piece, data  # before the next is read
    if have != math.prod(entry.shape):
        raise ConvertError(f"'{entry.name}' has {have} elements; expected {math.prod(entry.shape)}")
    return sums.text()


def read_at(file, position, data, name):
    file.seek(position)
    while len(data):
        got = file.readinto(data)
        if not got:
            raise ConvertError(f"{file.name}: is truncated in '{name}'")
        data = data[got:]


def next_sequence(folder):
    """One more than the largest sequence of the checkpoints there, so that this one is the newest."""
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


@contextlib.contextmanager
def damage_named(path):
    """Turns the many kinds of errors that damaged JSON raises into a ConvertError with the path."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise ConvertError(f"{path}: is damaged: {error}") from None


class Reader:
    """Reads a checkpoint of any number of ranks in verified pieces, and locks it against removal."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        try:
            self.hold = open(self.folder / "tessera.json", "rb")
        except FileNotFoundError:
            raise ConvertError(f"{folder}: is not a checkpoint: it has no tessera.json") from None
        try:  # a shared lock on the whole file, as in FORMAT.md
            fcntl.fcntl(self.hold, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            pass  # no locks on this file system
        with damage_named(self.folder / "tessera.json"):
            text = self.hold.read()
            refuse_pointer(text, self.folder / "tessera.json")
            self.manifest = json.loads(text.decode())
            self.check_manifest()
            self.files = self.folder / self.manifest.get("folder", "")
        self.slices = {}  # by name: (file, offsets, shape, begin, checksums)
        for path in sorted(self.files.glob("rank-*.safetensors")):
            with damage_named(path):
                self.list_file(path)

    def check_manifest(self):
        if self.manifest.get("version") != 2:
            raise ConvertError(f"{self.folder}: is of format version {self.manifest.get('version')}; `tessera reshard` makes "
                               "version 2 of it")
        if sum_of_manifest(self.manifest) != self.manifest["checksum"]:
            raise ConvertError(f"{self.folder}: tessera.json: its checksum does not match: the manifest is damaged")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hold.close()

    def list_file(self, path):
        with open(path, "rb") as file:
            beginning = file.read(64)
            refuse_pointer(beginning, path)
            (length,) = struct.unpack("<Q", beginning[:8])
            file.seek(8)
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

    def pieces(self, name):
        """The parts of a tensor: (offsets, shape, read) of its boxes, large ones split. `read()` verifies."""
        entry = self.manifest["tensors"][name]
        dtype, slices = DTYPES[entry["dtype"]], self.slices.get(name, [])
        found = sum(math.prod(shape) for _, _, shape, _, _ in slices)
        if found != math.prod(entry["shape"]):
            raise ConvertError(f"{self.folder}: '{name}' has {math.prod(entry['shape'])} elements; its files have {found}")
        most_numel = max(PIECE_BYTES, self.manifest["block_bytes"]) // dtype.itemsize
        for path, offsets, whole, begin, checksums in slices:
            slice_bytes, first = math.prod(whole) * dtype.itemsize, 0
            for inside, shape in boxes_of(whole, most_numel):
                last = first + math.prod(shape) * dtype.itemsize
                read = functools.partial(self.read, path, name, begin, slice_bytes, (first, last), checksums)
                yield [a + b for a, b in zip(offsets, inside)], shape, lambda r=read, s=shape: r().view(dtype).view(s)
                first = last

    def read(self, path, name, begin, slice_bytes, wanted, checksums):
        """Reads bytes of a slice from `begin`; also reads and verifies the rest of their blocks."""
        block, (first, last) = self.manifest["block_bytes"], wanted
        found = torch.empty(last - first, dtype=torch.uint8)
        data = bytes_of(found)
        with open(path, "rb", buffering=0) as file:
            for number in range(first // block, -(-last // block)):
                start, end = number * block, min((number + 1) * block, slice_bytes)
                is_whole = first <= start and end <= last
                part = data[start - first : end - first] if is_whole else memoryview(bytearray(end - start))
                read_at(file, begin + start, part, name)
                if xxh3(part) != checksums[number * 16 : number * 16 + 16]:
                    raise ConvertError(f"{path}: tensor '{name}' is damaged")
                if not is_whole:
                    a, b = max(start, first), min(end, last)
                    data[a - first : b - first] = part[a - start : b - start]
        return found
