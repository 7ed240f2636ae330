"""Reads the entries of a folder of torch.distributed.checkpoint, which may be damaged or hostile: unpickles nothing but
known classes, and compares the metadata with itself, with the files, and with each tensor that is read.
"""

import math
import pathlib
from collections import defaultdict

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex,
                                                   TensorStorageMetadata)

from . import untrusted
from .checkpoint import ConvertError, refuse_pointer


def follow_one_another(size, chunks):
    """Returns whether each chunk is a range of the tensor's memory that begins where the previous one ends."""
    strides = [math.prod(size[d + 1 :]) for d in range(len(size))]
    end = 0
    for chunk in chunks:
        lead = next((d for d, n in enumerate(chunk.sizes) if n > 1), len(size))
        if any(n != whole for n, whole in zip(chunk.sizes[lead + 1 :], size[lead + 1 :])):
            return False
        if sum(o * s for o, s in zip(chunk.offsets, strides)) != end:
            return False
        end += math.prod(chunk.sizes)
    return end == math.prod(size)


def is_sizes(value):
    return isinstance(value, (tuple, list)) and all(type(n) is int and n >= 0 for n in value)


def filled(chunks):
    return [chunk for chunk in chunks if math.prod(chunk.sizes)]


def overlapping(chunks):
    """Returns two chunks with common elements, or None. Sweeps along the dimension with the most cuts."""
    dimensions = range(len(chunks[0].sizes)) if chunks else ()
    along = max(dimensions, key=lambda d: len({chunk.offsets[d] for chunk in chunks}), default=None)
    if along is None:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    opened = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        opened = [other for other in opened if other.offsets[along] + other.sizes[along] > chunk.offsets[along]]
        for other in opened:
            if all(a < b + m and b < a + n for a, n, b, m in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes)):
                return other, chunk
        opened.append(chunk)
    return None


def text_of(chunk):
    return f"{list(chunk.sizes)} at {list(chunk.offsets)}"


def check_tensor(name, entry):
    """Checks that an entry's chunks are inside the tensor and have each of its elements once."""
    properties, size, chunks = (getattr(entry, field, None) for field in ("properties", "size", "chunks"))
    if not isinstance(getattr(properties, "dtype", None), torch.dtype) or not is_sizes(size) or not isinstance(chunks, (list, tuple)):
        raise ConvertError(f"'{name}' has no dtype, shape or chunks")
    if getattr(properties, "layout", torch.strided) != torch.strided:
        raise ConvertError(f"'{name}' is of the layout {properties.layout}, which is not read")
    for chunk in chunks:
        offsets, sizes = (getattr(chunk, field, None) for field in ("offsets", "sizes"))
        if not isinstance(chunk, ChunkStorageMetadata) or not is_sizes(offsets) or not is_sizes(sizes):
            raise ConvertError(f"'{name}' has a chunk without offsets and sizes")
        if not len(offsets) == len(sizes) == len(size) or any(o + n > whole for o, n, whole in zip(offsets, sizes, size)):
            raise ConvertError(f"'{name}' is {list(size)}; its chunk {text_of(chunk)} is not inside")
    if found := overlapping(filled(chunks)):
        raise ConvertError(f"'{name}' has chunks that overlap: {text_of(found[0])} and {text_of(found[1])}")
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(size):
        raise ConvertError(f"'{name}' is {list(size)}, {math.prod(size)} elements; its chunks have {covered}")


class Folder:
    """`entries` has the metadata by flat name, `paths` the keys of the state dict: ("optim", "state", "0.weight", "exp_avg").
    """

    def __init__(self, path, trust=False):
        self.path, self.trust = pathlib.Path(path), trust
        try:
            metadata = untrusted.load_metadata(self.path / ".metadata", trust)
            self.entries, self.storage, planned = (getattr(metadata, field, None) for field in
                                                   ("state_dict_metadata", "storage_data", "planner_data"))
            if not all(isinstance(part, dict) for part in (self.entries, self.storage, planned or {})):
                raise ConvertError("has no entries or no places of them in files")
            if "planner_data" not in vars(metadata):  # the class has a default, which a damaged name of this field reveals
                raise ConvertError("has no planner_data")
            self.check_entries()
            # Without flattening, there are no keys of any entry: the names are those of the state dict.
            self.paths = {name: tuple((planned or {name: (name,)}).get(name, ())) for name in self.entries}
            for name, keys in self.paths.items():
                if not keys:
                    raise ConvertError(f"'{name}' has no keys")
        except ConvertError as error:
            raise ConvertError(f"{self.path / '.metadata'}: is damaged: {error}") from None

    def check_entries(self):
        used = defaultdict(list)  # by file: (begin, end, name)
        for name, entry in self.entries.items():
            if not isinstance(name, str):
                raise ConvertError(f"an entry has the name {name!r}")
            if isinstance(entry, TensorStorageMetadata):
                check_tensor(name, entry)
                for chunk in filled(entry.chunks):
                    place = self.place(name, chunk.offsets)
                    if not place.transform_descriptors and place.length < math.prod(chunk.sizes) * entry.properties.dtype.itemsize:
                        raise ConvertError(f"'{name}': its chunk {text_of(chunk)} has {place.length} bytes")
                    used[place.relative_path].append((place.offset, place.offset + place.length, name))
            elif isinstance(entry, BytesStorageMetadata):
                place = self.place(name)
                used[place.relative_path].append((place.offset, place.offset + place.length, name))
            else:
                raise ConvertError(f"'{name}' is neither a tensor nor bytes")
        for index in self.storage:
            if getattr(index, "fqn", None) not in self.entries:
                raise ConvertError(f"has a place in the files for '{getattr(index, 'fqn', index)}', and no entry of this name")
        for file, ranges in used.items():
            self.check_ranges(file, sorted(ranges))

    def check_ranges(self, file, ranges):
        try:
            held = (self.path / file).stat().st_size
            with open(self.path / file, "rb") as opened:
                beginning = opened.read(64)
        except OSError:
            raise ConvertError(f"the file {file}, of '{ranges[0][2]}', is missing") from None
        refuse_pointer(beginning, file)
        for (_, end, name), (begin, _, other) in zip(ranges, ranges[1:]):
            if begin < end:
                raise ConvertError(f"'{name}' and '{other}' have the same bytes of {file}")
        if ranges[-1][1] > held:
            raise ConvertError(f"'{ranges[-1][2]}' ends at byte {ranges[-1][1]} of {file}, which has {held}")

    def place(self, name, offsets=None):
        """The bytes of an entry, or of a tensor's chunk at `offsets`, in the files."""
        place = self.storage.get(MetadataIndex(name, offsets))
        if not isinstance(place, _StorageInfo):
            raise ConvertError(f"'{name}' has no place in the files" + (f" for its chunk at {list(offsets)}" if offsets else ""))
        path, *numbers = (getattr(place, field, None) for field in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or pathlib.PurePath(path).is_absolute() or ".." in pathlib.PurePath(path).parts or not is_sizes(numbers):
            raise ConvertError(f"'{name}' has the place {path!r}, {numbers}")
        return place

    def load_from(self, place, name):
        """Returns the object of torch.save at a place."""
        with open(self.path / place.relative_path, "rb") as file:
            stream = untrusted.Part(file, place.offset, place.length)
            where = f"{self.path / place.relative_path}: '{name}'"
            if place.transform_descriptors:
                stream = untrusted.buffered(_StorageReaderTransforms().transform_load_stream(None, place.transform_descriptors, stream), where)
            return untrusted.load_stream(stream, where, self.trust)

    def read(self, name):
        """Returns a tensor whole, or the value of another entry."""
        entry = self.entries[name]
        if not isinstance(entry, TensorStorageMetadata):
            return self.load_from(self.place(name), name)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in filled(entry.chunks):
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))] = self.read_chunk(name, chunk)
        return whole

    def load(self, name):
        """Returns a tensor chunk by chunk as it was saved, if chunks are consecutive; otherwise whole."""
        entry = self.entries[name]
        chunks = sorted(filled(entry.chunks), key=lambda chunk: tuple(chunk.offsets))
        if not follow_one_another(entry.size, chunks):
            return self.read(name)
        return (self.read_chunk(name, chunk) for chunk in chunks)

    def read_chunk(self, name, chunk):
        place, dtype = self.place(name, chunk.offsets), self.entries[name].properties.dtype
        tensor = self.load_from(place, name)
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu" or \
                (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(chunk.sizes)):
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise ConvertError(f"{self.path / place.relative_path}: '{name}' is {found}; .metadata has {dtype} {list(chunk.sizes)}")
        return tensor

    def number(self, name):
        """Returns the value of a small entry: of a tensor without dimensions, its number."""
        value = self.spec(name)
        return self.read(name).item() if isinstance(value, tuple) and not value[1] else value

    def spec(self, name):
        """Returns (dtype, shape, load) of a tensor, or the value of a small entry."""
        entry = self.entries[name]
        if not isinstance(entry, TensorStorageMetadata):
            return self.read(name)
        return entry.properties.dtype, list(entry.size), lambda: self.load(name)
