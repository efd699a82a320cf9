"""Tree attention for XLA's CPU backend: cost follows the live prefix, not the capacity of the cache.

A `switch` picks among a few static prefix lengths (powers of two), so one compiled program serves every context
length. A dynamic loop over blocks was measured 1.3 times slower at 2,000 tokens, full capacity 1.2 times slower at
256 of 2,048 (docs/decisions.md). On GPUs a data-dependent branch stalls the host, so the reference runs there.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention.reference import (
    MASKED,
    PRECISION,
    causal_mask,
    fold_rows,
    masked_attention,
    slot_mask,
    unfold_rows,
)

SMALLEST_PREFIX = 256
QUERY_BLOCK = 128


def prefix_sizes(slots: int) -> list[int]:
    """Static prefix lengths that a cache of `slots` slots is read at, smallest first; the last is `slots`.

    XLA copies a slice before the product that reads it, which costs nearly as much as the product: a slice of more than
    two thirds of the cache is slower than the whole.
    """
    sizes = []
    size = SMALLEST_PREFIX
    while 3 * size <= 2 * slots:
        sizes.append(size)
        size *= 2
    return [*sizes, slots]


def attend_tree(query, key, value, length, window_mask, position, sliding_window=None, window_used=None):
    """Same contract as `reference.attend_tree`."""
    sizes = prefix_sizes(key.shape[1])

    def attend(size):
        def branch():
            mask = slot_mask(size, length, window_mask, position, sliding_window)
            return _attend_in_blocks(query, key[:, :size], value[:, :size], mask)

        return branch

    live = length + (window_mask.shape[1] if window_used is None else window_used)
    return lax.switch(jnp.searchsorted(jnp.array(sizes, jnp.int32), live), [attend(size) for size in sizes])


def _attend_in_blocks(query, key, value, mask):
    """`masked_attention` for a few hundred rows at a time: the scores of a thousand would not fit any cache."""
    rows = query.shape[0]
    if rows <= QUERY_BLOCK:
        return masked_attention(query, key, value, mask)
    blocks = -(-rows // QUERY_BLOCK)
    padding = blocks * QUERY_BLOCK - rows

    def split(x):
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(blocks, QUERY_BLOCK, *x.shape[1:])

    out = lax.map(lambda block: masked_attention(block[0], key, value, block[1]), (split(query), split(mask)))
    return out.reshape(blocks * QUERY_BLOCK, *query.shape[1:])[:rows]


def attend_chunk(query, key, value, length, sliding_window=None):
    """Same contract as `reference.attend_chunk`; the half of the chunk's square above the diagonal is skipped."""
    T, K, G, H = query.shape
    chunk_key = lax.dynamic_slice(key, (0, length, 0), (K, T, H))
    chunk_value = lax.dynamic_slice(value, (0, length, 0), (K, T, H))
    prefix = _prefix_part(query, key, value, length, sliding_window)
    blocks = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        mask = causal_mask(jnp.arange(start, stop), jnp.arange(stop), sliding_window)
        part = _partial(query[start:stop], chunk_key[:, :stop], chunk_value[:, :stop], mask)
        blocks.append(part)
    chunk = tuple(jnp.concatenate([block[i] for block in blocks], axis=1) for i in range(3))
    return unfold_rows(_merge(prefix, chunk), T)


def _prefix_part(query, key, value, length, sliding_window):
    """Softmax part over slots `[0, length)`; nothing is computed for an empty prefix."""
    T, K, G, H = query.shape
    sizes = prefix_sizes(key.shape[1])

    def nothing():
        rows = (K, T * G)
        return jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, H))

    def attend(size):
        def branch():
            position = length + jnp.arange(T, dtype=jnp.int32)
            mask = slot_mask(size, length, jnp.zeros((T, 0), bool), position, sliding_window)
            return _partial(query, key[:, :size], value[:, :size], mask)

        return branch

    index = jnp.searchsorted(jnp.array([0, *sizes], jnp.int32), length)
    return lax.switch(index, [nothing, *[attend(size) for size in sizes]])


def _partial(query, key, value, mask):  # -> max [K, R], sum [K, R], weighted values [K, R, H], R = T * G
    """Unnormalised softmax attention over some of the keys."""
    T, K, G, H = query.shape
    q = (fold_rows(query) * (H**-0.5)).astype(key.dtype)
    scores = jnp.einsum("krh,ksh->krs", q, key, precision=PRECISION, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[None, :, None, :], scores.reshape(K, T, G, -1), MASKED).reshape(K, T * G, -1)
    highest = scores.max(-1)
    weights = jnp.exp(scores - highest[..., None])
    out = jnp.einsum(
        "krs,ksh->krh", weights.astype(value.dtype), value, precision=PRECISION, preferred_element_type=jnp.float32
    )
    return highest, weights.sum(-1), out


def _merge(a, b):
    """Normalised attention from two partial softmaxes over disjoint keys, merged in float32."""
    highest = jnp.maximum(a[0], b[0])
    scale_a, scale_b = jnp.exp(a[0] - highest), jnp.exp(b[0] - highest)
    total = a[1] * scale_a + b[1] * scale_b
    return (a[2] * scale_a[..., None] + b[2] * scale_b[..., None]) / total[..., None]
