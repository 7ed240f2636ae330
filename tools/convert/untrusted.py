"""Reads pickles and archives of torch that may be damaged or hostile."""

import ctypes
import io
import os
import pickle
import signal
import sys
import threading
import zipfile

import torch

from .checkpoint import ConvertError, refuse_pointer

CHUNK_BYTES = 1 << 20
handlers = []  # signal handlers; kept here because ctypes holds no reference
METADATA = "torch.distributed.checkpoint.metadata"
OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
# The classes and functions of which a .metadata file consists. None has side effects.
ALLOWED = {
    *((METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                                    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (OLD_METADATA, "TensorProperties"), (OLD_METADATA, "MEM_FORMAT_ENCODING"),
    (FILESYSTEM, "_StorageInfo"), (FILESYSTEM, "_StoragePrefix"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
}
PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in PATHS:
            return lambda *parts: "/".join(map(str, parts))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in ALLOWED:
            raise ConvertError(f"names {module}.{name}, which is not part of torch.distributed.checkpoint's metadata and may "
                               "run code: --trust reads it all the same")
        return super().find_class(module, name)


class NeedsTrust(ConvertError):
    """The file has objects other than tensors, numbers, texts and containers of these."""


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def load_metadata(path, trust=False):
    """Returns the object in a .metadata file. Its attributes are not checked."""
    with open(path, "rb") as file:
        refuse_pointer(file.read(64), path)
        file.seek(0)
        try:
            return (pickle.Unpickler if trust else MetadataUnpickler)(file).load()
        except ConvertError as error:
            raise ConvertError(f"{path}: {error}") from None
        except Exception as error:  # damaged pickles raise errors of every kind
            raise ConvertError(f"{path}: is damaged: {first_line(error)}") from None


def check_archive(stream, where):
    """Compares the members of torch.save's zip with their CRC-32, which torch.load ignores. Returns whether it is a zip."""
    stream.seek(0)
    beginning = stream.read(64)
    refuse_pointer(beginning, where)
    is_zip = beginning.startswith(b"PK\3\4")
    stream.seek(0)
    if not is_zip and not beginning.startswith(b"\x80"):  # neither a zip nor a pickle
        raise ConvertError(f"{where}: is not a file of torch.save")
    if not is_zip:
        return False  # the format before torch 1.6, which has no checksums
    try:
        with zipfile.ZipFile(stream) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ConvertError(f"'{member.filename}' is compressed")
                if member.CRC == 0:
                    continue  # empty, or saved with set_crc32_options(False)
                with archive.open(member) as data:
                    while data.read(CHUNK_BYTES):
                        pass
    except Exception as error:  # damaged archives raise errors of every kind
        raise ConvertError(f"{where}: is damaged: {first_line(error)}") from None
    stream.seek(0)
    return True


def load(source, where, trust, **options):
    """torch.load() of a path or stream that passed check_archive()."""
    try:
        return torch.load(source, map_location="cpu", weights_only=not trust, **options)
    except Exception as error:  # damaged pickles raise errors of every kind
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise NeedsTrust(f"{where}: has other things than tensors and numbers, which unpickling would run as code: "
                               "--trust reads it all the same") from None
        raise ConvertError(f"{where}: is damaged: {first_line(error)}") from None


class Part(io.RawIOBase):
    """A range of a file."""

    def __init__(self, file, begin, length):
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence])
        return self.at

    def readinto(self, target):
        target = memoryview(target)[: max(0, self.length - self.at)]
        self.file.seek(self.begin + self.at)
        count = self.file.readinto(target)
        self.at += count
        return count


def buffered(stream, where):
    """Returns a seekable copy of a stream that decompresses."""
    try:
        return io.BytesIO(stream.read())
    except Exception as error:  # damaged streams raise errors of every kind
        raise ConvertError(f"{where}: is damaged: {first_line(error)}") from None


def load_stream(stream, where, trust):
    """Returns the object that torch.save wrote to a seekable stream."""
    check_archive(stream, where)
    return load(stream, where, trust)


def load_file(path, trust):
    """Memory-maps the file if possible, so that a tensor takes memory only when it is read. If the file becomes shorter
    meanwhile, ends the process with an error."""
    with open(path, "rb") as file:
        is_zip = check_archive(file, path)
    end_if_cut(path)
    return load(path, path, trust, mmap=is_zip)


def end_if_cut(path):
    """Ends the process if a later read of mapped memory is beyond the end of its file. Python's own signal handlers never
    run then, because the read is repeated."""
    line = f"tessera-convert: {path}: became shorter while it was read\n".encode()
    ending = threading.Lock()

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def end(_number):
        ending.acquire()  # never released: a second thread of a parallel read waits here for the end
        os.write(sys.stderr.fileno(), line)
        os._exit(1)

    ctypes.CDLL(None).signal(signal.SIGBUS, end)
    handlers.append(end)
