"""The Mosaic GPU kernel of tree attention: a CTA takes one KV head, one block of rows and one part of the tiles.

Letters: T tokens, K KV heads, G query heads per KV head, H head width, S cache slots, P parts, n tokens of a tile of
query rows. Row `g * n + t` of such a tile is head g of its t-th token; rows from `n * G` on are padding.

One or two warpgroups compute, for 64 rows each. One more warpgroup fetches tiles of 64 slots through TMA into rings in
shared memory. So a fetch starts as soon as a place in the ring is free, and two computing warpgroups share it. The
fetching warpgroup also zeroes numbers that are not finite in the value tiles that need a mask. Unseen slots have a
weight of zero there, but zero times NaN is NaN. Prefix tiles that all rows see entirely need no mask.

Tiles are those of the cache, up to the last slot that earlier passes wrote, and then those of the new tokens. Within
one launch no CTA can know that another one has written a slot, so none relies on it. Each CTA rotates its own queries,
and the keys of the new tokens that it attends to, which takes little time beside reading the prefix. The CTAs of the
first block of rows also write the new tokens into the cache. The last tile of the cache may therefore hold slots that
are being written. No row sees them, and a slot that no row sees may hold anything.

Rotated numbers are staged in one place, which the warpgroups use in turn: first the computing ones for their queries,
then the fetching one for the new tokens.

JAX's interpreter has no transposed operands (0.10), no operands in registers, and no accumulators with a start value.
There `_multiply_keys` and `_add_values` take plain products. All else is interpreted as it runs on the device.

The file exceeds 400 lines because the steps of one kernel share scratch memory and barriers, and are read together.
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

from pallas_kernels.tree_attention.mask_bits import WORD
from pallas_kernels.tree_attention.reference import MASKED

TILE = 64  # rows of a wgmma, and slots of a tile
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut up.

    Attributes:
      groups: warpgroups that compute, for 64 rows each.
      parts: parts that the tiles are split into; a short context leaves some empty.
      stages: tiles of keys, and of values, that are held at a time; at least 2.
    """

    groups: int
    parts: int
    stages: int


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Shared memory and barriers of a CTA.

    A `*_ready` barrier is completed by TMA, by the rotation of new tokens, or by the cleaning of a value tile, which
    waits for `v_raw`. A `*_free` barrier is completed by the computing warpgroups. For a ring they arrive only where a
    place is filled again, so that each phase has a waiter.
    """

    staged: Any  # [64, H] float32
    angles: Any  # [2, 64, H / 2] float32: cosines, sines
    written: Any  # [64, H] bfloat16
    k: Any  # [stages, 64, H] bfloat16
    v: Any  # [stages, 64, H] bfloat16
    row_bits: Any  # [groups, words, 64] int32
    result: Any  # [groups, 64, H] float32
    result_lse: Any  # [groups, 64] float32
    rows_ready: Any
    staged_free: Any
    key_ready: Any
    value_ready: Any
    k_ready: Any
    v_raw: Any
    v_ready: Any
    k_free: Any
    v_free: Any

    @classmethod
    def types(cls, config: Config, G: int, width: int, words: int) -> dict[str, Any]:
        groups, stages = config.groups, config.stages

        def tiled(columns, dtype, rows=8):
            bytes_ = columns * jnp.dtype(dtype).itemsize
            return (plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(bytes_))

        bf16, f32 = jnp.bfloat16, jnp.float32
        ring, freed = plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
        return {
            # Tiles of one row, so that TMA copies any number of rows from any row on. TMA swizzles by the address, a
            # warpgroup by the place in the slice that it takes. So a warpgroup must take each of these as a whole.
            "staged": plgpu.SMEM((TILE, width), f32, transforms=tiled(32, f32, 1)),
            "angles": plgpu.SMEM((2, TILE, width // 2), f32, transforms=tiled(32, f32, 1)),
            "written": plgpu.SMEM((TILE, width), bf16, transforms=tiled(64, bf16, 1)),
            # Swizzled as wgmma reads them. The two halves of keys, which are rotated, are separate tiles.
            "k": plgpu.SMEM((stages, TILE, width), bf16, transforms=tiled(width // 2, bf16)),
            "v": plgpu.SMEM((stages, TILE, width), bf16, transforms=tiled(64, bf16)),
            "row_bits": plgpu.SMEM((groups, words, TILE), jnp.int32),
            # Swizzled to avoid bank conflicts.
            "result": plgpu.SMEM((groups, TILE, width), f32, transforms=tiled(32, f32)),
            "result_lse": plgpu.SMEM((groups, TILE), f32),
            "rows_ready": plgpu.Barrier(num_arrivals=1 + 3 * G, num_barriers=groups),
            "staged_free": plgpu.Barrier(num_barriers=groups),
            "key_ready": plgpu.Barrier(num_arrivals=3),
            "value_ready": plgpu.Barrier(),
            "k_ready": ring,
            "v_raw": ring,
            "v_ready": ring,
            "k_free": freed,
            "v_free": freed,
        }


@dataclasses.dataclass(frozen=True)
class _Span:
    """Tiles of a CTA.

    Rows see tiles `[start, whole)` from some slot on, tiles `[whole, masked)` entirely, and tiles `[masked, stop)` by
    mask bits. Tiles `[new, stop)` are new tokens. `base` is the cache's first tile with mask bits, and `first_new` the
    first tile of new tokens, of all CTAs.
    """

    start: jax.Array
    whole: jax.Array
    masked: jax.Array
    new: jax.Array
    stop: jax.Array
    base: jax.Array
    first_new: jax.Array

    @classmethod
    def of_part(cls, work: Any, first_token: jax.Array, tokens: int, config: Config) -> "_Span":
        first, whole, base, first_new, active_rows = (work[i] for i in range(5))
        end = first_new + -(-tokens // TILE)
        share = lax.div(end - first + (config.parts - 1), jnp.int32(config.parts))
        start = jnp.minimum(first + lax.axis_index("part") * share, end)
        stop = jnp.where(first_token < active_rows, jnp.minimum(start + share, end), start)
        masked, new = jnp.clip(base, start, stop), jnp.clip(first_new, start, stop)
        return cls(start, jnp.clip(whole, start, masked), masked, new, stop, base, first_new)

    def place(self, tile: jax.Array, stages: int) -> jax.Array:
        """The place of a tile in a ring."""
        return lax.rem(tile - self.start, jnp.int32(stages))


@dataclasses.dataclass(frozen=True)
class _Head:
    """One KV head's part of the operands, and the slots of its new tokens.

    Attributes:
      qkv: [T, G + 2, H] float32.
      cos: [T, H / 2] float32.
      sin: [T, H / 2] float32.
      key: cache keys, [S, H] bfloat16.
      value: cache values, [S, H] bfloat16.
      slot: slot of the first new token.
      writes: whether this CTA writes the new tokens.
    """

    qkv: Any
    cos: Any
    sin: Any
    key: Any
    value: Any
    slot: jax.Array
    writes: jax.Array

    def stage(self, refs: _Scratch, part: int, first, count: int, ready, row: int = 0, *, angles: bool = True) -> None:
        """Fetch queries, keys or values of `count` tokens. `ready` gets one arrival, or three with `angles`."""
        tokens, rows = pl.ds(first, count), pl.ds(row, count)
        plgpu.copy_gmem_to_smem(self.qkv.at[tokens, part], refs.staged.at[rows], ready)
        if angles:
            plgpu.copy_gmem_to_smem(self.cos.at[tokens], refs.angles.at[0, rows], ready)
            plgpu.copy_gmem_to_smem(self.sin.at[tokens], refs.angles.at[1, rows], ready)

    def write(self, refs: _Scratch, cache: Any, tile: jax.Array, index: jax.Array) -> None:  # tile [64, H] bfloat16
        """Write keys or values of the `index`-th tile of tokens. The last tile may have fewer than 64.

        The write may still be under way on return. The kernel must wait for it before it ends.
        """
        last, rest = divmod(len(self.cos) - 1, TILE)

        def store(count):
            slots = pl.ds(self.slot + index * TILE, count)
            plgpu.copy_smem_to_gmem(refs.written.at[pl.ds(0, count)], cache.at[slots])

        refs.written[...] = tile
        plgpu.commit_smem()
        if last:
            pl.when(index < last)(lambda: store(TILE))
        pl.when(index == last)(lambda: store(rest + 1))
        # The scratch `written` is free when it has been read.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def tokens_of_tile(tokens: int, heads: int) -> int:
    """n: the most tokens of which a tile of query rows holds all query heads."""
    return min(tokens, TILE // heads)


def shared_bytes(config: Config, width: int, words: int) -> int:
    """Bytes of shared memory of a CTA, without barriers and the scratch of reductions."""
    rows = config.groups * TILE
    return TILE * width * (4 + 4 + 2) + rows * (width * 4 + words * 4 + 4) + 2 * config.stages * TILE * width * 2


def attend_parts(
    qkv: jax.Array,  # [T, K, G + 2, H] float32
    cos: jax.Array,  # [T, H / 2] float32
    sin: jax.Array,  # [T, H / 2] float32
    key: jax.Array,  # [K, S, H] bfloat16
    value: jax.Array,  # [K, S, H] bfloat16
    mask_bits: jax.Array,  # int32 [tiles, words, 64]
    work: jax.Array,  # int32 [6]
    *,
    config: Config,
    sliding: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:  # float32 [P, K, R, H], [P, K, R], the cache
    """Rotate and write new tokens, and compute softmax attention of their queries over each part of the tiles.

    Args:
      qkv: queries, key and value of each KV head, not rotated; G is at most 64.
      cos: cosines of each token's angles.
      sin: sines of each token's angles.
      key: cache keys.
      value: cache values.
      mask_bits: the slots that each query row sees, rows fastest. Bit b of word w is slot `32 * w + b` after the start
        of the cache's first tile with mask bits. The last `2 * ceil(T / 64)` words are the new tokens instead. With
        `sliding` one more word holds the first slot that the row sees. The number of tiles is a multiple of
        `config.groups`, and some rows of the last tiles may have no token.
      work: six numbers. 0: the first tile that any row sees. 1: the first tile that all rows see entirely, as they do
        the ones after it up to number 2. 2: the first tile with mask bits, which holds the first slot after the prefix.
        3: the first tile after the last one that earlier passes wrote. 4: active tokens, at least one. 5: the slot of
        the first new token.
      config: how the work is cut up.
      sliding: whether rows see the prefix only from some slot on.
      interpret: parameters of JAX's interpreter, or None.

    Returns:
      Normalised attention of the rows of all tiles; a single tile gives only the rows that it has. The base-2 logarithm
      of the softmax's denominator, `MASKED` where a row sees nothing of a part; its attention is then arbitrary and may
      be NaN. The cache's keys and values.
    """
    T, K, heads, H = qkv.shape
    G, groups, tiles, words = heads - 2, config.groups, *mask_bits.shape[:2]
    n = tokens_of_tile(T, G)
    rows = tiles * TILE if tiles > 1 else -(-n * G // 8) * 8
    new_word = words - int(sliding) - -(-T // TILE) * (TILE // WORD)

    def tree_attention(qkv, cos, sin, mask_bits, work, key, value, out, lse, **scratch):
        block, at, group = (lax.axis_index(name) for name in ("block", "head", "group"))
        span, refs = _Span.of_part(work, block * (groups * n), T, config), _Scratch(**scratch)
        head = _Head(qkv.at[:, at], cos, sin, key.at[at], value.at[at], work[5], block == 0)

        @pl.when(group == groups)
        def _():
            _fetch_tiles(head, refs, span, config, sliding)

        @pl.when(group < groups)
        def _():
            tile = block * groups + group
            query = _rotate_queries(head, mask_bits.at[tile], refs, group, tile * n, n, groups)
            take_tile = functools.partial(
                _take_tile, query=query, group=group, refs=refs, span=span, stages=config.stages, new_word=new_word,
                interpret=interpret,
            )  # fmt: skip
            _compute_rows(out, lse, tile * TILE, group, refs, span, take_tile, sliding)

    def run(*refs):
        scratch = _Scratch.types(config, G, H, words)
        pl.run_scoped(functools.partial(tree_attention, *refs), collective_axes="group", **scratch)

    # References make the kernel write in place, because `pl.kernel` has no aliases (JAX 0.10 and 0.11).
    cache = [jax.new_ref(array, memory_space=plgpu.GMEM) for array in (key, value)]
    attend: Any = pl.kernel(
        run,
        out_type=(
            jax.ShapeDtypeStruct((config.parts, K, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((config.parts, K, rows), jnp.float32),
        ),
        mesh=plgpu.Mesh(
            grid=(K, tiles // groups, config.parts),
            grid_names=("head", "block", "part"),
            num_threads=groups + 1,
            thread_name="group",
        ),
        # JAX 0.10 lowers thread by thread by default, and 0.11 by warpgroup.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        name="tree_attention",
    )
    out, lse = attend(qkv, cos, sin, mask_bits, work, *cache)
    return out, lse, jax.freeze(cache[0]), jax.freeze(cache[1])


def _halves(ref: Any) -> tuple[Any, Any]:  # [R, H] -> [R, H / 2] x2
    half = ref.shape[-1] // 2
    return ref.at[:, pl.ds(0, half)], ref.at[:, pl.ds(half, half)]


def _rotate_staged(refs: _Scratch) -> list[jax.Array]:  # bfloat16 [64, H / 2] x2
    both, half = refs.staged[...], refs.staged.shape[1] // 2
    first, second = (lax.slice(both, (0, start), (TILE, start + half)) for start in (0, half))
    cos, sin = refs.angles[0], refs.angles[1]
    return [half.astype(jnp.bfloat16) for half in (first * cos - second * sin, second * cos + first * sin)]


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x, jnp.zeros_like(x))


def _rotate_queries(head: _Head, mask_bits, refs: _Scratch, group, first, n: int, groups: int) -> list[jax.Array]:
    """The halves of a warpgroup's rotated queries, [64, H / 2] bfloat16 each. Also fetches its rows' mask bits."""
    ready = refs.rows_ready.at[group]
    plgpu.copy_gmem_to_smem(mask_bits, refs.row_bits.at[group], ready)
    for other in range(groups - 1):
        pl.when(group == other + 1)(functools.partial(plgpu.barrier_wait, refs.staged_free.at[other]))
    # The last warpgroup may have no tokens. It takes the last one, and its result is not used.
    first = jnp.minimum(first, len(head.cos) - 1)
    for query_head in range(head.qkv.shape[1] - 2):
        head.stage(refs, query_head, first, n, ready, query_head * n)
    plgpu.barrier_wait(ready)
    query = _rotate_staged(refs)
    # After this fence TMA may write over what was read.
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.staged_free.at[group])
    return query


def _fetch_tiles(head: _Head, refs: _Scratch, span: _Span, config: Config, sliding: bool) -> None:
    stages = config.stages

    def await_free(tile, free):
        filled = tile - span.start >= stages
        pl.when(filled)(lambda: plgpu.barrier_wait(free.at[span.place(tile, stages)]))

    def fetch(tile, values_ready):
        place, slots = span.place(tile, stages), pl.ds(tile * TILE, TILE)
        await_free(tile, refs.k_free)
        plgpu.copy_gmem_to_smem(head.key.at[slots], refs.k.at[place], refs.k_ready.at[place])
        await_free(tile, refs.v_free)
        plgpu.copy_gmem_to_smem(head.value.at[slots], refs.v.at[place], values_ready.at[place])

    def clean(tile):
        place = span.place(tile, stages)
        plgpu.barrier_wait(refs.v_raw.at[place])
        refs.v[place] = _finite(refs.v[place])
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.v_ready.at[place])

    def fetch_and_clean(start, stop):
        @pl.loop(start, stop)
        def _(tile):
            fetch(tile, refs.v_raw)
            # The tile before is cleaned while this one is under way.
            pl.when(tile > start)(lambda: clean(tile - 1))

        pl.when(stop > start)(lambda: clean(stop - 1))

    if sliding:
        fetch_and_clean(span.start, span.whole)

    @pl.loop(span.whole, span.masked)
    def _(tile):
        fetch(tile, refs.v_ready)

    fetch_and_clean(span.masked, span.new)
    plgpu.barrier_wait(refs.staged_free.at[config.groups - 1])
    key_part = head.qkv.shape[1] - 2
    count = min(TILE, len(head.cos))

    @pl.loop(span.new, span.stop)
    def _(tile):
        place, index = span.place(tile, stages), tile - span.first_new
        head.stage(refs, key_part, index * TILE, count, refs.key_ready)
        await_free(tile, refs.k_free)
        plgpu.barrier_wait(refs.key_ready)
        for ref, half in zip(_halves(refs.k.at[place]), _rotate_staged(refs), strict=True):
            ref[...] = half
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.k_ready.at[place])
        head.stage(refs, key_part + 1, index * TILE, count, refs.value_ready, angles=False)

        # No other warpgroup refills the place.
        pl.when(head.writes)(lambda: head.write(refs, head.key, refs.k[place], index))
        await_free(tile, refs.v_free)
        plgpu.barrier_wait(refs.value_ready)
        # Rows after the last token hold anything, and rounding can make large numbers infinite.
        values = _finite(refs.staged[...].astype(jnp.bfloat16))
        refs.v[place] = values
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.v_ready.at[place])

        pl.when(head.writes)(lambda: head.write(refs, head.value, values, index))

    plgpu.wait_smem_to_gmem(0)


def _compute_rows(out, lse, row, group, refs: _Scratch, span: _Span, take_tile, sliding) -> None:
    """Attend from the 64 rows of a warpgroup, and write the results from `row` on."""
    head, part = lax.axis_index("head"), lax.axis_index("part")
    stored, width = out.shape[2:]
    state = (
        jnp.full((TILE,), MASKED, jnp.float32),
        jnp.zeros((TILE,), jnp.float32),
        jnp.zeros((TILE, width), jnp.float32),
    )
    if sliding:
        state = lax.fori_loop(span.start, span.whole, functools.partial(take_tile, sight="from a slot on"), state)
    state = lax.fori_loop(span.whole, span.masked, functools.partial(take_tile, sight="all"), state)
    highest, total, sums = lax.fori_loop(span.masked, span.stop, functools.partial(take_tile, sight="by bits"), state)

    # Only an empty part has a total of zero. A row that sees nothing gives each masked slot a weight of one.
    refs.result_lse[group] = jnp.where(total > 0, highest + jnp.log2(total), MASKED)
    refs.result[group] = sums / _over_columns(jnp.maximum(total, 1.0), width)
    plgpu.commit_smem()
    # All 64 rows, or those that the only tile has.
    kept = min(TILE, stored)

    @pl.when(span.stop > span.start)
    def _():
        plgpu.copy_smem_to_gmem(refs.result.at[group, pl.ds(0, kept)], out.at[part, head, pl.ds(row, kept)])

    plgpu.copy_smem_to_gmem(refs.result_lse.at[group, pl.ds(0, kept)], lse.at[part, head, pl.ds(row, kept)])
    plgpu.wait_smem_to_gmem(0)


def _take_tile(tile, state, *, sight, query, group, refs: _Scratch, span: _Span, stages, new_word, interpret):
    """Add a tile to the online softmax: highest score [64], total weight [64], weighted values [64, H]."""
    highest, total, sums = state
    width = sums.shape[1]
    place = span.place(tile, stages)
    refilled = tile + stages < span.stop
    plgpu.barrier_wait(refs.k_ready.at[place])
    scores = _multiply_keys(query, refs.k.at[place], interpret) * (width**-0.5 * LOG2_E)
    pl.when(refilled)(lambda: plgpu.barrier_arrive(refs.k_free.at[place]))
    if sight != "all":
        column = lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
        if sight == "by bits":
            old, new = (tile - start for start in (span.base, span.first_new))
            word = jnp.where(tile < span.first_new, old * (TILE // WORD), new * (TILE // WORD) + new_word)
            low, high = (_over_columns(refs.row_bits[group, word + i], TILE) for i in range(2))
            seen = lax.shift_right_logical(jnp.where(column < WORD, low, high), column & (WORD - 1)) & 1 != 0
        else:
            seen = column + tile * TILE >= _over_columns(refs.row_bits[group, refs.row_bits.shape[1] - 1], TILE)
        scores = jnp.where(seen, scores, MASKED)
    now = jnp.maximum(highest, scores.max(axis=1))
    decay = jnp.exp2(highest - now)
    weights = jnp.exp2(scores - _over_columns(now, TILE))
    total = total * decay + weights.sum(axis=1)
    sums = sums * _over_columns(decay, width)
    plgpu.barrier_wait(refs.v_ready.at[place])
    sums = _add_values(sums, weights.astype(jnp.bfloat16), refs.v.at[place], interpret)
    pl.when(refilled)(lambda: plgpu.barrier_arrive(refs.v_free.at[place]))
    return now, total, sums


def _over_columns(x: jax.Array, columns: int) -> jax.Array:  # [64] -> [64, columns]
    return lax.broadcast_in_dim(x, (TILE, columns), (0,))


def _multiply_keys(query, key, interpret) -> jax.Array:  # [64, H / 2] x2, ref [64, H] -> [64, 64] float32
    halves = list(zip(query, _halves(key), strict=True))
    if interpret:
        first, second = (jnp.dot(rows, ref[...].T, preferred_element_type=jnp.float32) for rows, ref in halves)
        return _fence(first + second)

    def multiply(accumulator):
        for rows, ref in halves:
            plgpu.wgmma(accumulator, rows, ref.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))


def _add_values(sums, weights, value, interpret) -> jax.Array:  # [64, H], [64, 64], ref [64, H] -> [64, H] float32
    if interpret:
        return _fence(sums + jnp.dot(weights, value[...], preferred_element_type=jnp.float32))
    multiply: Any = pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, weights, value))
    return multiply(plgpu.WGMMAAccumulatorRef.init(sums))


def _fence(x: jax.Array) -> jax.Array:
    """Order a plain read of shared memory before the TMA write after it. Reads by wgmma need no fence."""
    plgpu.commit_smem()
    return x
