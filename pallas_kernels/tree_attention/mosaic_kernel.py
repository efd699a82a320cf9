"""The Mosaic GPU kernel of tree attention: a CTA takes one KV head, one block of rows and one part of the slots.

Letters: K KV heads, H head width, S cache slots, P parts, R query rows of one KV head (tokens times the heads of its
group), filled up to whole blocks.

One or two warpgroups compute, for 64 rows each; one more fetches tiles of 64 slots through TMA into rings in shared
memory. So a tile is under way as soon as its place is free, whatever the others compute, and two computing warpgroups
share one fetch; what that gains has not been measured on a device yet. It also zeroes what is not finite in the value
tiles that need a mask: unseen slots weigh nothing there, but zero times NaN is NaN. Prefix tiles that all rows see
entirely need no mask.

JAX's interpreter knows no transposed operands (0.10), operands in registers, or accumulators that start from a value:
`_multiply_keys` and `_add_values` take plain products there. All else is interpreted as it runs on the device.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.reference import MASKED

TILE = 64  # rows of a wgmma, and slots of a tile
WORD = 32  # slots of a word of the mask
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut up.

    Attributes:
      groups: warpgroups that compute, 64 rows each.
      parts: into which the slots are split; a short context leaves some empty.
      stages: tiles of keys, and of values, that are held at a time; at least 2.
    """

    groups: int
    parts: int
    stages: int


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of a CTA.

    `*_ready` is completed by TMA, or by the cleaning of a value tile, whose raw form `v_raw` announces; `*_free` by
    the computing warpgroups, and only for places that are filled again, so that every phase has its waiter.
    """

    q: Any  # [groups, 64, H] bfloat16
    k: Any  # [stages, 64, H] bfloat16
    v: Any  # [stages, 64, H] bfloat16
    mask: Any  # [groups, words, 64] int32
    result: Any  # [groups, 64, H] float32
    result_lse: Any  # [groups, 64] float32
    rows_ready: Any
    k_ready: Any
    v_raw: Any
    v_ready: Any
    k_free: Any
    v_free: Any

    @classmethod
    def types(cls, config: Config, width: int, words: int) -> dict[str, Any]:
        groups, stages = config.groups, config.stages
        # A tile row of 128 bytes, swizzled as wgmma reads it; the float32 result alike, for few bank conflicts.
        half, full = ((plgpu.TilingTransform((8, n)), plgpu.SwizzleTransform(128)) for n in (64, 32))
        ring, freed = plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
        return {
            "q": plgpu.SMEM((groups, TILE, width), jnp.bfloat16, transforms=half),
            "k": plgpu.SMEM((stages, TILE, width), jnp.bfloat16, transforms=half),
            "v": plgpu.SMEM((stages, TILE, width), jnp.bfloat16, transforms=half),
            "mask": plgpu.SMEM((groups, words, TILE), jnp.int32),
            "result": plgpu.SMEM((groups, TILE, width), jnp.float32, transforms=full),
            "result_lse": plgpu.SMEM((groups, TILE), jnp.float32),
            "rows_ready": plgpu.Barrier(num_arrivals=2, num_barriers=groups),
            "k_ready": ring,
            "v_raw": ring,
            "v_ready": ring,
            "k_free": freed,
            "v_free": freed,
        }


@dataclasses.dataclass(frozen=True)
class _Span:
    """Tiles of a CTA.

    Rows see tiles `[start, whole)` from some slot on, `[whole, masked)` entirely, and what `[masked, stop)` hold by
    bits, which count from tile `base`.
    """

    start: jax.Array
    whole: jax.Array
    masked: jax.Array
    stop: jax.Array
    base: jax.Array

    @classmethod
    def of_part(cls, work: Any, first_row: jax.Array, config: Config) -> "_Span":
        first, whole, base, behind, live = (work[i] for i in range(5))
        share = lax.div(behind - first + (config.parts - 1), jnp.int32(config.parts))
        start = jnp.minimum(first + lax.axis_index("part") * share, behind)
        stop = jnp.where(first_row < live, jnp.minimum(start + share, behind), start)
        masked = jnp.clip(base, start, stop)
        return cls(start, jnp.clip(whole, start, masked), masked, stop, base)

    def place(self, tile: jax.Array, stages: int) -> jax.Array:
        """Of a tile in a ring."""
        return lax.rem(tile - self.start, jnp.int32(stages))


def shared_bytes(config: Config, width: int, words: int) -> int:
    """Shared memory of a CTA, without barriers and the scratch of reductions."""
    rows = config.groups * TILE
    return rows * (width * (2 + 4) + words * 4 + 4) + 2 * config.stages * TILE * width * 2


def attend_parts(
    query: jax.Array,  # [K, R, H] bfloat16
    key: jax.Array,  # [K, S, H] bfloat16
    value: jax.Array,  # [K, S, H] bfloat16
    bits: jax.Array,  # int32 [R / 64, words, 64]
    work: jax.Array,  # int32 [5]
    *,
    config: Config,
    stored: int,
    sliding: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # float32 [P, K, stored, H], [P, K, stored]
    """Softmax attention over each part of the slots.

    Args:
      query: rotated, not scaled; R is a multiple of 64 times `config.groups`.
      key: cache keys, those of the window among them.
      value: cache values, alike.
      bits: what each row sees of the masked tiles, rows fastest: bit b of word w stands for slot `32 * w + b` behind
        the start of the first such tile. With `sliding` one more word holds the first slot that the row sees.
      work: first tile that any row sees; first one that all rows see entirely, as the others up to the first masked
        tile; first masked tile, that of the first slot behind the prefix; the tile behind the last; rows that matter.
      config: see there.
      stored: rows that are wanted: R, or a multiple of 8 where R is 64.
      sliding: whether rows see the prefix only from some slot on.
      interpret: parameters of JAX's interpreter, or None.

    Returns:
      Normalised attention, and the base-2 logarithm of the softmax's denominator: `MASKED` where a row sees nothing of
      a part, and then the attention is arbitrary and may be NaN.
    """
    K, R, H = query.shape
    groups = config.groups
    words = bits.shape[1]

    def tree_attention(query, key, value, bits, work, out, lse, **scratch):
        first_row = lax.axis_index("block") * (groups * TILE)
        span, refs = _Span.of_part(work, first_row, config), _Scratch(**scratch)
        group = lax.axis_index("group")

        @pl.when(group == groups)
        def _():
            head = lax.axis_index("head")
            _fetch_tiles(key.at[head], value.at[head], refs, span, config.stages, sliding)

        @pl.when(group < groups)
        def _():
            take_tile = functools.partial(
                _take_tile, group=group, refs=refs, span=span, stages=config.stages, interpret=interpret
            )
            _compute_rows(query, bits, out, lse, first_row, group, refs, span, take_tile, sliding)

    return plgpu.kernel(
        tree_attention,
        out_type=(
            jax.ShapeDtypeStruct((config.parts, K, stored, H), jnp.float32),
            jax.ShapeDtypeStruct((config.parts, K, stored), jnp.float32),
        ),
        grid=(K, R // (groups * TILE), config.parts),
        grid_names=("head", "block", "part"),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=_Scratch.types(config, H, words),
        # JAX 0.10 would lower thread by thread unless told so, 0.11 by warpgroup: one form for both.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(query, key, value, bits, work)


def _fetch_tiles(key, value, refs: _Scratch, span: _Span, stages: int, sliding: bool) -> None:  # [S, H] x2
    def fetch(tile, values_ready):
        place = span.place(tile, stages)
        slots = pl.ds(tile * TILE, TILE)
        filled = tile - span.start >= stages
        pl.when(filled)(lambda: plgpu.barrier_wait(refs.k_free.at[place]))
        plgpu.copy_gmem_to_smem(key.at[slots], refs.k.at[place], refs.k_ready.at[place])
        pl.when(filled)(lambda: plgpu.barrier_wait(refs.v_free.at[place]))
        plgpu.copy_gmem_to_smem(value.at[slots], refs.v.at[place], values_ready.at[place])

    def clean(tile):
        place = span.place(tile, stages)
        plgpu.barrier_wait(refs.v_raw.at[place])
        values = refs.v[place]
        refs.v[place] = jnp.where(jnp.abs(values.astype(jnp.float32)) < jnp.inf, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.v_ready.at[place])

    def fetch_and_clean(start, stop):
        @pl.loop(start, stop)
        def _(tile):
            fetch(tile, refs.v_raw)
            # While this one is under way.
            pl.when(tile > start)(lambda: clean(tile - 1))

        pl.when(stop > start)(lambda: clean(stop - 1))

    if sliding:
        fetch_and_clean(span.start, span.whole)

    @pl.loop(span.whole, span.masked)
    def _(tile):
        fetch(tile, refs.v_ready)

    fetch_and_clean(span.masked, span.stop)


def _compute_rows(query, bits, out, lse, first_row, group, refs: _Scratch, span: _Span, take_tile, sliding) -> None:
    """Attend from the 64 rows of a warpgroup, and write what becomes of them."""
    head, part = lax.axis_index("head"), lax.axis_index("part")
    width, stored = query.shape[-1], out.shape[2]
    row = first_row + group * TILE
    ready = refs.rows_ready.at[group]
    plgpu.copy_gmem_to_smem(query.at[head, pl.ds(row, TILE)], refs.q.at[group], ready)
    plgpu.copy_gmem_to_smem(bits.at[lax.div(row, TILE)], refs.mask.at[group], ready)
    plgpu.barrier_wait(ready)
    state = (
        jnp.full((TILE,), MASKED, jnp.float32),
        jnp.zeros((TILE,), jnp.float32),
        jnp.zeros((TILE, width), jnp.float32),
    )
    if sliding:
        state = lax.fori_loop(span.start, span.whole, functools.partial(take_tile, sight="from a slot on"), state)
    state = lax.fori_loop(span.whole, span.masked, functools.partial(take_tile, sight="all"), state)
    highest, total, sums = lax.fori_loop(span.masked, span.stop, functools.partial(take_tile, sight="by bits"), state)

    # Only an empty part has no total: a row that sees nothing has weight one for each masked slot.
    refs.result_lse[group] = jnp.where(total > 0, highest + jnp.log2(total), MASKED)
    refs.result[group] = sums / _over_columns(jnp.maximum(total, 1.0), width)
    plgpu.commit_smem()
    # A whole block's rows, or those of the only one.
    kept = min(TILE, stored)

    @pl.when(span.stop > span.start)
    def _():
        plgpu.copy_smem_to_gmem(refs.result.at[group, pl.ds(0, kept)], out.at[part, head, pl.ds(row, kept)])

    plgpu.copy_smem_to_gmem(refs.result_lse.at[group, pl.ds(0, kept)], lse.at[part, head, pl.ds(row, kept)])
    plgpu.wait_smem_to_gmem(0)


def _take_tile(tile, state, *, sight, group, refs: _Scratch, span: _Span, stages, interpret):
    """Fold a tile into the online softmax: highest score [64], total weight [64], weighted values [64, H]."""
    highest, total, sums = state
    width = sums.shape[1]
    place = span.place(tile, stages)
    refilled = tile + stages < span.stop
    plgpu.barrier_wait(refs.k_ready.at[place])
    scores = _multiply_keys(refs.q.at[group], refs.k.at[place], interpret) * (width**-0.5 * LOG2_E)
    pl.when(refilled)(lambda: plgpu.barrier_arrive(refs.k_free.at[place]))
    if sight != "all":
        column = lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
        if sight == "by bits":
            word = (tile - span.base) * (TILE // WORD)
            low, high = (_over_columns(refs.mask[group, word + i], TILE) for i in range(2))
            seen = lax.shift_right_logical(jnp.where(column < WORD, low, high), column & (WORD - 1)) & 1 != 0
        else:
            seen = column + tile * TILE >= _over_columns(refs.mask[group, refs.mask.shape[1] - 1], TILE)
        scores = jnp.where(seen, scores, MASKED)
    new = jnp.maximum(highest, scores.max(axis=1))
    decay = jnp.exp2(highest - new)
    weights = jnp.exp2(scores - _over_columns(new, TILE))
    total = total * decay + weights.sum(axis=1)
    sums = sums * _over_columns(decay, width)
    plgpu.barrier_wait(refs.v_ready.at[place])
    sums = _add_values(sums, weights.astype(jnp.bfloat16), refs.v.at[place], interpret)
    pl.when(refilled)(lambda: plgpu.barrier_arrive(refs.v_free.at[place]))
    return new, total, sums


def _over_columns(x: jax.Array, columns: int) -> jax.Array:  # [64] -> [64, columns]
    return lax.broadcast_in_dim(x, (TILE, columns), (0,))


def _multiply_keys(query, key, interpret) -> jax.Array:  # refs [64, H] x2 -> [64, 64] float32
    if interpret:
        return _fence(jnp.dot(query[...], key[...].T, preferred_element_type=jnp.float32))

    def multiply(accumulator):
        plgpu.wgmma(accumulator, query, key.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))


def _add_values(sums, weights, value, interpret) -> jax.Array:  # [64, H], [64, 64], ref [64, H] -> [64, H] float32
    if interpret:
        return _fence(sums + jnp.dot(weights, value[...], preferred_element_type=jnp.float32))
    multiply: Any = pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, weights, value))
    return multiply(plgpu.WGMMAAccumulatorRef.init(sums))


def _fence(x: jax.Array) -> jax.Array:
    """Order a plain read of shared memory before the TMA write that follows; wgmma's reads need nothing of the kind."""
    plgpu.commit_smem()
    return x
