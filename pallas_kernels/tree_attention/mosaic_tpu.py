"""Tree attention for TPUs, in Pallas' TPU dialect: scores are never written, and blocks without used slots never read.

XLA rotates the rows and writes keys and values in place, which fuses with the transposition that the kernel needs. A
kernel cannot write a row by itself: slots lie in tiles of 8 or 16, which it would have to read and write as a whole.

The grid is (KV heads, blocks of rows). Each program goes through the used blocks of the cache in a loop, and the next
block is copied to its memory while it multiplies. Query rows are padded to a tile of eight rows of each query head, so
that one row and several take the same products, and folded into the rows of one product.

Letters: T rows, K KV heads, G query heads per KV head, H head width, S cache slots, B slots of a block, N blocks that
hold the tree window.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry
from pallas_kernels.tree_attention.reference import MASKED, PRECISION
from pallas_kernels.tree_attention.xla import write_rotated

# Rows of a tile in HBM: XLA keeps narrower heads transposed, and would copy the cache for the kernel.
WIDTHS = (128, 256)
TILE = 8  # rows of a tile of float32 numbers
BLOCK = 256  # slots that are copied and multiplied at a time
MOST_ROWS = 512  # query rows of a program: scores of more would not fit beside the core
COLUMNS = (((1,), (1,)), ((), ()))


def supports(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, active_rows, write_only
) -> bool:
    """Whether `tree_attention` takes these operands, by their shapes and dtypes."""
    T, _, heads, H = qkv.shape
    # Copies begin at tiles of the cache, which are 16 slots in bfloat16.
    aligned = key.shape[1] % 16 == 0 and key.dtype in (jnp.bfloat16, jnp.float32)
    return aligned and not write_only and T > 0 and H in WIDTHS and (heads - 2) * TILE <= MOST_ROWS


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, active_rows, write_only=False,
    dtype: Any = jnp.float32,
):  # fmt: skip
    """The operation, with the contract of `api.tree_attention`, for calls that `supports` takes."""
    with jax.named_scope("tree_attention/mosaic_tpu"):
        query, key, value = write_rotated(qkv, cos, sin, key, value, length, offset)
        T = qkv.shape[0]
        if position is None:
            position = length + jnp.arange(T, dtype=jnp.int32)
        used = length + (T if offset is None else offset + T)
        out = _attend(
            query.astype(key.dtype), key, value, length, used, window_mask, position, sliding_window=sliding_window,
            interpret=registry.current().interpret,
        )  # fmt: skip
        if active_rows is not None:
            # Inactive rows may hold anything, and their results must be finite.
            out = jnp.where((jnp.arange(T) < active_rows)[:, None, None, None], out, 0.0)
        return out.astype(dtype), key, value


def _attend(query, key, value, length, used, window_mask, position, *, sliding_window, interpret):
    """Rows that are written attend, [T, K, G, H] float32; the last of the `used` slots (int32 []) is their last one."""
    T, K, G, H = query.shape
    block, causal = min(BLOCK, key.shape[1]), window_mask is None
    rows = -(-T // TILE) * TILE  # of a program
    if rows * G > MOST_ROWS:
        rows = max(MOST_ROWS // G // 32, 1) * 32 if G * 32 <= MOST_ROWS else TILE
    padding = -T % rows
    # Padded rows see what the last one sees.
    query, position = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), "edge") for x in (query, position))
    first = jnp.int32(0) if sliding_window is None else jnp.clip(jnp.min(position) - sliding_window + 1, 0, length)
    numbers = jnp.stack([length, used, lax.div(first, jnp.int32(block))])
    operands, specs = [query.transpose(1, 2, 0, 3), position[:, None]], [
        pl.BlockSpec((1, G, rows, H), lambda head, part, _: (head, 0, part, 0)),
        pl.BlockSpec((rows, 1), lambda head, part, _: (part, 0)),
    ]  # fmt: skip
    if window_mask is not None:
        mask = _window_blocks(jnp.pad(window_mask, [(0, padding), (0, 0)]), length, key.shape[1], block)
        operands.append(mask)
        specs.append(pl.BlockSpec((len(mask), rows, block), lambda head, part, _: (0, part, 0)))
    out = pl.pallas_call(
        functools.partial(_run, block=block, causal=causal, sliding=sliding_window, interpret=interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(K, (T + padding) // rows),
            in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=specs[0],
            scratch_shapes=[
                pltpu.VMEM((2, block, H), key.dtype), pltpu.VMEM((2, block, H), value.dtype),
                pltpu.VMEM((G * rows, 1), jnp.float32), pltpu.VMEM((G * rows, 1), jnp.float32),
                pltpu.VMEM((G * rows, H), jnp.float32), pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((K, G, T + padding, H), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpreter() if interpret else False,
        name="tree_attention",
    )(numbers, *operands, key, value)  # fmt: skip
    return out[:, :, :T].transpose(2, 0, 1, 3)


def interpreter() -> Any:
    """The `interpret` argument with which memory that was not written holds NaN."""
    return pltpu.InterpretParams(uninitialized_memory="nan")


def _window_blocks(mask, length, slots, block):  # bool [T, W] -> int8 [N, T, B]
    """What rows see of the window in each block of the cache from that of slot `length` on, as `_place` has them."""
    width = mask.shape[1]
    count = min(-(-width // block) + 1, -(-slots // block))
    # Zeros before and after: a slice that reaches over the end would be moved back.
    padded = jnp.pad(mask.astype(jnp.int8), [(0, 0), (block, block)])
    starts = [_place(lax.div(length, jnp.int32(block)) + index, slots, block) - length for index in range(count)]
    return jnp.stack([
        lax.dynamic_slice(padded, (jnp.int32(0), jnp.clip(start, -block, width) + block), (len(mask), block))
        for start in starts
    ])  # fmt: skip


def _place(index, slots, block):
    """The first slot of a block; the last one begins earlier, where blocks do not divide the slots."""
    return jnp.minimum(index * block, slots - block)


def _run(numbers, q_ref, position_ref, *refs, block, causal, sliding, interpret):
    """One KV head and one block of rows."""
    *mask_ref, key_ref, value_ref, out_ref, keys, values, highest, total, sums, semaphores = refs
    head, (G, rows, H) = pl.program_id(0), q_ref.shape[1:]
    slots, length, used, first = key_ref.shape[1], numbers[0], numbers[1], numbers[2]
    tail = lax.div(length, jnp.int32(block))
    # Rows of a causal chunk see no slot after their own.
    last = jnp.minimum(used, length + (pl.program_id(1) + 1) * rows) if causal else used
    stop = lax.div(last + (block - 1), jnp.int32(block))
    # The interpreter's host has no product of bfloat16; those of the same numbers in float32 are the same.
    wide = jnp.float32 if interpret else keys.dtype
    precision = PRECISION if wide == jnp.float32 else None
    query = q_ref[0].reshape(G * rows, H).astype(wide)
    highest[...] = jnp.full_like(highest, MASKED)
    total[...], sums[...] = jnp.zeros_like(total), jnp.zeros_like(sums)

    def copies(index):
        place, at = lax.rem(index, 2), pl.ds(pl.multiple_of(_place(index, slots, block), 16), block)
        pairs = enumerate(((key_ref, keys), (value_ref, values)))
        return [pltpu.make_async_copy(whole.at[head, at], part.at[place], semaphores.at[i, place])
                for i, (whole, part) in pairs]  # fmt: skip

    def start(index):
        for copy in copies(index):
            copy.start()

    pl.when(first < stop)(lambda: start(first))

    @pl.loop(first, stop)
    def _(index):
        place = lax.rem(index, 2)
        pl.when(index + 1 < stop)(lambda: start(index + 1))
        for copy in copies(index):
            copy.wait()

        # Slots that no row sees may hold NaN, which a weight of zero would keep.
        @pl.when(jnp.bool_(sliding is not None) | (index >= tail))
        def _():
            held = values[place].astype(jnp.float32)
            values[place] = jnp.where(jnp.abs(held) < jnp.inf, held, 0.0).astype(values.dtype)

        product = lax.dot_general(
            query, keys[place].astype(wide), COLUMNS, precision=precision, preferred_element_type=jnp.float32
        )
        slot = _place(index, slots, block) + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        position = position_ref[...]
        seen = slot <= position if causal else slot < length
        if sliding is not None:
            seen &= slot > position - sliding
        if mask_ref:
            in_window = mask_ref[0][jnp.clip(index - tail, 0, mask_ref[0].shape[0] - 1)].astype(jnp.int32)
            seen |= jnp.where(index >= tail, in_window, 0) != 0
        # The last block begins with slots of the one before.
        seen &= slot >= index * block
        scores = jnp.where(seen[None], product.reshape(G, rows, block) * H**-0.5, MASKED).reshape(G * rows, block)
        now = jnp.maximum(highest[...], scores.max(axis=1, keepdims=True))
        weights, kept = jnp.exp(scores - now), jnp.exp(highest[...] - now)
        highest[...] = now
        total[...] = total[...] * kept + weights.sum(axis=1, keepdims=True)
        weights = weights.astype(values.dtype).astype(wide)
        added = jnp.dot(weights, values[place].astype(wide), precision=precision, preferred_element_type=jnp.float32)
        sums[...] = sums[...] * kept + added

    # A row that sees nothing gives each slot the same weight.
    out_ref[0] = (sums[...] / jnp.maximum(total[...], 1.0)).reshape(G, rows, H)
