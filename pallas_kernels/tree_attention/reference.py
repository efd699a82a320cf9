"""Tree attention as a reference: one masked softmax over the whole cache."""

import jax
import jax.numpy as jnp

PRECISION = jax.lax.Precision.HIGHEST
# Finite, so that a row that sees nothing gives numbers and not NaN. Such rows are padding and never read.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def attend_tree(
    query: jax.Array,  # [T, K, G, H]
    key: jax.Array,  # [K, S, H]
    value: jax.Array,  # [K, S, H]
    length: jax.Array,  # int32 []
    window_mask: jax.Array,  # bool [T, W]
    position: jax.Array,  # int32 [T]
    sliding_window: int | None = None,
    window_used: jax.Array | None = None,  # int32 []
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [K, G]
) -> jax.Array:  # [T, K, G, H] float32
    """Attend from rotated queries to a cache that already holds their keys and values.

    Args:
      query: rotated queries, not scaled.
      key: cache keys.
      value: cache values.
      length: committed prefix length; `length + W <= S`.
      window_mask: whether row t sees window slot j.
      position: logical position of each row.
      sliding_window: positions that a row sees, itself included; None for all.
      window_used: number of window slots that any row sees; fast paths read no others. None for all W.
      softcap: scores s become c tanh(s / c); None leaves them.
      sinks: a score of each query head beside those of its keys, which weighs no value; None for none.
    """
    mask = slot_mask(key.shape[1], length, window_mask, position, sliding_window)
    return masked_attention(query, key, value, mask, softcap, sinks)


def attend_chunk(query, key, value, length, sliding_window=None, softcap=None, sinks=None):
    """Attend from a chunk of consecutive rows, written at slots `[length, length + T)`.

    Equal to `attend_tree` with a lower-triangular window mask and positions `length + t`.
    """
    rows = jnp.arange(query.shape[0], dtype=jnp.int32)
    mask = causal_mask(rows, rows, sliding_window)
    return attend_tree(query, key, value, length, mask, length + rows, sliding_window, softcap=softcap, sinks=sinks)


def causal_mask(query_row, key_row, sliding_window):  # int32 [A], int32 [B] -> bool [A, B]
    """Which rows of a chunk see which other rows of it."""
    distance = query_row[:, None] - key_row[None, :]
    mask = distance >= 0
    return mask if sliding_window is None else mask & (distance < sliding_window)


def slot_mask(slots, length, window_mask, position, sliding_window):  # -> bool [T, slots]
    """Which cache slots each row sees: the prefix, cut by the sliding window, and the window slots in its mask."""
    rows, width = window_mask.shape
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(slot < length, (rows, slots))
    if sliding_window is not None:
        mask &= slot > position[:, None] - sliding_window
    offset = slot - length
    in_window = (offset >= 0) & (offset < width)
    return jnp.where(in_window, _spread(window_mask, length, slots), mask)


def bound_scores(scores, softcap):
    """Scores s as c tanh(s / c), or as they are."""
    return scores if softcap is None else jnp.tanh(scores / softcap) * softcap


def masked_attention(
    query, key, value, mask, softcap=None, sinks=None
):  # [T, K, G, H], [K, S, H] x2, bool [T, S] -> [T, K, G, H] float32
    """Softmax attention with an explicit mask and grouped KV heads; the softmax is float32."""
    T, K, G, H = query.shape
    q = fold_rows(query).astype(key.dtype)
    scores = jnp.einsum("krh,ksh->krs", q, key, precision=PRECISION, preferred_element_type=jnp.float32)
    scores = scores.reshape(K, T, G, -1) * (H**-0.5)
    scores = jnp.where(mask[None, :, None, :], bound_scores(scores, softcap), MASKED)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, :, None], (K, T, G, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.reshape(K, T * G, -1).astype(value.dtype)
    out = jnp.einsum("krs,ksh->krh", weights, value, precision=PRECISION, preferred_element_type=jnp.float32)
    return unfold_rows(out, T)


def fold_rows(query):  # [T, K, G, H] -> [K, T * G, H]
    """Fold the query heads of each KV head into matrix rows."""
    T, K, G, H = query.shape
    return query.transpose(1, 0, 2, 3).reshape(K, T * G, H)


def unfold_rows(out, rows):  # [K, T * G, H] -> [T, K, G, H]
    """Inverse of `fold_rows`."""
    K, _, H = out.shape
    return out.reshape(K, rows, -1, H).transpose(1, 0, 2, 3)


def _spread(window_mask, length, slots):  # bool [T, W] -> bool [T, slots], window row j at slot length + j
    # Wider than the cache: JAX would move an update that reaches over the end back to fit.
    blank = jnp.zeros((window_mask.shape[0], slots + window_mask.shape[1]), bool)
    return jax.lax.dynamic_update_slice(blank, window_mask, (jnp.int32(0), length))[:, :slots]
