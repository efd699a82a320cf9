"""Repacking of weights in blocks for integer products: `packed_formats.h` has the layout."""

import numpy as np

from pallas_kernels import native
from pallas_kernels.linear.blocks import ACTIVATIONS, FORMATS, PACKED, packed_name

# JAX keeps an array's memory without a copy where it begins at a multiple of so many bytes.
_ALIGNMENT = 64


def pack_blocks(rows: np.ndarray, name: str, outputs: int, out: np.ndarray | None = None) -> np.ndarray:
    """Pack a weight of one device: codes and scales of sixteen outputs side by side. The interpreter lock is released.

    Args:
      rows: uint8 `[...outputs, ...inputs / values, nbytes]`, in the file's blocks.
      name: its format, one of `FORMATS` with integer codes.
      outputs: number of outputs, the product of the first dimensions.
      out: contiguous memory for the result; None for new memory.

    Returns:
      uint8 of the same shape with the packed format's `nbytes`, whose bytes only mean something as a whole.

    Raises:
      ValueError: the bytes are no blocks of this format.
      RuntimeError: there is no native library.
    """
    can_pack = name in FORMATS and FORMATS[name].has_integers
    is_blocks = rows.dtype == np.uint8 and rows.ndim > 1 and can_pack and rows.shape[-1] == FORMATS[name].nbytes
    if not is_blocks or outputs < 1 or rows.size % (outputs * rows.shape[-1]):
        raise ValueError(f"{rows.dtype} {rows.shape} is no array of {name!r} blocks with {outputs} outputs")
    # The bytes are the same for all activations.
    packed = packed_name(name, ACTIVATIONS[0])
    rows = np.ascontiguousarray(rows)
    shape = (*rows.shape[:-1], PACKED[packed].nbytes)
    if out is None:
        out = _empty(shape)
    elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"{out.dtype} {out.shape} cannot hold packed blocks of shape {shape}")
    blocks = rows.size // (outputs * rows.shape[-1])
    if native.pack(packed, rows, outputs, blocks, out) != 1:
        raise RuntimeError(f"the native library packs no {name}; {native.REINSTALL}")
    return out


def _empty(shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    buffer = np.empty(count + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + count].reshape(shape)
