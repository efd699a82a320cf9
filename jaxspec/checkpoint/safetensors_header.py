"""Headers of safetensors files, checked against the file before a weight is touched.

Format: 8 bytes of header length, that much JSON, then the tensors without gaps. The rules are those of the
`safetensors` package; parsing the header here gives errors that name the tensor, and tensors as views of the
mapped file, bfloat16 included.
"""

import dataclasses
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.json_file import parse_json
from jaxspec.errors import CheckpointError

# The package's own limit.
_MAX_HEADER = 100_000_000
_MAX_DIMS = 8

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """Where one tensor lies: shape, dtype, and absolute offset in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_safetensors_header(path: Path) -> dict[str, SafeTensor]:
    """Directory of a safetensors file, by tensor name.

    Raises:
      CheckpointError: the file is damaged or hostile, or holds a type other than F32, F16 and BF16.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: claims a safetensors header of {length} bytes, the file has {max(size - 8, 0)} left"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    entries = parse_json(raw, f"{path} (header)")
    entries.pop("__metadata__", None)
    tensors = {name: _check_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _check_entry(path: Path, name: str, entry: object, start: int) -> SafeTensor:
    def is_size(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    def are_sizes(values: object, most: int) -> bool:
        return isinstance(values, list) and len(values) <= most and all(is_size(v) for v in values)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: entry of tensor {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has type {dtype!r}; supported: {', '.join(DTYPES)}")
    if not are_sizes(shape, _MAX_DIMS):
        raise CheckpointError(f"{path}: tensor {name!r} has an invalid shape {str(shape)[:60]}")
    if not are_sizes(offsets, 2) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has invalid data_offsets {str(offsets)[:60]}")
    tensor = SafeTensor(tuple(shape), DTYPES[dtype], start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} and type {dtype} needs {tensor.nbytes} bytes, "
            f"its data_offsets give it {offsets[1] - offsets[0]}"
        )
    return tensor


def _check_layout(path: Path, tensors: dict[str, SafeTensor], start: int, size: int) -> None:
    """The tensors follow one another without gap or overlap, and fill the file."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            how = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {tensor.offset}, not {end}: it {how}")
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(f"{path}: tensors end at byte {end}, the file has {size}: truncated or overlong")
