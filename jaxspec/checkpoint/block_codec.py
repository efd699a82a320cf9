"""Blocks to numbers and back on the host, a cacheful at a time, with the `gguf` package's arithmetic."""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pallas_kernels.linear.blocks import FORMATS

# Values converted at once: enough that numpy's fixed costs vanish, few enough to stay in a core's cache. The package's
# own loop takes 16 rows at a time, which for narrow models is mostly overhead.
_CHUNK_VALUES = 64 * 1024


def format_of(kind: GGMLQuantizationType) -> str | None:
    """Name in `FORMATS` of a GGUF tensor type; None for those that are not kept in blocks."""
    name = kind.name.lower()
    return name if name in FORMATS else None


def type_of(block_format: str) -> GGMLQuantizationType:
    """GGUF tensor type of a name in `FORMATS`."""
    return GGMLQuantizationType[block_format.upper()]


def decode_blocks(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The values of blocks of any GGUF tensor type that the package dequantises.

    Args:
      raw: uint8, whole blocks in any shape.
      kind: their type.

    Returns:
      float32 `[number of values]`.
    """
    values, nbytes = GGML_QUANT_SIZES[kind]
    # Blocks know nothing of rows, so chunks need not either.
    blocks = raw.reshape(-1, nbytes)
    decoded = np.empty((len(blocks), values), np.float32)
    step = _CHUNK_VALUES // values
    with np.errstate(all="ignore"):  # damaged scales give infinities, not warnings
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step].reshape(1, -1)
            decoded[start : start + step] = dequantize(chunk, kind).reshape(-1, values)
    return decoded.reshape(-1)


def encode_blocks(numbers: np.ndarray, block_format: str) -> np.ndarray:
    """Quantise numbers to one of the formats that the package can make.

    Args:
      numbers: float32 `[..., I]`, where I is a whole number of blocks.
      block_format: a name in `FORMATS`.

    Returns:
      uint8 `[number of blocks, nbytes]`.
    """
    shape = FORMATS[block_format]
    rows = numbers.reshape(-1, shape.values)
    encoded = np.empty((len(rows), shape.nbytes), np.uint8)
    step = _CHUNK_VALUES // shape.values
    with np.errstate(all="ignore"):  # weights that are no numbers have no blocks
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step].reshape(1, -1)
            encoded[start : start + step] = quantize(chunk, type_of(block_format)).reshape(-1, shape.nbytes)
    return encoded
