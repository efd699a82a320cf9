"""Weights kept in blocks: some values of a row share a scale, and each takes 4 to 8 bits.

A block holds `values` consecutive weights of one row in `nbytes` bytes. In every format zero bytes decode to zeros, so
blocks are padded with zeros as numbers are. Two kinds of formats exist:

* those of GGUF files (ggml-common.h, ggml-quants.c),
* groups, in which the readers of quantised safetensors keep their weights: a scale, a zero point and the codes
  (`groups.py` has the layout). Their names say the code and the number of values, such as "int4_g128".
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A block format: its name, and the number of values and of bytes in a block.

    `has_integers` says whether the codes stand for integers, which integer products multiply; other formats are always
    multiplied as float32.
    """

    name: str
    values: int
    nbytes: int
    has_integers: bool = True


# The formats of GGUF files.
GGUF_FORMATS: dict[str, BlockFormat] = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("q8_0", 32, 34),
        BlockFormat("q4_0", 32, 18),
        BlockFormat("q4_1", 32, 20),
        BlockFormat("q5_0", 32, 22),
        BlockFormat("q4_k", 256, 144),
        BlockFormat("q5_k", 256, 176),
        BlockFormat("q6_k", 256, 210),
        BlockFormat("mxfp4", 32, 17),
    )
}
# A scale of four bytes and a zero point of one, before the codes. Of 32 codes of four bits, both take three bytes.
GROUP_FORMATS: dict[str, BlockFormat] = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("int4_g32", 32, 19),
        BlockFormat("int4_g64", 64, 37),
        BlockFormat("int4_g128", 128, 69),
        BlockFormat("int8_g32", 32, 37),
        BlockFormat("int8_g64", 64, 69),
        BlockFormat("int8_g128", 128, 133),
        BlockFormat("fp8_g32", 32, 36, has_integers=False),
        BlockFormat("fp8_g128", 128, 132, has_integers=False),
    )
}
FORMATS: dict[str, BlockFormat] = GGUF_FORMATS | GROUP_FORMATS

# Bytes of a block where each scale of a part takes a byte of its own; the others keep their size.
_PACKED_NBYTES = {"q4_k": 148, "q5_k": 180}
_PLANES_NBYTES = {"q4_k": 148}
# What the sixteen codes of mxfp4 (E2M1) stand for, doubled.
MXFP4_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# What rows are rounded to before they are multiplied by packed blocks; 32 inputs share a scale.
ACTIVATIONS = ("int8", "int16")
# The same codes and scales with those of sixteen outputs side by side, for integer products (packed_formats.h): only
# native kernels read them. The bytes of a matrix are then no longer in the order of its rows. A name says which
# activations they are multiplied by; the bytes are the same.
PACKED: dict[str, BlockFormat] = {
    f"{name}_{bits}": BlockFormat(f"{name}_{bits}", found.values, _PACKED_NBYTES.get(name, found.nbytes))
    for name, found in FORMATS.items()
    if found.has_integers
    for bits in ACTIVATIONS
}
# The same with the codes of a whole row before its scales, for GPU kernels: `planes.py` has the layout.
PLANES: dict[str, BlockFormat] = {
    f"{name}_planes": BlockFormat(
        f"{name}_planes", FORMATS[name].values, _PLANES_NBYTES.get(name, FORMATS[name].nbytes)
    )
    for name in ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k", *GROUP_FORMATS)
}
# The same with outputs side by side, for TPU kernels: `columns.py` has the layout.
COLUMNS: dict[str, BlockFormat] = {
    f"{name}_columns": BlockFormat(f"{name}_columns", found.values, found.nbytes)
    for name, found in GROUP_FORMATS.items()
    if found.has_integers
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A weight in blocks along its input dimension.

    Attributes:
      data: uint8 `[..., I / values, nbytes]`, the bytes of the GGUF file or of the groups.
      format: a name in `FORMATS`, `PACKED`, `PLANES` or `COLUMNS`.
      outer: of columns, `[nbytes, n, O]`, the output dimensions that O is the product of; the one that devices share
        is None.
    """

    data: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    outer: tuple[int | None, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the bytes, not that of the values; of columns as if they were blocks."""
        if not self.outer:
            return self.data.shape
        nbytes, n, outputs = self.data.shape
        rest = outputs // math.prod(size for size in self.outer if size is not None)
        return (*(rest if size is None else size for size in self.outer), n, nbytes)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the bytes, one more than that of the values."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes


Weight = jax.Array | Blocks


def find_format(name: str) -> BlockFormat | None:
    """A format of `FORMATS`, `PACKED`, `PLANES` or `COLUMNS` by name, or None."""
    return FORMATS.get(name) or PACKED.get(name) or PLANES.get(name) or COLUMNS.get(name)


def packed_name(name: str, activations: str) -> str:
    """The packed format of a name in `FORMATS` for one of `ACTIVATIONS`."""
    return f"{name}_{activations}"


def as_matrix(weight: Weight, outputs: int) -> Weight:
    """A weight of any rank as the matrix that `linear` takes. Nothing moves in memory, but in tiles of a TPU.

    Args:
      weight: numbers `[...outputs, ...inputs]`, or blocks with data `[...outputs, ...inputs / values, nbytes]`.
      outputs: rows of the matrix, the product of the output dimensions.

    Returns:
      `[outputs, I]`, or blocks with data `[outputs, I / values, nbytes]`.
    """
    if isinstance(weight, Blocks) and weight.outer:
        return dataclasses.replace(weight, outer=(None,))
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
    return _with_k_scales(d, dmin, scales, _fields(q, 4, 32))


def _decode_q5_k(d: jax.Array, dmin: jax.Array, scales: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    return _with_k_scales(d, dmin, scales, _fields(low, 4, 32) | _fields(high, 1, 32) << 4)


def _with_k_scales(d: jax.Array, dmin: jax.Array, scales: jax.Array, codes: jax.Array) -> jax.Array:
    # Eight scales and eight minima of 6 bits. Four of each are the low bits of bytes 0 to 7. The other four have their
    # low bits in bytes 8 to 11, and their high bits in the high bits of bytes 0 to 7.
    scale, minimum, rest = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    scale = jnp.concatenate([scale & 0x3F, rest & 0x0F | scale >> 2 & 0x30], axis=-1)
    minimum = jnp.concatenate([minimum & 0x3F, rest >> 4 | minimum >> 2 & 0x30], axis=-1)
    scale, minimum = _float16(d) * _floats(scale), _float16(dmin) * _floats(minimum)  # [..., 8]
    return scale[..., None] * _floats(codes, 8) - minimum[..., None]  # [..., 8, 32]


def _decode_mxfp4(scale: jax.Array, q: jax.Array) -> jax.Array:
    # Half of the scale 2^(byte - 127), times twice the values.
    exponent = scale.astype(jnp.uint32)
    bits = jnp.where(exponent < 2, jnp.uint32(0x00200000) << exponent, (exponent - 1) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32) * jnp.asarray(MXFP4_DOUBLES, jnp.float32)[_fields(q, 4, 16)]


def _decode_int4_g32(head: jax.Array, q: jax.Array) -> jax.Array:
    first, second, third = (head[..., i : i + 1].astype(jnp.uint32) for i in range(3))
    word = first | second << 8 | third << 16
    scale = lax.bitcast_convert_type((word & 0xFFFFF0) << 8, jnp.float32)
    return scale * _floats(_fields(q, 4, 16) - (word & 15).astype(jnp.int32))


def _decode_int4(scale: jax.Array, zero: jax.Array, q: jax.Array) -> jax.Array:
    return _float32(scale) * _floats(_fields(q, 4, 16) - 8 - _signed(zero))


def _decode_int8(scale: jax.Array, zero: jax.Array, q: jax.Array) -> jax.Array:
    return _float32(scale) * _floats(_signed(q) - _signed(zero))


def _decode_fp8(scale: jax.Array, q: jax.Array) -> jax.Array:
    return _float32(scale) * lax.bitcast_convert_type(q, jnp.float8_e4m3fn).astype(jnp.float32)


def _float32(raw: jax.Array) -> jax.Array:  # uint8 [..., 4] -> float32 [..., 1]
    return lax.bitcast_convert_type(raw, jnp.float32)[..., None]


def _signed(raw: jax.Array) -> jax.Array:  # uint8 -> int32
    return lax.bitcast_convert_type(raw, jnp.int8).astype(jnp.int32)


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
    "q5_k": _Decoder((2, 2, 12, 32, 128), _decode_q5_k),
    "q6_k": _Decoder((128, 64, 16, 2), _decode_q6_k),
    "mxfp4": _Decoder((1, 16), _decode_mxfp4),
    "int4_g32": _Decoder((3, 16), _decode_int4_g32),
    "int4_g64": _Decoder((4, 1, 32), _decode_int4),
    "int4_g128": _Decoder((4, 1, 64), _decode_int4),
    "int8_g32": _Decoder((4, 1, 32), _decode_int8),
    "int8_g64": _Decoder((4, 1, 64), _decode_int8),
    "int8_g128": _Decoder((4, 1, 128), _decode_int8),
    "fp8_g32": _Decoder((4, 32), _decode_fp8),
    "fp8_g128": _Decoder((4, 128), _decode_fp8),
}
