"""Tree attention for XLA's CPU backend: its cost follows the slots in use, not the capacity of the cache.

A `switch` picks one of a few static prefix lengths (powers of two), so one compiled program serves every context
length. A dynamic loop over blocks took 1.3 times as long at 2,000 tokens. Reading the whole cache took 1.2 times as
long at 256 tokens of 2,048 (docs/decisions.md). On GPUs a data-dependent branch stalls the host, so the reference
runs there.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention.reference import (
    MASKED,
    PRECISION,
    bound_scores,
    causal_mask,
    fold_rows,
    masked_attention,
    slot_mask,
    unfold_rows,
)

SMALLEST_PREFIX = 256
QUERY_BLOCK = 128


def prefix_sizes(slots: int) -> list[int]:
    """Static prefix lengths that a cache of `slots` slots is read at, ascending; the last is `slots`.

    XLA copies a slice before the product that reads it, and the copy takes nearly as long as the product. A slice of
    more than two thirds of the cache is slower than the whole cache.
    """
    sizes = []
    size = SMALLEST_PREFIX
    while 3 * size <= 2 * slots:
        sizes.append(size)
        size *= 2
    return [*sizes, slots]


def attend_tree(
    query, key, value, length, window_mask, position, sliding_window=None, window_used=None, softcap=None, sinks=None
):
    """The operation, with the contract of `reference.attend_tree`."""
    sizes = prefix_sizes(key.shape[1])

    def attend(size):
        def branch():
            mask = slot_mask(size, length, window_mask, position, sliding_window)
            return attend_in_blocks(query, key[:, :size], value[:, :size], mask, softcap, sinks)

        return branch

    used = length + (window_mask.shape[1] if window_used is None else window_used)
    return lax.switch(jnp.searchsorted(jnp.array(sizes, jnp.int32), used), [attend(size) for size in sizes])


def attend_in_blocks(query, key, value, mask, softcap, sinks, size=QUERY_BLOCK):
    """`masked_attention` for `size` rows at a time. Scores of a thousand rows would not fit the CPU's cache."""
    rows = query.shape[0]
    if rows <= size:
        return masked_attention(query, key, value, mask, softcap, sinks)
    blocks = -(-rows // size)
    padding = blocks * size - rows

    def split(x):
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(blocks, size, *x.shape[1:])

    def attend(block):
        return masked_attention(block[0], key, value, block[1], softcap, sinks)

    out = lax.map(attend, (split(query), split(mask)))
    return out.reshape(blocks * size, *query.shape[1:])[:rows]


def attend_chunk(query, key, value, length, sliding_window=None, softcap=None, sinks=None):
    """The operation, with the contract of `reference.attend_chunk`. Blocks above the chunk's diagonal are skipped."""
    T, K, G, H = query.shape
    chunk_key = lax.dynamic_slice(key, (0, length, 0), (K, T, H))
    chunk_value = lax.dynamic_slice(value, (0, length, 0), (K, T, H))
    prefix = _prefix_part(query, key, value, length, sliding_window, softcap)
    blocks = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        mask = causal_mask(jnp.arange(start, stop), jnp.arange(stop), sliding_window)
        part = _partial(query[start:stop], chunk_key[:, :stop], chunk_value[:, :stop], mask, softcap)
        blocks.append(part)
    chunk = tuple(jnp.concatenate([block[i] for block in blocks], axis=1) for i in range(3))
    rows = None if sinks is None else jnp.tile(sinks, (1, T))  # [K, T * G]
    return unfold_rows(_merge(prefix, chunk, rows), T)


def _prefix_part(query, key, value, length, sliding_window, softcap):
    """Partial softmax over slots `[0, length)`. For an empty prefix nothing is computed."""
    T, K, G, H = query.shape
    sizes = prefix_sizes(key.shape[1])

    def nothing():
        rows = (K, T * G)
        return jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, H))

    def attend(size):
        def branch():
            position = length + jnp.arange(T, dtype=jnp.int32)
            mask = slot_mask(size, length, jnp.zeros((T, 0), bool), position, sliding_window)
            return _partial(query, key[:, :size], value[:, :size], mask, softcap)

        return branch

    index = jnp.searchsorted(jnp.array([0, *sizes], jnp.int32), length)
    return lax.switch(index, [nothing, *[attend(size) for size in sizes]])


def _partial(query, key, value, mask, softcap):  # -> max [K, R], sum [K, R], weighted values [K, R, H], R = T * G
    """Unnormalised softmax attention over some of the keys."""
    T, K, G, H = query.shape
    q = (fold_rows(query) * (H**-0.5)).astype(key.dtype)
    scores = jnp.einsum("krh,ksh->krs", q, key, precision=PRECISION, preferred_element_type=jnp.float32)
    scores = bound_scores(scores.reshape(K, T, G, -1), softcap)
    scores = jnp.where(mask[None, :, None, :], scores, MASKED).reshape(K, T * G, -1)
    highest = scores.max(-1)
    weights = jnp.exp(scores - highest[..., None])
    out = jnp.einsum(
        "krs,ksh->krh", weights.astype(value.dtype), value, precision=PRECISION, preferred_element_type=jnp.float32
    )
    return highest, weights.sum(-1), out


def _merge(a, b, sinks):
    """Normalised attention from the partial softmaxes over two disjoint sets of keys, and sinks, in float32."""
    highest = jnp.maximum(a[0], b[0])
    if sinks is not None:
        highest = jnp.maximum(highest, sinks)
    scale_a, scale_b = jnp.exp(a[0] - highest), jnp.exp(b[0] - highest)
    total = a[1] * scale_a + b[1] * scale_b
    if sinks is not None:
        total += jnp.exp(sinks - highest)
    return (a[2] * scale_a[..., None] + b[2] * scale_b[..., None]) / total[..., None]
