"""Places of the tensors in a `pytorch_model.bin`; nothing of it is run and torch is not needed.

Such a file is a zip archive of raw storages and one pickle that describes the tensors. The pickle is read by an
unpickler that knows dictionaries, tensors and storages; any other name in it is refused before anything is called.
"""

import collections
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.hf import TensorPlace
from jaxspec.errors import CheckpointError

_DTYPES = {
    "FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2"), "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"), "IntStorage": np.dtype("<i4"), "BoolStorage": np.dtype(np.bool_),
}  # fmt: skip
# The description of a draft is a few kilobytes; a longer one is no such file.
_LONGEST_PICKLE = 1 << 24
_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    numel: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def find_torch_tensors(file: Path) -> dict[str, TensorPlace]:
    """The tensors of a file that `torch.save` wrote from a dictionary of tensors, by name.

    Raises:
      CheckpointError: the file is damaged, is in the format of before 2020, asks for anything but tensors, or holds a
        tensor that does not lie in one piece.
    """
    try:
        with zipfile.ZipFile(file) as archive, open(file, "rb") as raw:
            described = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if len(described) != 1 or described[0].file_size > _LONGEST_PICKLE:
                raise CheckpointError(f"{file}: holds {len(described)} descriptions of tensors (data.pkl), not one")
            prefix = described[0].filename.removesuffix("data.pkl")
            if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder") != b"little":
                raise CheckpointError(f"{file}: its numbers are not little-endian")
            held = _Reader(io.BytesIO(archive.read(described[0]))).load()
            if not isinstance(held, dict):
                raise CheckpointError(f"{file}: holds a {type(held).__name__}, not tensors by name")
            entries = {info.filename: info for info in archive.infolist()}
            return {
                str(name): _locate(file, raw, entries, prefix, str(name), tensor)
                for name, tensor in held.items()
            }  # fmt: skip
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged pickle or archive raises is not foreseeable
        raise CheckpointError(f"{file}: is damaged or no file of tensors: {error}") from error


class _Reader(pickle.Unpickler):
    """Builds dictionaries, and tensors as places."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is no tensor; it was not opened")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"refers to {str(kind)[:60]!r}, which is no storage")
        return _Storage(str(key), dtype, int(numel))


def _rebuild(storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _locate(file: Path, raw: Any, entries: dict, prefix: str, name: str, tensor: Any) -> TensorPlace:
    if not isinstance(tensor, _Tensor):
        raise CheckpointError(f"{file}: {name!r} is a {type(tensor).__name__}, not a tensor")
    storage, size = tensor.storage, math.prod(tensor.shape)
    expected = tuple(math.prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape)))
    whole = all(a == b or n == 1 for a, b, n in zip(tensor.stride, expected, tensor.shape, strict=True))
    if not whole or tensor.offset < 0 or tensor.offset + size > storage.numel:
        raise CheckpointError(f"{file}: tensor {name!r} does not lie in one piece of its storage")
    entry = entries.get(f"{prefix}data/{storage.key}")
    item = storage.dtype.itemsize
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.numel * item:
        raise CheckpointError(f"{file}: the storage of tensor {name!r} is missing, compressed or of another size")
    raw.seek(entry.header_offset)
    header = raw.read(_LOCAL_HEADER)
    begin = entry.header_offset + _LOCAL_HEADER
    begin += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if header[:4] != b"PK\x03\x04" or begin + entry.file_size > file.stat().st_size:
        raise CheckpointError(f"{file}: the storage of tensor {name!r} lies outside of the file")
    return TensorPlace(file, tensor.shape, storage.dtype, begin + tensor.offset * item, size * item)
