"""Attention over a KV cache whose committed prefix is followed by a window of new rows.

Letters: T query rows, K KV heads, G query heads per KV head, H head width, S cache slots, W window slots.
Slot s below `length` holds the token at position s; slot `length + j` holds window row j. Keys carry their rotary
embedding already, so that a slot never needs recomputation.
"""

import jax

from pallas_kernels.tree_attention import blocked, reference


def tree_attention(
    query: jax.Array,  # [T, K, G, H]
    key: jax.Array,  # [K, S, H]
    value: jax.Array,  # [K, S, H]
    length: jax.Array,  # int32 []
    window_mask: jax.Array,  # bool [T, W]
    position: jax.Array,  # int32 [T]
    sliding_window: int | None = None,
    window_used: jax.Array | None = None,  # int32 []
) -> jax.Array:  # [T, K, G, H] float32
    """Attend from each row to the prefix and to the window slots that `window_mask` marks.

    Args:
      query: rotated queries, not yet scaled.
      key: cache keys; the W window slots are already written.
      value: cache values.
      length: committed prefix length; `length + W <= S`.
      window_mask: row t sees window slot j (its tree ancestors and itself, cut by the sliding window).
      position: logical position of each row, by which the sliding window cuts the prefix.
      sliding_window: positions a row sees, itself included; None for all.
      window_used: window slots that any row sees, so that fast paths need not look at the rest; None for all W.
    """
    _check_cache(query, key, value)
    implementation = blocked if jax.default_backend() == "cpu" else reference
    return implementation.tree_attention(query, key, value, length, window_mask, position, sliding_window, window_used)


def causal_attention(
    query: jax.Array,  # [T, K, G, H]
    key: jax.Array,  # [K, S, H]
    value: jax.Array,  # [K, S, H]
    length: jax.Array,  # int32 []
    sliding_window: int | None = None,
) -> jax.Array:  # [T, K, G, H] float32
    """Attend from a chunk of T consecutive rows, written at slots `[length, length + T)`: prefill.

    Equal to `tree_attention` with a lower-triangular window mask and positions `length + t`.
    """
    _check_cache(query, key, value)
    implementation = blocked if jax.default_backend() == "cpu" else reference
    return implementation.causal_attention(query, key, value, length, sliding_window)


def _check_cache(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if key.shape != value.shape or query.shape[1] != key.shape[0] or query.shape[3] != key.shape[2]:
        raise ValueError(f"query {query.shape}, key {key.shape} and value {value.shape} do not fit together")
