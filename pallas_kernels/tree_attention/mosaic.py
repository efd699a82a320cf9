"""Tree attention for NVIDIA Hopper, in Pallas' Mosaic GPU dialect, in two steps.

1. The kernel (`mosaic_kernel`) rotates the rows, writes their keys and values into the cache, and attends to each part
   of the slots. Rows and the query heads of a KV head are folded into the 64 rows of a wgmma. Slots are read up to the
   last one in use, whatever the cache's capacity.
2. One XLA reduction merges the parts in float32.

A mask is needed for the window, and for the prefix slots in the same tile of 64. It is packed into bits, which are the
same in every layer. Caches are bfloat16, and heads are 64 or 128 wide.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry
from pallas_kernels.tree_attention.mask_bits import WORD, pack_bits, split_mask
from pallas_kernels.tree_attention.mosaic_kernel import (
    TILE,
    Config,
    attend_parts,
    shared_bytes,
    tokens_of_tile,
)
from pallas_kernels.tree_attention.reference import MASKED, causal_mask, slot_mask

WIDTHS = (64, 128)
# A CTA of Hopper may have 227 KiB of shared memory. Alignment, barriers and reductions over warps take nearly 4 KiB.
SHARED_BYTES = 223 * 1024
MOST_WORDS = 256  # words of a row's mask bits that TMA copies at a time
MOST_PARTS = 32  # merging more takes longer than they save
MOST_STAGES = 4


def choose_config(tiles: int, heads: int, width: int, slots: int, words: int, *, multiprocessors: int) -> Config | None:
    """How to cut up the work, or None if it does not fit a CTA.

    Args:
      tiles: tiles of 64 query rows of each KV head.
      heads: KV heads.
      width: width of a head.
      slots: slots of the cache.
      words: words of each row's mask bits.
      multiprocessors: streaming multiprocessors of the GPU, each of which runs one CTA at a time.
    """
    for groups in (1,) if tiles == 1 else (2, 1):
        blocks = -(-tiles // groups)
        parts = max(1, min(MOST_PARTS, multiprocessors // (heads * blocks), -(-slots // TILE)))
        for stages in range(MOST_STAGES, 1, -1):
            config = Config(groups, parts, stages)
            if shared_bytes(config, width, words) <= SHARED_BYTES:
                return config
    return None


def supports(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, active_rows, write_only
) -> bool:
    """Whether `tree_attention` takes these operands, by their shapes and dtypes."""
    T, K, heads, H = qkv.shape
    slots = key.shape[1]
    # TMA swizzles the cache in groups of eight slots. A tile may reach over the end of the cache, but must start in it.
    if write_only or T == 0 or key.dtype != jnp.bfloat16 or H not in WIDTHS or slots < TILE or slots % 8:
        return False
    if heads - 2 > TILE:
        return False
    window = 0 if offset is None else window_mask.shape[1]
    words, processors = _count_words(T, window, sliding_window), registry.current().multiprocessors
    if words > MOST_WORDS:
        return False
    return choose_config(_count_tiles(T, heads - 2), K, H, slots, words, multiprocessors=processors) is not None


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position,
    *, offset, sliding_window, active_rows, write_only=False, config: Config | None = None,
    dtype: Any = jnp.float32,
):  # fmt: skip
    """The operation, with the contract of `api.tree_attention`, for calls that `supports` takes.

    Args:
      config: how the work is cut up; None takes that of `choose_config`.
    """
    T, K, heads, H = qkv.shape
    G = heads - 2
    if window_mask is None:
        rows = jnp.arange(T, dtype=jnp.int32)
        window_mask, position = causal_mask(rows, rows, sliding_window), length + rows
    used = jnp.int32(0) if offset is None else offset
    old, new = split_mask(window_mask, used)
    if offset is None:
        old = old[:, :0]
    kernels, tiles = registry.current(), _count_tiles(T, G)
    words = _count_words(T, old.shape[1], sliding_window)
    config = config or choose_config(tiles, K, H, key.shape[1], words, multiprocessors=kernels.multiprocessors)
    assert config is not None, "`supports` refuses calls that do not fit"
    tiles = -(-tiles // config.groups) * config.groups
    interpret = None
    if kernels.interpret:
        # TMA reads zeros after the end of an array. NaN in the interpreter finds more errors.
        interpret = interpreter(out_of_bounds_reads="uninitialized")
    mask_bits = _pack_mask_bits(old, new, position, length, sliding_window)
    with jax.named_scope("tree_attention/mosaic"):
        parts, lse, key, value = attend_parts(
            qkv, cos, sin, key, value,
            _tile_rows(mask_bits, G, tiles),
            _describe_work(length, used, position, sliding_window, T if active_rows is None else active_rows),
            config=config, sliding=sliding_window is not None, interpret=interpret,
        )  # fmt: skip
        out = _untile_rows(merge_parts(parts, lse), T, G)
    if active_rows is not None:
        # Inactive rows may hold anything, and their results must be finite.
        out = jnp.where((jnp.arange(T) < active_rows)[:, None, None, None], out, 0.0)
    return out.astype(dtype), key, value


def interpreter(**options: Any) -> Any:
    """The `interpret` argument that makes the kernel run on the host: JAX's `InterpretGPUParams(**options)`."""
    try:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # public since JAX 0.11
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    return InterpretGPUParams(**options)


def merge_parts(parts: jax.Array, lse: jax.Array) -> jax.Array:  # [P, K, R, H], [P, K, R] -> [K, R, H], all float32
    """Attention over all slots from `attend_parts` over parts of them; zero where a row sees none."""
    seen = (lse > MASKED / 2)[..., None]
    # An empty part was never written and may be NaN, which a weight of zero would keep.
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


def _count_tiles(tokens: int, heads: int) -> int:
    """Tiles of query rows of one KV head."""
    return -(-tokens // tokens_of_tile(tokens, heads))


def _count_words(tokens: int, window: int, sliding_window: int | None) -> int:
    """Words of each row's mask bits, where earlier passes may have written up to `window` slots."""
    # The window may start anywhere in a tile.
    tiles = -(-(TILE - 1 + window) // TILE) + -(-tokens // TILE)
    return tiles * (TILE // WORD) + (sliding_window is not None)


def _pack_mask_bits(old, new, position, length, sliding_window) -> jax.Array:  # int32 [T, words]
    """The mask bits of each token, in the order that `attend_parts` takes."""
    window = old.shape[1]
    base = length - lax.rem(length, TILE)
    slots = _count_words(0, window, None) * WORD
    before = slot_mask(slots, length - base, old, position - base, sliding_window)
    words = [pack_bits(before), pack_bits(new, TILE)]
    if sliding_window is not None:
        words.append((position - sliding_window + 1)[:, None])
    return jnp.concatenate(words, axis=1)


def _tile_rows(mask_bits: jax.Array, G: int, tiles: int) -> jax.Array:  # [T, words] -> [tiles, words, 64]
    """Mask bits of the query rows of each tile; zero for rows that are padding."""
    n = tokens_of_tile(len(mask_bits), G)
    tokens = jnp.pad(mask_bits, [(0, tiles * n - len(mask_bits)), (0, 0)]).reshape(tiles, 1, n, -1)
    rows = jnp.broadcast_to(tokens, (tiles, G, n, tokens.shape[-1])).reshape(tiles, G * n, -1)
    return jnp.pad(rows, [(0, 0), (0, TILE - G * n), (0, 0)]).transpose(0, 2, 1)


def _untile_rows(out: jax.Array, T: int, G: int) -> jax.Array:  # [K, R, H] -> [T, K, G, H]
    K, rows, H = out.shape
    n = tokens_of_tile(T, G)
    out = out.reshape(K, -1, min(rows, TILE), H)[:, :, : G * n].reshape(K, -1, G, n, H)
    return out.transpose(1, 3, 0, 2, 4).reshape(-1, K, G, H)[:T]


def _describe_work(length, used, position, sliding_window, active_rows):  # -> int32 [6]
    """The `work` that `attend_parts` takes; the window's first `used` slots were written by earlier passes."""
    base, new = length // TILE, (length + used + TILE - 1) // TILE
    first = whole = jnp.int32(0)
    if sliding_window is not None:
        lowest = jnp.clip(position - sliding_window + 1, 0, length)
        first, whole = jnp.min(lowest) // TILE, (jnp.max(lowest) + TILE - 1) // TILE
    return jnp.stack([first, whole, base, new, jnp.asarray(active_rows, jnp.int32), length + used])
