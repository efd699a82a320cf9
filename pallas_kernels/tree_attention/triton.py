"""Tree attention for NVIDIA GPUs from Ampere on, in Pallas' Triton dialect: one kernel, and a merge of its parts.

Letters: T rows, K KV heads, G query heads per KV head, H head width, S cache slots, W window slots; R = T * G query
rows of one KV head, where row `t * G + g` is head g of row t. Query rows are the matrix unit's M dimension, so a KV
head's keys are read once for all of its queries.

The grid is (parts of the prefix, blocks of query rows, KV heads). Each program rotates its queries and attends to its
part of the prefix; the program of the last part also attends to the window. With one part it writes the result. With
more, a second kernel merges them in float32 (flash decoding, https://pytorch.org/blog/flash-decoding/).

No program reads a slot that another one writes, so the kernel needs no barrier and the writing no launch of its own.
The prefix and the older window slots come from the cache. The new rows come from `qkv`, and every program that attends
to them rotates them again. That takes little time beside reading the prefix, and rounds as the cache does. The programs
of the last part and the last block of rows also write the new rows into the cache, in place.

Only the last prefix tile, which may be partly filled, is read with a mask. A masked load gives zeros.

The file exceeds 400 lines because the steps of one kernel are read together.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import registry
from pallas_kernels.tree_attention.config import Config, choose, power_of_two
from pallas_kernels.tree_attention.mask_bits import WORD, pack_bits, split_mask  # a window tile is one word long
from pallas_kernels.tree_attention.reference import MASKED, PRECISION

LOG2_E = math.log2(math.e)
MOST_WIDTH = 256
# Partial results that a program of the merge holds at a time, in numbers.
MERGE_NUMBERS = 8192
LAST = (((1,), (1,)), ((), ()))  # contract the last dimension of both


def supports(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, active_rows, write_only
) -> bool:
    """Whether `tree_attention` takes a call. XLA's update in place is as good where the cache is only written."""
    return qkv.shape[0] > 0 and qkv.shape[3] <= MOST_WIDTH and not write_only


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position,
    *, offset, sliding_window, active_rows, write_only=False, config: Config | None = None,
    dtype: Any = jnp.float32,
):  # fmt: skip
    """The operation, with the contract of `api.tree_attention`, for calls that `supports` takes.

    Args:
      config: block sizes; None takes those of `config.choose`.
    """
    T, K, rows, H = qkv.shape
    G, S, kernels = rows - 2, key.shape[1], registry.current()
    config = config or choose(
        kernels.device_kind, kernels.multiprocessors, T, G, H, S, kv_heads=K, itemsize=key.dtype.itemsize
    )
    call = Call(T, K, G, H, S, config, window_mask is None, offset is not None, sliding_window, jnp.dtype(dtype))
    mask_bits, call = _pack_window(call, window_mask, offset)
    numbers = [length, 0 if offset is None else offset, T if active_rows is None else jnp.minimum(active_rows, T)]
    operands = [
        jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers]),
        jnp.zeros(T, jnp.int32) if position is None else position,
        mask_bits, qkv, cos, sin, key, value,
    ]  # fmt: skip
    *parts, key, value = _attend(call, operands, kernels.interpret)
    if config.splits > 1:
        parts = _merge(call, operands[0], *parts, interpret=kernels.interpret)
    return parts[0], key, value


class Call(NamedTuple):
    """The static part of one call.

    Attributes:
      T: rows.
      K: KV heads.
      G: query heads per KV head.
      H: head width.
      S: cache slots.
      config: block sizes.
      causal: whether the rows are a causal chunk, without a mask.
      grown: whether the window holds older rows before the new ones.
      sliding: positions that a row sees, or None.
      dtype: of the result.
      old_words: words of a row's mask bits that belong to older rows; those of the new rows come after them.
    """

    T: int
    K: int
    G: int
    H: int
    S: int
    config: Config
    causal: bool
    grown: bool
    sliding: int | None
    dtype: Any
    old_words: int = 0

    @property
    def rows(self) -> int:
        """R: query rows of one KV head."""
        return self.T * self.G

    @property
    def blocks(self) -> int:
        """Blocks of query rows."""
        return pl.cdiv(self.rows, self.config.block_q)

    @property
    def width(self) -> int:
        """Columns of a tile: H, padded to what the matrix unit takes."""
        return max(power_of_two(self.H), 16)


def _pack_window(call: Call, mask, offset) -> tuple[jax.Array, Call]:
    """Mask bits of the window, int32 [T, words]: older slots first, then new rows, each part from a new word on."""
    if mask is None:
        return jnp.zeros((call.T, 1), jnp.int32), call
    old, new = split_mask(mask, jnp.int32(0) if offset is None else offset)
    words = [pack_bits(new)]
    if offset is not None:
        words.insert(0, pack_bits(old))
        call = call._replace(old_words=words[0].shape[1])
    return jnp.concatenate(words, axis=1), call


def _attend(call: Call, operands: list[Any], interpret: bool) -> list[jax.Array]:
    """Run the kernel: the result [T, K, G, H], or its parts, and the cache."""
    config, f32 = call.config, jnp.float32
    out = [jax.ShapeDtypeStruct((call.T, call.K, call.G, call.H), call.dtype)]
    if config.splits > 1:
        parts = (call.K, config.splits, call.rows)
        out = [jax.ShapeDtypeStruct(shape, f32) for shape in (parts, parts, (*parts, call.H))]
    key = operands[-2]
    cache = jax.ShapeDtypeStruct(key.shape, key.dtype)
    return pl.pallas_call(
        functools.partial(_attend_block, call),
        out_shape=[*out, cache, cache],
        grid=(config.splits, call.blocks, call.K),
        input_output_aliases={len(operands) - 2: len(out), len(operands) - 1: len(out) + 1},
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="tree_attention",
    )(*operands)


class Sums(NamedTuple):
    """The state of an online softmax: each query row's largest score in base 2, sum of weights, and weighted values."""

    largest: jax.Array  # [block_q]
    total: jax.Array  # [block_q]
    values: jax.Array  # [block_q, H]

    def add(self, scores: jax.Array, seen: jax.Array | None, values: jax.Array) -> "Sums":
        """Add a tile: scores [block_q, B], which of them count (None for all), and values [B, H]."""
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        largest = jnp.maximum(self.largest, scores.max(axis=1))
        weights = jnp.exp2(scores - largest[:, None])
        if seen is not None:
            # A row that has seen nothing yet has MASKED as its largest score too, which would give a weight of one.
            weights = jnp.where(seen, weights, 0.0)
        scale = jnp.exp2(self.largest - largest)
        added = jnp.dot(weights.astype(values.dtype), values, precision=PRECISION, preferred_element_type=jnp.float32)
        return Sums(largest, self.total * scale + weights.sum(axis=1), self.values * scale[:, None] + added)


class Rows(NamedTuple):
    """The block of query rows of one program.

    Attributes:
      row: t of each query row, int32 [block_q].
      head: g of each query row, int32 [block_q].
      real: whether it is an active row and no padding, bool [block_q].
      position: its logical position, int32 [block_q].
      query: rotated queries in the cache's dtype, [block_q, H].
    """

    row: jax.Array
    head: jax.Array
    real: jax.Array
    position: jax.Array
    query: jax.Array

    def score(self, keys: jax.Array, H: int) -> jax.Array:  # [B, H] -> [block_q, B]
        """Scores in base 2, because the hardware has `exp2`."""
        product = lax.dot_general(self.query, keys, LAST, precision=PRECISION, preferred_element_type=jnp.float32)
        return product * (H**-0.5 * LOG2_E)


def _attend_block(call: Call, numbers, position, mask_bits, qkv, cos, sin, key, value, *out) -> None:
    """Run one program. The arguments after `call` are references."""
    *result, new_key, new_value = out
    config, H = call.config, call.H
    split, block, kv_head = (pl.program_id(axis) for axis in range(3))
    length, offset, active_rows = numbers[0], numbers[1], numbers[2]
    rows = _load_rows(call, block, kv_head, length, active_rows, position, qkv, cos, sin, key.dtype)
    # Blocks without an active row skip all of it.
    matters = block * config.block_q < active_rows * call.G

    state = Sums(
        jnp.full(config.block_q, MASKED, jnp.float32),
        jnp.zeros(config.block_q, jnp.float32),
        jnp.zeros((config.block_q, call.width), jnp.float32),
    )
    state = _attend_prefix(call, state, rows, split, matters, kv_head, length, key, value)

    in_window = split == config.splits - 1
    if call.grown:
        tiles = _if(in_window & matters, pl.cdiv(offset, WORD))
        add = functools.partial(_add_old_rows, call, rows, kv_head, length, offset, mask_bits, key, value)
        state = _loop(0, tiles, add, state)
    writes = block == call.blocks - 1
    tiles = pl.cdiv(call.T, WORD)
    if call.causal:
        # The block's last row sees no row after itself. The last block goes through all rows.
        last = ((block + 1) * config.block_q - 1) // call.G
        tiles = jnp.minimum(tiles, last // WORD + 1)
    add = functools.partial(
        _add_new_rows, call, rows, kv_head, length + offset, writes, mask_bits, qkv, cos, sin, new_key, new_value
    )
    state = _loop(0, _if(in_window & (matters | writes), tiles), add, state)

    column = jnp.arange(call.width, dtype=jnp.int32)
    query_row = block * config.block_q + jnp.arange(config.block_q, dtype=jnp.int32)
    inside = query_row < call.rows
    both = inside[:, None] & (column < H)[None, :]
    if config.splits == 1:
        place = (rows.row[:, None], kv_head, rows.head[:, None], column[None, :])
        attended = _divide(rows.real, state.values, state.total).astype(call.dtype)
        plt.store(result[0].at[place], attended, mask=both)
        return
    plt.store(result[0].at[kv_head, split, query_row], state.largest, mask=inside)
    plt.store(result[1].at[kv_head, split, query_row], state.total, mask=inside)
    plt.store(result[2].at[kv_head, split, query_row[:, None], column[None, :]], state.values, mask=both)


def _if(condition, count):
    """`count` iterations, or none. Pallas lowers `select` of two constants wrongly (JAX 0.10.2)."""
    return condition.astype(jnp.int32) * count


def _loop(start, stop, add: Callable[..., Sums], state: Sums) -> Sums:
    """A loop of few iterations in the form of `while`, which Triton does not pipeline.

    A pipeline of the float32 tiles of new rows would take more shared memory than most GPUs have.
    """

    def step(carry):
        tile, state = carry
        return tile + 1, add(tile, state)

    return lax.while_loop(lambda carry: carry[0] < stop, step, (jnp.asarray(start, jnp.int32), state))[1]


def _divide(real, values, total):
    """Results of query rows; zero where a row is inactive or sees nothing."""
    seen = real & (total != 0)
    return jnp.where(seen[:, None], values / jnp.where(seen, total, 1.0)[:, None], 0.0)


def _load_rows(call: Call, block, kv_head, length, active_rows, position, qkv, cos, sin, dtype) -> Rows:
    query_row = block * call.config.block_q + jnp.arange(call.config.block_q, dtype=jnp.int32)
    row, head = query_row // call.G, query_row % call.G
    real = row < active_rows
    query = _load_rotated(call, qkv, cos, sin, row, kv_head, head[:, None], real, dtype)
    if call.causal:
        place = length + row
    elif call.sliding is not None:
        place = plt.load(position.at[row], mask=real, other=0)
    else:
        place = row  # never read
    return Rows(row, head, real, place, query)


def _load_rotated(call: Call, qkv, cos, sin, row, kv_head, head, real, dtype) -> jax.Array:
    """Rotated heads of some rows in the cache's dtype, [rows, H]; zero where not `real`. `head` is one or [rows, 1].

    Column h of the first half rotates with column h + H/2. Triton cannot exchange halves, so it is loaded again.
    """
    half = call.H // 2
    column = jnp.arange(call.width, dtype=jnp.int32)
    mask = real[:, None] & (column < call.H)[None, :]
    first = column < half
    row, angle, column = row[:, None], jnp.where(first, column, column - half)[None, :], column[None, :]
    partner = jnp.where(first[None, :], column + half, column - half)
    x = plt.load(qkv.at[row, kv_head, head, column], mask=mask, other=0.0)
    y = plt.load(qkv.at[row, kv_head, head, partner], mask=mask, other=0.0)
    c = plt.load(cos.at[row, angle], mask=mask, other=0.0)
    s = plt.load(sin.at[row, angle], mask=mask, other=0.0)
    return (x * c + jnp.where(first[None, :], -y, y) * s).astype(dtype)


def _attend_prefix(call: Call, state: Sums, rows: Rows, split, matters, kv_head, length, key, value) -> Sums:
    """Attend to one part of the prefix. Parts have equal numbers of tiles, but the last ones may have fewer or none."""
    size = call.config.block_k
    column = jnp.arange(call.width, dtype=jnp.int32)
    tiles = pl.cdiv(length, size)
    start, lowest = 0, 0
    if call.sliding is not None:
        # The first slot that any row of the block sees. Slots before it may hold anything.
        positions = jnp.where(rows.real, rows.position, np.iinfo(np.int32).max)
        lowest = jnp.maximum(positions.min() - (call.sliding - 1), 0)
        start = jnp.minimum(lowest // size, tiles)
    share = pl.cdiv(tiles - start, call.config.splits)
    start = start + split * share
    stop = jnp.where(matters, jnp.minimum(start + share, tiles), start)

    def add(masked: bool, tile, state: Sums) -> Sums:
        slot = tile * size + jnp.arange(size, dtype=jnp.int32)
        mask = seen = None
        if masked:
            inside = slot < length
            seen = jnp.broadcast_to(inside[None, :], (call.config.block_q, size))
            if call.sliding is not None:
                inside &= slot >= lowest
                seen &= slot[None, :] > rows.position[:, None] - call.sliding
            mask = jnp.broadcast_to(inside[:, None], (size, call.width))
        if call.width != call.H:
            columns = jnp.broadcast_to((column < call.H)[None, :], (size, call.width))
            mask = columns if mask is None else mask & columns
        place = (kv_head, slot[:, None], column[None, :])
        other = None if mask is None else 0.0
        keys, values = (plt.load(cache.at[place], mask=mask, other=other) for cache in (key, value))
        return state.add(rows.score(keys, call.H), seen, values)

    if call.sliding is not None:
        return lax.fori_loop(start, stop, functools.partial(add, True), state)
    full = jnp.minimum(stop, length // size)
    state = lax.fori_loop(start, full, functools.partial(add, False), state)
    return _loop(jnp.maximum(start, full), stop, functools.partial(add, True), state)


def _add_old_rows(call: Call, rows: Rows, kv_head, length, offset, mask_bits, key, value, tile, state: Sums) -> Sums:
    """Add a tile of window slots that earlier passes wrote. Slots that no row sees may hold anything."""
    column = jnp.arange(call.width, dtype=jnp.int32)
    slot = tile * WORD + jnp.arange(WORD, dtype=jnp.int32)
    mask = (slot < offset)[:, None] & (column < call.H)[None, :]
    place = (kv_head, length + slot[:, None], column[None, :])
    keys, values = (plt.load(cache.at[place], mask=mask, other=0.0) for cache in (key, value))
    seen = _unpack_bits(mask_bits, rows, tile) & (slot < offset)[None, :]
    return state.add(rows.score(keys, call.H), seen, _finite(values))


def _add_new_rows(
    call: Call, rows: Rows, kv_head, first, writes, mask_bits, qkv, cos, sin, new_key, new_value, tile, state: Sums
) -> Sums:
    """Add a tile of new rows, and write them to the slots from `first` on where `writes`."""
    column = jnp.arange(call.width, dtype=jnp.int32)
    row = tile * WORD + jnp.arange(WORD, dtype=jnp.int32)
    keys = _load_rotated(call, qkv, cos, sin, row, kv_head, call.G, row < call.T, new_key.dtype)
    mask = (row < call.T)[:, None] & (column < call.H)[None, :]
    values = plt.load(qkv.at[row[:, None], kv_head, call.G + 1, column[None, :]], mask=mask, other=0.0)
    values = _finite(values.astype(new_value.dtype))
    place = (kv_head, first + row[:, None], column[None, :])
    # A KV head's last slot is followed by the next head's first one.
    inside = mask & writes & (first + row < call.S)[:, None]
    plt.store(new_key.at[place], keys, mask=inside)
    plt.store(new_value.at[place], values, mask=inside)
    if call.causal:
        distance = rows.row[:, None] - row[None, :]
        seen = distance >= 0
        if call.sliding is not None:
            seen &= distance < call.sliding
    else:
        seen = _unpack_bits(mask_bits, rows, call.old_words + tile)
    return state.add(rows.score(keys, call.H), seen & (row < call.T)[None, :], values)


def _finite(values):
    """Replace numbers that are not finite by zero: a masked slot is multiplied by zero, and 0 * NaN is NaN."""
    return jnp.where(jnp.abs(values) < math.inf, values, jnp.zeros_like(values))


def _unpack_bits(mask_bits, rows: Rows, word) -> jax.Array:  # bool [block_q, 32]
    """Which slots of a window tile each query row sees, from one word of its mask bits."""
    bits = plt.load(mask_bits.at[rows.row, word], mask=rows.real, other=0)
    place = jnp.arange(WORD, dtype=jnp.int32)
    return (lax.shift_right_logical(*jnp.broadcast_arrays(bits[:, None], place[None, :])) & 1) != 0


def _merge(call: Call, numbers, largest, total, values, *, interpret: bool) -> list[jax.Array]:
    """Run the merge: the result [T, K, G, H] from its parts."""
    size = min(max(MERGE_NUMBERS // (call.config.splits * call.width), 1), power_of_two(call.rows))
    return pl.pallas_call(
        functools.partial(_merge_block, call, size),
        out_shape=[jax.ShapeDtypeStruct((call.T, call.K, call.G, call.H), call.dtype)],
        grid=(pl.cdiv(call.rows, size), call.K),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(numbers, largest, total, values)


def _merge_block(call: Call, size: int, numbers, largest, total, values, out) -> None:
    """Merge `size` query rows of one KV head. All parts are read at once, because their loads take longest."""
    block, kv_head = pl.program_id(0), pl.program_id(1)
    split = jnp.arange(call.config.splits, dtype=jnp.int32)
    query_row = block * size + jnp.arange(size, dtype=jnp.int32)
    column = jnp.arange(call.width, dtype=jnp.int32)
    inside = query_row < call.rows
    place = (kv_head, split[:, None], query_row[None, :])
    most = plt.load(largest.at[place], mask=jnp.broadcast_to(inside[None, :], (call.config.splits, size)), other=0.0)
    sums = plt.load(total.at[place], mask=jnp.broadcast_to(inside[None, :], (call.config.splits, size)), other=0.0)
    weight = jnp.exp2(most - most.max(axis=0)[None, :])  # [splits, size]
    both = inside[:, None] & (column < call.H)[None, :]
    parts = plt.load(
        values.at[kv_head, split[:, None, None], query_row[None, :, None], column[None, None, :]],
        mask=jnp.broadcast_to(both[None], (call.config.splits, size, call.width)), other=0.0,
    )  # fmt: skip
    row, head = query_row // call.G, query_row % call.G
    merged = _divide(row < numbers[2], (parts * weight[:, :, None]).sum(axis=0), (sums * weight).sum(axis=0))
    plt.store(out.at[row[:, None], kv_head, head[:, None], column[None, :]], merged.astype(call.dtype), mask=both)
