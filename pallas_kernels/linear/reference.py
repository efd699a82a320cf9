"""The linear layer left to XLA: the reference, and the form that XLA's CPU backend runs fastest."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.linear.blocks import COLUMNS, PLANES, Blocks, Weight, dequantise
from pallas_kernels.linear.planes import dequantise_planes

# Float32 means float32: no TF32 on GPUs. Products of 16-bit numbers are exact in float32 at any precision. There it
# only says which kernels XLA takes, and those of the highest one are not slower: a round of Llama-3-8B takes 5.4 ms a
# token on an H100, and 6.0 ms with the default (docs/results/gpu-h100.md).
PRECISION = jax.lax.Precision.HIGHEST

# Numbers of a weight in blocks that are in memory at once: 16 MiB as float32.
TILE_VALUES = 4 << 20


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


@jax.custom_batching.custom_vmap
def linear_of_batch(x: jax.Array, weight: jax.Array) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`linear` for code that is differentiated through `jax.vmap`: the rows of a batch are those of one product.

    Else the gradient of a weight would be computed for each element of the batch, and summed after that.
    """
    return linear(x, weight)


@linear_of_batch.def_vmap
def _(size: int, batched: list[bool], x: jax.Array, weight: jax.Array) -> tuple[jax.Array, bool]:
    if batched != [True, False]:
        raise NotImplementedError("a batch of weights")
    return linear(x.reshape(-1, x.shape[-1]), weight).reshape(size, -1, weight.shape[0]), True


def linear_in_parts(x: jax.Array, weight: jax.Array, parts: int) -> jax.Array:  # [T, I], [O, I] -> [parts, T, O]
    """`linear` of each of so many equal parts of the inputs, float32."""
    rows, columns = (array.reshape(len(array), parts, -1) for array in (x.astype(weight.dtype), weight))
    return _product("tpi,opi->pto", rows, columns)


def linear_on_tpu(x: jax.Array, weight: jax.Array) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`linear` on the matrix unit for any number of rows: one row is padded to a tile of eight.

    XLA multiplies one row by sums on the vector unit, in an order of its own: plain decoding and verification would
    round differently.
    """
    return linear(pad_one_row(x), weight)[: x.shape[0]]


def pad_one_row(x: jax.Array, rows: int = 8) -> jax.Array:
    """One row `[1, ...]` with zeros after it, `rows` in all; more rows as they are."""
    return jnp.pad(x, [(0, rows - 1)] + [(0, 0)] * (x.ndim - 1)) if x.shape[0] == 1 else x


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


def linear_in_tiles(
    x: jax.Array, weight: Blocks, platform: str, first: jax.Array | int = 0, outputs: int | None = None
) -> jax.Array:  # [T, I], [O, I] -> [T, outputs] float32
    """`api.linear` of a weight in blocks: a tile of outputs at a time becomes numbers, the weight itself never does.

    On accelerators the numbers are bfloat16, as weights are there, and rows are rounded to it. Of a weight that holds
    several, such as all experts, only `outputs` from `first` on are multiplied; None for all.
    """
    multiply = linear_on_cpu if platform == "cpu" else linear
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    if weight.outer:
        return multiply(x, as_numbers(weight)[:, : x.shape[1]].astype(dtype))
    outputs, inputs = outputs or weight.shape[0], x.shape[1]
    size = min(outputs, max(1, TILE_VALUES // inputs))
    if size == weight.shape[0]:
        return multiply(x, as_numbers(weight).astype(dtype))

    def add_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        # The last tile begins earlier where tiles do not divide the outputs; both compute the same there.
        start = jnp.minimum(tile * size, outputs - size)
        data = jax.lax.dynamic_slice_in_dim(weight.data, first + start, size)
        product = multiply(x, as_numbers(Blocks(data, weight.format)).astype(dtype))
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, axis=1)

    return jax.lax.fori_loop(0, -(-outputs // size), add_tile, jnp.zeros((len(x), outputs), jnp.float32))


def as_numbers(weight: Weight) -> jax.Array:
    """The float32 numbers of a weight in blocks; any other weight as it is."""
    if not isinstance(weight, Blocks):
        return weight
    if weight.format in COLUMNS:
        return dequantise(Blocks(weight.data.transpose(2, 1, 0), weight.format.removesuffix("_columns")))
    return dequantise_planes(weight) if weight.format in PLANES else dequantise(weight)
