"""Weights kept in the blocks of a GGUF file: some values share a scale, and each takes 4 to 8 bits.

The formats are ggml's (ggml-common.h, ggml-quants.c). A block holds `values` consecutive weights of one row in
`nbytes` bytes. In every format zero bytes decode to zeros, so blocks are padded with zeros as numbers are.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A block format: its name, and the number of values and of bytes in a block."""

    name: str
    values: int
    nbytes: int


FORMATS: dict[str, BlockFormat] = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("q8_0", 32, 34),
        BlockFormat("q4_0", 32, 18),
        BlockFormat("q4_1", 32, 20),
        BlockFormat("q5_0", 32, 22),
        BlockFormat("q4_k", 256, 144),
        BlockFormat("q6_k", 256, 210),
    )
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A weight in blocks along its input dimension.

    Attributes:
      data: uint8 `[..., I / values, nbytes]`, the bytes of the GGUF file.
      format: a name in `FORMATS`.
    """

    data: jax.Array
    format: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the bytes, not that of the values."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the bytes, one more than that of the values."""
        return self.data.ndim

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes


Weight = jax.Array | Blocks


def as_matrix(weight: Weight, outputs: int) -> Weight:
    """A weight of any rank as the matrix that `linear` takes. Nothing moves in memory.

    Args:
      weight: numbers `[...outputs, ...inputs]`, or blocks with data `[...outputs, ...inputs / values, nbytes]`.
      outputs: rows of the matrix, the product of the output dimensions.

    Returns:
      `[outputs, I]`, or blocks with data `[outputs, I / values, nbytes]`.
    """
    if isinstance(weight, Blocks):
        return Blocks(weight.data.reshape(outputs, -1, weight.shape[-1]), weight.format)
    return weight.reshape(outputs, -1)


def dequantise(blocks: Blocks) -> jax.Array:
    """The values of blocks, which the products of every kernel are compared with.

    Outside of jit each product and each sum is rounded separately, and the bits equal those of the `gguf` package.
    Inside of jit XLA may fuse a product with the sum after it.

    Args:
      blocks: data uint8 `[..., I / values, nbytes]`.

    Returns:
      `[..., I]` float32.

    Raises:
      ValueError: the format is unknown, or the last dimension is not its number of bytes.
    """
    block_format = FORMATS.get(blocks.format)
    if block_format is None:
        raise ValueError(f"block format {blocks.format!r} is not one of {', '.join(FORMATS)}")
    *outer, num_blocks, nbytes = blocks.shape
    if nbytes != block_format.nbytes:
        raise ValueError(f"blocks of {block_format.name} take {block_format.nbytes} bytes, got {nbytes}")
    decoder = _DECODERS[blocks.format]
    fields, start = [], 0
    for size in decoder.sizes:
        fields.append(blocks.data[..., start : start + size])
        start += size
    values = decoder.decode(*fields)  # [..., n, values]
    return values.reshape(*outer, num_blocks * block_format.values)


def _float16(raw: jax.Array) -> jax.Array:  # uint8 [..., 2] -> float32 [..., 1]
    return lax.bitcast_convert_type(raw, jnp.float16).astype(jnp.float32)[..., None]


def _fields(raw: jax.Array, bits: int, width: int) -> jax.Array:  # uint8 [..., B] -> int32 [..., B * 8 / bits]
    """Small integers from bytes. Each run of `width` bytes gives its lowest `bits` first, then the next ones."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    runs = raw.reshape(*raw.shape[:-1], -1, 1, width)
    fields = (runs >> shifts[:, None]) & jnp.uint8(2**bits - 1)  # [..., runs, 8 / bits, width]
    return fields.reshape(*raw.shape[:-1], -1).astype(jnp.int32)


def _floats(integers: jax.Array, groups: int = 1) -> jax.Array:  # [..., B] -> float32 [..., groups, B / groups]
    values = integers.astype(jnp.float32)
    return values if groups == 1 else values.reshape(*values.shape[:-1], groups, -1)


def _decode_q8_0(d: jax.Array, q: jax.Array) -> jax.Array:
    return _float16(d) * _floats(lax.bitcast_convert_type(q, jnp.int8))


def _decode_q4_0(d: jax.Array, q: jax.Array) -> jax.Array:
    return _float16(d) * _floats(_fields(q, 4, 16) - 8)


def _decode_q4_1(d: jax.Array, m: jax.Array, q: jax.Array) -> jax.Array:
    return _float16(d) * _floats(_fields(q, 4, 16)) + _float16(m)


def _decode_q5_0(d: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    return _float16(d) * _floats((_fields(low, 4, 16) | _fields(high, 1, 1) << 4) - 16)


def _decode_q4_k(d: jax.Array, dmin: jax.Array, scales: jax.Array, q: jax.Array) -> jax.Array:
    # Eight scales and eight minima of 6 bits. Four of each are the low bits of bytes 0 to 7. The other four have their
    # low bits in bytes 8 to 11, and their high bits in the high bits of bytes 0 to 7.
    scale, minimum, rest = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    scale = jnp.concatenate([scale & 0x3F, rest & 0x0F | scale >> 2 & 0x30], axis=-1)
    minimum = jnp.concatenate([minimum & 0x3F, rest >> 4 | minimum >> 2 & 0x30], axis=-1)
    scale, minimum = _float16(d) * _floats(scale), _float16(dmin) * _floats(minimum)  # [..., 8]
    return scale[..., None] * _floats(_fields(q, 4, 32), 8) - minimum[..., None]  # [..., 8, 32]


def _decode_q6_k(low: jax.Array, high: jax.Array, scales: jax.Array, d: jax.Array) -> jax.Array:
    scale = _float16(d) * _floats(lax.bitcast_convert_type(scales, jnp.int8))  # [..., 16]
    return scale[..., None] * _floats((_fields(low, 4, 64) | _fields(high, 2, 32) << 4) - 32, 16)  # [..., 16, 16]


class _Decoder(NamedTuple):
    """The sizes in bytes of a block's fields, in order, and the function from fields to values."""

    sizes: tuple[int, ...]
    decode: Callable[..., jax.Array]


_DECODERS = {
    "q8_0": _Decoder((2, 32), _decode_q8_0),
    "q4_0": _Decoder((2, 16), _decode_q4_0),
    "q4_1": _Decoder((2, 2, 16), _decode_q4_1),
    "q5_0": _Decoder((2, 4, 16), _decode_q5_0),
    "q4_k": _Decoder((2, 2, 12, 128), _decode_q4_k),
    "q6_k": _Decoder((128, 64, 16, 2), _decode_q6_k),
}
