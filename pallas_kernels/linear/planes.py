"""Rows of a weight in planes: the codes of all blocks of a row, then each byte of their scales by itself.

GPU kernels read blocks so. The blocks of a file have 18 bytes, or 69: a thread that reads the codes of one finds them
at no multiple of anything, and would read them byte by byte. In planes the codes are whole vectors of 16 bytes, and
neither scales nor zero points lie between them.

A row of planes has the bytes of its blocks, so shards, rows that are taken and memory are the same. A q4_k block takes
4 bytes more, because each of its scales gets a byte of its own.

* The codes come in groups that share a scale: byte `i` of a run of `width` bytes is value `i`, and of formats with two
  codes in a byte, the upper one is value `width + i` of the run.
* Then the planes follow. A plane has a byte for each group, or for every `per` groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.linear.blocks import FORMATS, PLANES, Blocks

# Bits of the float32 2^23, whose last bit is a one: with a small integer in the low bits, the sum of both.
_MAGIC, _MAGIC_VALUE = 0x4B000000, float(1 << 23)


class Planes(NamedTuple):
    """How a row of a format lies in planes.

    Attributes:
      codes: bytes of the codes of a block.
      group: bytes of codes that share the scales of a half.
      width: bytes of a run.
      halves: codes in a byte.
      per: for each plane, in order, the groups that share a byte.
      decode: from codes uint8 `[..., S, group]` and the bytes of the planes `[..., S]` to a float32 `[..., S, group]`
        for each half. Of q6_k, the upper bits come first among the planes, as `[..., S, group]`.
      split: from blocks `[..., nbytes]` to codes `[..., codes]` and planes, each `[..., bytes of a block]`.
      upper: bytes of a group's upper bits, which lie after the codes.
    """

    codes: int
    group: int
    width: int
    halves: int
    per: tuple[int, ...]
    decode: Callable[..., tuple[jax.Array, ...]]
    split: Callable[[Any], tuple[Any, list[Any]]]
    upper: int = 0


def find_planes(name: str) -> Planes | None:
    """The layout of a format of `PLANES`, or None."""
    return _LAYOUTS.get(name.removesuffix("_planes")) if name in PLANES else None


def planes_name(name: str) -> str | None:
    """The format of `PLANES` for one of `FORMATS`, or None."""
    return f"{name}_planes" if f"{name}_planes" in PLANES else None


def to_planes(blocks: Any, name: str, outputs: int) -> Any:
    """The bytes of a weight in planes.

    Args:
      blocks: uint8 `[...outputs, ...inputs / values, nbytes]`, of numpy or JAX.
      name: its format, one of `FORMATS` that has a format of `PLANES`.
      outputs: number of outputs, the product of the first dimensions.

    Returns:
      uint8 of the same shape but for the bytes of a block, which then only mean something as part of a row.
    """
    layout, shape = _LAYOUTS[name], blocks.shape
    xp: Any = jnp if isinstance(blocks, jax.Array) else np
    codes, planes = layout.split(blocks.reshape(outputs, -1, shape[-1]))
    row = xp.concatenate([part.reshape(outputs, -1) for part in (codes, *planes)], axis=1)
    return row.reshape(*shape[:-1], PLANES[f"{name}_planes"].nbytes)


def dequantise_planes(blocks: Blocks) -> jax.Array:  # [..., I / values, nbytes] -> [..., I] float32
    """The values of blocks in planes: those of `dequantise` of the blocks that they were made of."""
    layout = find_planes(blocks.format)
    assert layout is not None
    *outer, count, nbytes = blocks.shape
    row, start = blocks.data.reshape(*outer, count * nbytes), count * layout.codes
    groups = start // layout.group
    codes, planes = row[..., :start].reshape(*outer, groups, layout.group), []
    if layout.upper:
        end = start + groups * layout.upper
        planes.append(row[..., start:end].reshape(*outer, groups, layout.upper)[..., upper_bytes(layout)])
        start = end
    for per in layout.per:
        planes.append(jnp.repeat(row[..., start : start + groups // per], per, axis=-1))
        start += groups // per
    halves = [half.reshape(*outer, -1, layout.width) for half in layout.decode(codes, *planes)]
    return jnp.stack(halves, axis=-2).reshape(*outer, count * FORMATS[blocks.format.removesuffix("_planes")].values)


def upper_bytes(layout: Planes) -> jax.Array:
    """The byte of upper bits that belongs to each byte of a group's codes, int32 `[group]`."""
    return jnp.arange(layout.group) % layout.upper


def plane_starts(layout: Planes, groups: int) -> list[int]:
    """Bytes of a row of so many groups before its upper bits, if there are any, and before each plane."""
    start = groups * layout.group
    starts = [start] if layout.upper else []
    start += groups * layout.upper
    for per in layout.per:
        starts.append(start)
        start += groups // per
    return starts


def _integers(codes: jax.Array, offset: Any) -> jax.Array:
    """Integers below 2^16 less an offset as float32, exactly: a conversion takes longer on a GPU than this."""
    bits = codes.astype(jnp.uint32) | jnp.uint32(_MAGIC)
    return lax.bitcast_convert_type(bits, jnp.float32) - (_MAGIC_VALUE + offset)


def _nibbles(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    return codes & jnp.uint8(15), codes >> jnp.uint8(4)


def _float16(low: jax.Array, high: jax.Array) -> jax.Array:  # uint8 [..., S] -> float32 [..., S, 1]
    bits = low.astype(jnp.uint16) | high.astype(jnp.uint16) << jnp.uint16(8)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)[..., None]


def _word(*parts: jax.Array) -> jax.Array:  # uint8 [..., S] each -> uint32 [..., S]
    word = parts[0].astype(jnp.uint32)
    for index, part in enumerate(parts[1:], start=1):
        word = word | part.astype(jnp.uint32) << jnp.uint32(8 * index)
    return word


def _float32(*parts: jax.Array) -> jax.Array:  # uint8 [..., S] each -> float32 [..., S, 1]
    return lax.bitcast_convert_type(_word(*parts), jnp.float32)[..., None]


def _signed(raw: jax.Array) -> jax.Array:  # uint8 [..., S] -> float32 [..., S, 1], the integers of int8
    return _integers(raw ^ jnp.uint8(128), 128)[..., None]


def _decode_q4_0(codes, *d):
    return tuple(_float16(*d) * _integers(half, 8) for half in _nibbles(codes))


def _decode_q4_1(codes, d0, d1, m0, m1):
    d, m = _float16(d0, d1), _float16(m0, m1)
    return tuple(d * _integers(half, 0) + m for half in _nibbles(codes))


def _decode_q8_0(codes, *d):
    return (_float16(*d) * _integers(codes ^ jnp.uint8(128), 128),)


def _decode_q4_k(codes, low_scale, high_scale, low_minimum, high_minimum, d0, d1, dmin0, dmin1):
    d, dmin = _float16(d0, d1), _float16(dmin0, dmin1)
    parts = zip(_nibbles(codes), (low_scale, high_scale), (low_minimum, high_minimum), strict=True)
    return tuple(
        d * _integers(scale, 0)[..., None] * _integers(half, 0) - dmin * _integers(minimum, 0)[..., None]
        for half, scale, minimum in parts
    )


def _decode_q6_k(codes, upper, low_scale, high_scale, d0, d1):
    # Two bits for each half of values `i` and `i + 8`.
    shift = (lax.broadcasted_iota(jnp.int32, upper.shape, upper.ndim - 1) // 8 * 2).astype(jnp.uint8)
    d, upper = _float16(d0, d1), upper >> shift
    parts = zip(_nibbles(codes), (upper, upper >> jnp.uint8(4)), (low_scale, high_scale), strict=True)
    return tuple(
        d * _signed(scale) * _integers(half | (bits & jnp.uint8(3)) << jnp.uint8(4), 32) for half, bits, scale in parts
    )


def _decode_int4_g32(codes, *head):
    word = _word(*head)
    scale = lax.bitcast_convert_type((word & jnp.uint32(0xFFFFF0)) << jnp.uint32(8), jnp.float32)[..., None]
    zero = _integers(word & jnp.uint32(15), 0)[..., None]
    return tuple(scale * _integers(half, zero) for half in _nibbles(codes))


def _decode_int4(codes, *head):
    scale, offset = _float32(*head[:4]), _signed(head[4]) + 8
    return tuple(scale * _integers(half, offset) for half in _nibbles(codes))


def _decode_int8(codes, *head):
    return (_float32(*head[:4]) * _integers(codes ^ jnp.uint8(128), _signed(head[4]) + 128),)


def _decode_fp8(codes, *scale):
    # The bits of a float16 with another bias of the exponent. All bits of exponent and mantissa mean no number.
    rest = codes & jnp.uint8(0x7F)
    bits = codes.astype(jnp.uint16) >> jnp.uint16(7) << jnp.uint16(15) | rest.astype(jnp.uint16) << jnp.uint16(7)
    bits = jnp.where(rest == 0x7F, jnp.uint16(0x7E00), bits)
    return (_float32(*scale) * (lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256),)


def _split_head(head: int) -> Callable[[Any], tuple[Any, list[Any]]]:
    """Blocks of a head, whose bytes become planes, and codes."""
    return lambda blocks: (blocks[..., head:], [blocks[..., index : index + 1] for index in range(head)])


def _split_q4_k(blocks: Any) -> tuple[Any, list[Any]]:
    scale, minimum, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    xp: Any = jnp if isinstance(blocks, jax.Array) else np
    scales = xp.concatenate([scale & 63, rest & 15 | scale >> 2 & 48], axis=-1)
    minima = xp.concatenate([minimum & 63, rest >> 4 | minimum >> 2 & 48], axis=-1)
    each = [scales[..., 0::2], scales[..., 1::2], minima[..., 0::2], minima[..., 1::2]]
    return blocks[..., 16:], each + [blocks[..., index : index + 1] for index in range(4)]


def _split_q6_k(blocks: Any) -> tuple[Any, list[Any]]:
    outer = blocks.shape[:-1]
    xp: Any = jnp if isinstance(blocks, jax.Array) else np
    low, high = blocks[..., :128].reshape(*outer, 2, 64), blocks[..., 128:192].reshape(*outer, 2, 32)
    low = xp.concatenate([low & 15, low >> 4], axis=-1).reshape(*outer, 8, 2, 16)
    high = xp.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(*outer, 8, 4, 8)
    upper = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    scales = blocks[..., 192:208]
    planes = [upper, scales[..., 0::2], scales[..., 1::2], blocks[..., 208:209], blocks[..., 209:210]]
    return low[..., 0, :] | low[..., 1, :] << 4, planes


def _group_layout(name: str) -> Planes:
    kind, nbytes, values = name.partition("_")[0], FORMATS[name].nbytes, FORMATS[name].values
    if kind == "int4":
        codes, head = values // 2, nbytes - values // 2
        decode = _decode_int4_g32 if head == 3 else _decode_int4
        return Planes(codes, codes, 16, 2, (1,) * head, decode, _split_head(head))
    head = nbytes - values
    decode = _decode_int8 if kind == "int8" else _decode_fp8
    return Planes(values, values, values, 1, (1,) * head, decode, _split_head(head))


_LAYOUTS: dict[str, Planes] = {
    "q8_0": Planes(32, 32, 32, 1, (1, 1), _decode_q8_0, _split_head(2)),
    "q4_0": Planes(16, 16, 16, 2, (1, 1), _decode_q4_0, _split_head(2)),
    "q4_1": Planes(16, 16, 16, 2, (1, 1, 1, 1), _decode_q4_1, _split_head(4)),
    "q4_k": Planes(128, 32, 32, 2, (1, 1, 1, 1, 4, 4, 4, 4), _decode_q4_k, _split_q4_k),
    "q6_k": Planes(128, 16, 16, 2, (1, 1, 8, 8), _decode_q6_k, _split_q6_k, upper=8),
}
_LAYOUTS |= {
    name.removesuffix("_planes"): _group_layout(name.removesuffix("_planes"))
    for name in PLANES
    if name.removesuffix("_planes") not in _LAYOUTS
}
