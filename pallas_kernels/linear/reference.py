"""The linear layer left to XLA: the reference, and the form that XLA's CPU backend runs fastest."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.linear.blocks import Blocks, Weight, dequantise

# Float32 means float32: no TF32 on GPUs.
PRECISION = jax.lax.Precision.HIGHEST


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`api.linear` of a weight in numbers; every row is computed.

    Gradients are products in the weight's dtype with float32 sums, as is usual in mixed precision.
    """
    return _product("ti,oi->to", x.astype(weight.dtype), weight)


def _product(indices: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(indices, a, b, precision=PRECISION, preferred_element_type=jnp.float32)


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear(x, weight), (x, weight)


def _backward(operands: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    rounded = gradient.astype(weight.dtype)
    of_x = _product("to,oi->ti", rounded, weight).astype(x.dtype)
    # XLA's CPU backend has no fast product of two transposed bfloat16 operands, so this one is moved in memory.
    columns = with_layout_constraint(x.astype(weight.dtype).T, Layout(major_to_minor=(0, 1)))
    rounded = with_layout_constraint(rounded, Layout(major_to_minor=(0, 1)))
    of_weight = with_layout_constraint(_product("it,to->io", columns, rounded), Layout(major_to_minor=(0, 1)))
    return of_x, of_weight.T.astype(weight.dtype)


linear.defvjp(_forward, _backward)


def linear_on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`linear` in the forms that XLA's CPU backend runs fastest."""
    rows = x.shape[0]
    if rows == 1 and weight.dtype == jnp.float32:
        # A matrix-vector product runs at memory speed only in this rank-1 form.
        return jnp.matmul(weight, x[0], precision=PRECISION)[None]
    x = x.astype(weight.dtype)
    if rows == 1:
        # XLA multiplies one row in bfloat16 in a naive loop, ten times slower than two rows.
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    # The product is fastest with its right side as [I, T] in memory. Without the barriers XLA folds the transpositions
    # into the product, which then repacks the weight instead of the rows: 50 instead of 30 ms a pass at 8 rows.
    columns = jax.lax.optimization_barrier(x.T)
    y = jnp.matmul(weight, columns, precision=PRECISION, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T[:rows]


def as_numbers(weight: Weight) -> jax.Array:
    """The float32 numbers of a weight in blocks; any other weight as it is."""
    return dequantise(weight) if isinstance(weight, Blocks) else weight
