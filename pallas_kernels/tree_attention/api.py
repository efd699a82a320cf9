"""Attention over a KV cache: a committed prefix, and the tree window after it.

Letters: T rows, K KV heads, G query heads per KV head, H head width, S cache slots, W window slots.
Slot s below `length` holds the token at position s, and slot `length + j` holds window slot j. Cached keys carry their
rotary embedding, so a slot is never recomputed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native, registry
from pallas_kernels.exact_rows import MOST_ROWS
from pallas_kernels.tree_attention.exact import tree_attention as attend_exactly
from pallas_kernels.tree_attention.xla import tree_attention as attend_by_xla


def tree_attention(
    qkv: jax.Array,  # [T, K, G + 2, H] float32
    cos: jax.Array,  # [T, H / 2] float32
    sin: jax.Array,  # [T, H / 2] float32
    key: jax.Array,  # [K, S, H]
    value: jax.Array,  # [K, S, H]
    length: jax.Array,  # int32 []
    window_mask: jax.Array | None = None,  # bool [T, W]
    position: jax.Array | None = None,  # int32 [T]
    offset: jax.Array | None = None,  # int32 []
    *,
    sliding_window: int | None = None,
    active_rows: jax.Array | None = None,  # int32 []
    write_only: bool = False,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [K, G] float32
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, K, G, H], [K, S, H], [K, S, H]
    """Rotate the rows' queries and keys, write keys and values into the cache, and attend.

    Each row attends to the prefix and to the window slots in its mask. Those are its tree ancestors and itself, and
    their slots ascend along a path. Without a mask the rows are a causal chunk: consecutive tokens after the prefix,
    each of which sees itself and those before it.

    Args:
      qkv: each KV head's queries, key and value before rotation; rotary pairs are (i, i + H/2).
      cos: cosines of each row's angles.
      sin: sines of each row's angles.
      key: cache keys.
      value: cache values; numbers that are not finite in their dtype are written as zero.
      length: committed prefix length.
      window_mask: whether row t sees window slot j; None for a causal chunk.
      position: logical position of each row, by which the sliding window cuts the prefix; None for a causal chunk.
      offset: row t is written at slot `length + offset + t`, which must lie within the cache. None is 0, and is
        required for a causal chunk; it is allowed where the window is no wider than the rows.
      sliding_window: positions that a row sees, itself included; None for all.
      active_rows: the rows that matter, which come first, at least 1; the others come out arbitrary. None
        for all.
      write_only: only the cache is wanted, and the first result is arbitrary.
      softcap: scores s become c tanh(s / c). No GPU kernel does that. None leaves them.
      sinks: a score of each query head beside those of its keys, which weighs no value (gpt-oss). No GPU kernel does
        that. None for none.
      dtype: of the first result, which is rounded to it from float32: what reads it may round it to that anyway.

    Returns:
      Attention output per query head, and the cache with the rows written.

    A GPU kernel may refuse a call by its shapes and dtypes (its `supports`). XLA then runs it.

    Raises:
      ValueError: shapes do not fit together.
    """
    _check(qkv, cos, sin, key, value, window_mask, position, offset, sinks)
    kernels = registry.current()
    if kernels.exact and window_mask is not None and not write_only and qkv.shape[0] <= MOST_ROWS:
        return attend_exactly(
            qkv, cos, sin, key, value, length, window_mask, position, offset=offset, sliding_window=sliding_window,
            softcap=softcap, sinks=sinks, dtype=dtype,
        )  # fmt: skip
    if not kernels.native:
        operands = (qkv, cos, sin, key, value, length, window_mask, position)
        options: dict[str, Any] = {
            "offset": offset, "sliding_window": sliding_window, "active_rows": active_rows, "write_only": write_only,
        }  # fmt: skip
        if softcap is not None or sinks is not None:
            heads, key, value = attend_by_xla(*operands, **options, softcap=softcap, sinks=sinks)
            return heads.astype(dtype), key, value
        # Without attention XLA's update in place is as good as a kernel.
        fused = None if write_only else kernels.find("tree_attention", *operands, **options)
        if fused is not None:
            return fused.tree_attention(*operands, **options, dtype=dtype)
        heads, key, value = attend_by_xla(*operands, **options)
        return heads.astype(dtype), key, value
    T, K, rows, H = qkv.shape
    heads, key, value = native.call(
        "tree_attention",
        (
            jax.ShapeDtypeStruct((T, K, rows - 2, H), jnp.float32),
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ),
        qkv, key, value, length, jnp.int32(0) if offset is None else offset, native.row_count(active_rows, qkv),
        jnp.zeros((T, 0), bool) if window_mask is None else window_mask,
        jnp.zeros(T, jnp.int32) if position is None else position, cos, sin,
        jnp.zeros((0, 0), jnp.float32) if sinks is None else sinks,
        aliases={1: 1, 2: 2}, causal=window_mask is None, write_only=write_only,
        sliding=sliding_window or 0, softcap=np.float32(softcap or 0), threads=kernels.threads,
    )  # fmt: skip
    return heads.astype(dtype), key, value


def _check(qkv, cos, sin, key, value, window_mask, position, offset, sinks) -> None:
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.dtype != jnp.float32:
        raise ValueError(f"qkv must be float32 [T, K, G + 2, H], got {qkv.dtype} {qkv.shape}")
    T, K, _, H = qkv.shape
    if H % 2:
        raise ValueError(f"the head width must be even, because rotary embedding turns pairs; got {H}")
    if key.shape != value.shape or key.dtype != value.dtype or key.ndim != 3 or (key.shape[0], key.shape[2]) != (K, H):
        raise ValueError(
            f"qkv {qkv.shape}, key {key.dtype} {key.shape} and value {value.dtype} {value.shape} do not fit together"
        )
    if key.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"the cache must be float32, bfloat16 or float16, got {key.dtype}")
    for table in (cos, sin):
        if table.shape != (T, H // 2) or table.dtype != jnp.float32:
            raise ValueError(f"rotary tables must be float32 {(T, H // 2)}, got {table.dtype} {table.shape}")
    if sinks is not None and (sinks.shape != (K, qkv.shape[2] - 2) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks must be float32 {(K, qkv.shape[2] - 2)}, got {sinks.dtype} {sinks.shape}")
    if (window_mask is None) != (position is None):
        raise ValueError("window_mask and position are given together, or neither for a causal chunk")
    if window_mask is None:
        if offset is not None:
            raise ValueError("a causal chunk lies right after the prefix: it takes no offset")
        return
    if window_mask.ndim != 2 or len(window_mask) != T or window_mask.dtype != bool:
        raise ValueError(f"window_mask must be bool [{T}, W], got {window_mask.dtype} {window_mask.shape}")
    if position.shape != (T,) or position.dtype != jnp.int32:
        raise ValueError(f"position must be int32 [{T}], got {position.dtype} {position.shape}")
    if offset is None and window_mask.shape[1] > T:
        raise ValueError(f"a window of {window_mask.shape[1]} slots for {T} rows needs the rows' offset in it")
