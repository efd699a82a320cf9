"""A residual stream, what a block adds to it, and the norm before the next block, as one operation.

Letters: T rows, D width, P parts of what is added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native, registry
from pallas_kernels.rms_norm import rms_norm


def add_norm(
    x: jax.Array,  # [T, D] float32
    parts: jax.Array,  # [P, T, D], numbers of any type
    scale: jax.Array,  # [D]
    eps: float,
    dtype: Any = jnp.float32,
    active_rows: jax.Array | None = None,  # int32 []
) -> tuple[jax.Array, jax.Array]:  # [T, D] float32, [T, D]
    """`x` plus all parts, and `rms_norm` of that, rounded to `dtype` from float32.

    `active_rows` is how many rows matter, which come first: the others come out arbitrary.

    Raises:
      ValueError: shapes do not fit together.
    """
    if x.ndim != 2 or parts.ndim != 3 or parts.shape[1:] != x.shape or scale.shape != x.shape[1:]:
        raise ValueError(f"add_norm needs [T, D], [P, T, D] and [D], got {x.shape}, {parts.shape} and {scale.shape}")
    if registry.current().native:
        rows = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        count, epsilon = native.row_count(active_rows, x), np.float32(eps)
        total, normed = native.call(
            "add_norm", (rows, rows), x, parts, scale.astype(jnp.float32), count, epsilon=epsilon
        )
        return total, normed.astype(dtype)
    fused = registry.current().find("add_norm", x, parts, scale)
    if fused is not None:
        return fused.add_norm(x, parts, scale, eps, dtype)
    total = x + functools.reduce(jnp.add, [parts[part].astype(jnp.float32) for part in range(parts.shape[0])])
    return total, rms_norm(total, scale, eps).astype(dtype)


def fuses(x: jax.Array, scale: jax.Array) -> bool:
    """Whether a kernel adds and normalises in one launch: then sums should be left to it, part by part."""
    if registry.current().native:
        return True
    parts = jax.ShapeDtypeStruct((1, *x.shape), jnp.float32)
    return registry.current().find("add_norm", x, parts, scale) is not None
