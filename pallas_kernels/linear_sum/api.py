"""The products that end a layer's two blocks: each device has some of the inputs, and all need the whole sum.

Every function runs inside `jax.shard_map` over the mesh axis `axis`. Partial sums cross in the type in which the weight
takes rows (`row_dtype`): on accelerators bfloat16, half the bytes of float32.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.linear import Weight, linear, linear_parts, row_dtype


def linear_sum(
    x: jax.Array, weight: Weight, axis: str, active_rows: jax.Array | None = None
) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`linear` of this device's inputs, added up over all devices; for `active_rows` see there."""
    if jax.lax.axis_size(axis) > 1 and (fused := registry.current().find("linear_sum", x, weight, axis)):
        return fused.linear_sum(x, weight, axis).astype(jnp.float32)
    return all_reduce(linear(x, weight, active_rows), weight, axis)


def linear_sum_parts(
    x: jax.Array, weight: Weight, axis: str, active_rows: jax.Array | None = None
) -> jax.Array:  # [T, I], [O, I] -> [P, T, O]
    """`linear_sum` as parts, for what adds them up in float32 while it reads them, whatever their type.

    One device gives the parts of `linear_parts`. The sum of several is one part, in the type in which it crossed; with
    exact numerics their sums are a part each.
    """
    if jax.lax.axis_size(axis) == 1:
        return linear_parts(x, weight, active_rows)
    if fused := registry.current().find("linear_sum", x, weight, axis):
        return fused.linear_sum(x, weight, axis)[None]
    parts = linear_parts(x, weight, active_rows)
    if registry.current().exact:
        return jax.lax.all_gather(add_parts(parts[0], parts[1:]).astype(row_dtype(weight)), axis)
    return jax.lax.psum(jnp.sum(parts, axis=0).astype(row_dtype(weight)), axis)[None]


def all_reduce(x: jax.Array, weight: Weight, axis: str) -> jax.Array:  # [T, O] float32 -> the same
    """The sum over devices of what was multiplied by `weight`."""
    if jax.lax.axis_size(axis) == 1:
        return x
    x = x.astype(row_dtype(weight))
    if registry.current().exact:
        return add_parts(jnp.zeros(x.shape), jax.lax.all_gather(x, axis))
    return jax.lax.psum(x, axis).astype(jnp.float32)


def add_parts(x: jax.Array, added: jax.Array | None) -> jax.Array:  # [T, D], [P, T, D] -> [T, D]
    """Rows, such as the residual stream, and the parts that they lack; with exact numerics in the parts' order."""
    if added is None:
        return x
    if registry.current().exact:
        return functools.reduce(jnp.add, [added[part].astype(jnp.float32) for part in range(added.shape[0])], x)
    return x + jnp.sum(added, axis=0)
