"""Tree attention for NVIDIA Hopper, through Pallas' Mosaic GPU dialect: three steps.

1. XLA rotates the rows, writes their keys and values into the cache, and packs what the rows see of the window into
   bits. This is not fused into the kernel: its CTAs read the window's slots, and within one launch none can know that
   another has written them. The bits and the few numbers beside them depend on nothing that changes from layer to
   layer, so that XLA computes them once for a pass.
2. The kernel (`mosaic_kernel`) attends over parts of the slots at a time. The query heads of a KV head and the rows are
   folded into the 64 rows of a wgmma; slots are read up to the last one written, whatever the cache's capacity.
3. One XLA reduction merges the parts in float32.

Only window and last prefix slots that share a tile of 64 need a mask. Caches are bfloat16, heads 64 or 128 wide.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat, registry
from pallas_kernels.tree_attention import reference, xla
from pallas_kernels.tree_attention.mosaic_kernel import TILE, WORD, Config, attend_parts, shared_bytes
from pallas_kernels.tree_attention.reference import MASKED

WIDTHS = (64, 128)
# Of the 227 KiB of shared memory that a CTA of Hopper may have, some is for barriers and reductions over warps.
SHARED_BYTES = 223 * 1024
MOST_PARTS = 32  # more would take longer to merge than they save
MOST_STAGES = 4


def choose_config(rows: int, heads: int, width: int, slots: int, words: int, *, multiprocessors: int) -> Config | None:
    """Cut up the work of `rows` query rows for each of `heads` KV heads, or None if it does not fit.

    Args:
      rows: tokens times the query heads of a KV head.
      heads: KV heads.
      width: of a head.
      slots: of the cache.
      words: of mask bits for each row.
      multiprocessors: of the GPU, each of which runs one CTA at a time.
    """
    groups = 1 if rows <= TILE else 2
    blocks = -(-rows // (groups * TILE))
    parts = max(1, min(MOST_PARTS, multiprocessors // (heads * blocks), -(-slots // TILE)))
    for stages in range(MOST_STAGES, 1, -1):
        config = Config(groups, parts, stages)
        if shared_bytes(config, width, words) <= SHARED_BYTES:
            return config
    return None


def supports(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, live, write_only
) -> bool:
    """Whether `tree_attention` takes these operands, of which shapes and dtypes count."""
    del cos, sin, value, length, position, offset, live
    T, K, heads, H = qkv.shape
    slots = key.shape[1]
    # The cache is swizzled in groups of eight slots; a tile may reach over its end, but not be all of it.
    if write_only or T == 0 or key.dtype != jnp.bfloat16 or H not in WIDTHS or slots < TILE or slots % 8:
        return False
    window = T if window_mask is None else window_mask.shape[1]
    words, processors = _count_words(window, sliding_window), registry.current().multiprocessors
    return choose_config(T * (heads - 2), K, H, slots, words, multiprocessors=processors) is not None


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position,
    *, offset, sliding_window, live, write_only=False, config: Config | None = None,
):  # fmt: skip
    """Same contract as `api.tree_attention`, for calls that it `supports`.

    Args (further):
      config: how the work is cut up; None leaves it to `choose_config`.
    """
    del write_only
    query, key, value = xla.tree_attention(
        qkv, cos, sin, key, value, length, window_mask, position,
        offset=offset, sliding_window=sliding_window, live=live, write_only=True,
    )  # fmt: skip
    T, K, G, H = query.shape
    used = T if offset is None else offset + T
    if window_mask is None:
        rows = jnp.arange(T, dtype=jnp.int32)
        window_mask, position = reference.causal_mask(rows, rows, sliding_window), length + rows
    elif offset is None:
        used = window_mask.shape[1]
    words = _count_words(window_mask.shape[1], sliding_window)
    kernels = registry.current()
    config = config or choose_config(T * G, K, H, key.shape[1], words, multiprocessors=kernels.multiprocessors)
    assert config is not None, "what it does not support goes elsewhere"

    filled = -(-T * G // (config.groups * TILE)) * config.groups * TILE
    query = reference.fold_rows(xla.rotate(query, cos, sin)).astype(key.dtype)
    interpret = None
    if kernels.interpret:
        # TMA fills with zeros what lies behind the end of an array; the interpreter with NaN, which shows more.
        interpret = _compat.mosaic_interpreter(out_of_bounds_reads="uninitialized")
    with jax.named_scope("tree_attention/mosaic"):
        parts, lse = attend_parts(
            _fill_rows(query, 1, filled),
            key,
            value,
            _pack_mask(window_mask, position, length, sliding_window, G, filled),
            _describe_work(length, used, position, sliding_window, T * G if live is None else live * G),
            config=config,
            # A single tile of rows is not stored beyond those that there are.
            stored=min(filled, -(-T * G // 8) * 8) if filled == TILE else filled,
            sliding=sliding_window is not None,
            interpret=interpret,
        )
        out = reference.unfold_rows(merge_parts(parts, lse)[:, : T * G], T)
    if live is not None:
        # The rest may hold anything, and what it gives is finite by contract.
        out = jnp.where((jnp.arange(T) < live)[:, None, None, None], out, 0.0)
    return out, key, value


def merge_parts(parts: jax.Array, lse: jax.Array) -> jax.Array:  # [P, K, R, H], [P, K, R] -> [K, R, H], all float32
    """Attention over all slots from `attend_parts` over parts of them; zero where a row sees none."""
    seen = (lse > MASKED / 2)[..., None]
    # What nobody wrote may be NaN, which no weight makes harmless.
    parts = jnp.where(seen, parts, 0.0)
    if len(parts) == 1:
        return parts[0]

    def merge(a, b):
        highest = jnp.maximum(a[0], b[0])
        weight_a, weight_b = jnp.exp2(a[0] - highest), jnp.exp2(b[0] - highest)
        return highest, a[1] * weight_a + b[1] * weight_b, a[2] * weight_a + b[2] * weight_b

    # One reduction of triples is one kernel; a maximum, a sum of weights and a sum of values are three.
    scores = jnp.broadcast_to(jnp.where(seen, lse[..., None], MASKED), parts.shape)
    counts = jnp.broadcast_to(seen.astype(jnp.float32), parts.shape)
    start = (jnp.float32(MASKED), jnp.float32(0), jnp.float32(0))
    _, total, out = lax.reduce((scores, counts, parts), start, merge, (0,))
    return out / jnp.where(total > 0, total, 1.0)


def _count_words(window: int, sliding_window: int | None) -> int:
    """Words of each row in `_pack_mask`."""
    # The window starts anywhere in a tile.
    tiles = -(-(TILE - 1 + window) // TILE)
    return tiles * (TILE // WORD) + (sliding_window is not None)


def _pack_mask(window_mask, position, length, sliding_window, group, filled):  # -> int32 [filled / 64, words, 64]
    """What rows see from the start of the tile that holds slot `length`, as `attend_parts` takes it."""
    T, window = window_mask.shape
    base = length - lax.rem(length, TILE)
    bits = _count_words(window, None) * WORD
    mask = reference.slot_mask(bits, length - base, window_mask, position - base, sliding_window)
    weight = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
    words = jnp.sum(jnp.where(mask.reshape(T, -1, WORD), weight, 0), axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)
    if sliding_window is not None:
        words = jnp.concatenate([words, (position - sliding_window + 1)[:, None]], axis=1)
    words = _fill_rows(jnp.repeat(words, group, axis=0), 0, filled)
    return words.reshape(filled // TILE, TILE, -1).transpose(0, 2, 1)


def _describe_work(length, used, position, sliding_window, live_rows):  # -> int32 [5]
    """The tiles and rows that count, as `attend_parts` takes them."""
    base, behind = length // TILE, (length + used + TILE - 1) // TILE
    first = whole = jnp.int32(0)
    if sliding_window is not None:
        lowest = jnp.clip(position - sliding_window + 1, 0, length)
        first, whole = jnp.min(lowest) // TILE, (jnp.max(lowest) + TILE - 1) // TILE
    return jnp.stack([first, whole, base, behind, jnp.int32(live_rows)])


def _fill_rows(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """Append zeros along an axis up to `rows`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, rows - x.shape[axis])
    return jnp.pad(x, widths)
