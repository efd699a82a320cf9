"""Products of exact numerics (`pallas_kernels/exact_rows.py`): tiles of eight rows, and parts fixed by the weight.

The reference multiplies a tile at a time by XLA's product of eight rows. On NVIDIA GPUs a Pallas kernel does so in one
launch: a program multiplies one tile of rows by `BLOCK` outputs over one part of the inputs, and programs of several
tiles read a weight at the same time, from the cache. Parts are added up in their order.

Letters: T rows, I inputs, O outputs, P parts.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import registry
from pallas_kernels.exact_rows import TILE, map_tiles
from pallas_kernels.linear.blocks import COLUMNS, PLANES, Blocks, Weight
from pallas_kernels.linear.config import count_parts
from pallas_kernels.linear.reference import linear as reference
from pallas_kernels.linear.reference import linear_in_tiles

NAME = "jaxspec_exact_linear"
# Outputs of a program, and inputs of a step of its loop.
BLOCK, STEP = 64, 128


def linear(x: jax.Array, weight: Weight) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`api.linear`; each row as if it were alone."""
    parts = linear_parts(x, weight)
    return functools.reduce(jnp.add, [parts[part] for part in range(parts.shape[0])])


def linear_parts(x: jax.Array, weight: Weight) -> jax.Array:  # [T, I], [O, I] -> [P, T, O] float32
    """`api.linear_parts`; P depends on the weight and the GPU alone."""
    kernels = registry.current()
    if isinstance(weight, Blocks):
        tile = jax.ShapeDtypeStruct((TILE, x.shape[1]), x.dtype)
        fused = kernels.find("linear", tile, weight) if weight.format in PLANES | COLUMNS else None
        if fused is None:
            return map_tiles(lambda rows: linear_in_tiles(rows, weight, kernels.platform), x)[None]
        parts = map_tiles(lambda rows: jnp.swapaxes(fused.linear_parts(rows, weight), 0, 1), x)
        return jnp.swapaxes(parts, 0, 1)
    if weight.dtype == jnp.float32 or "triton" not in kernels.candidates("linear"):
        return map_tiles(lambda rows: reference(rows, weight), x)[None]
    outputs, inputs = weight.shape
    return _run(x.astype(weight.dtype), weight, count_parts(outputs, inputs, kernels.multiprocessors))


def _run(x: jax.Array, weight: jax.Array, parts: int) -> jax.Array:  # -> [parts, T, O]
    from jax.experimental.pallas import triton as plgpu

    rows, (outputs, inputs) = x.shape[0], weight.shape
    # One row and eight rows are the same call.
    x = jnp.pad(x, ((0, -rows % TILE), (0, 0)))
    out = pl.pallas_call(
        functools.partial(_run_program, inputs=inputs // parts),
        out_shape=jax.ShapeDtypeStruct((parts, x.shape[0], outputs), jnp.float32),
        # Tiles of rows beside each other, so that they find the weight in the cache.
        grid=(x.shape[0] // TILE, pl.cdiv(outputs, BLOCK), parts),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=registry.current().interpret,
        name=NAME,
    )(x, weight)
    return out[:, :rows]


def _run_program(x_ref, weight_ref, out_ref, *, inputs: int):
    """One program: a tile of rows times `BLOCK` outputs, over `inputs` inputs of one part."""
    from jax.experimental.pallas import triton as plgpu

    row = pl.program_id(0) * TILE + jnp.arange(TILE)[:, None]
    output, part = pl.program_id(1) * BLOCK + jnp.arange(BLOCK)[:, None], pl.program_id(2)
    exists = None if out_ref.shape[2] % BLOCK == 0 else output < out_ref.shape[2]

    def step(index, total):
        place = index * STEP + jnp.arange(STEP)[None, :]
        inside = None if inputs % STEP == 0 else place < inputs
        column = part * inputs + place
        mask = exists if inside is None else inside if exists is None else exists & inside
        weights = _load(plgpu, weight_ref.at[output, column], mask, (BLOCK, STEP))
        rows = _load(plgpu, x_ref.at[row, column], inside, (TILE, STEP))
        return total + plgpu.dot(weights, rows, trans_b=True)

    total = jax.lax.fori_loop(0, pl.cdiv(inputs, STEP), step, jnp.zeros((BLOCK, TILE), jnp.float32))
    mask = None if exists is None else jnp.broadcast_to(exists, total.shape)
    plgpu.store(out_ref.at[part, row.reshape(1, -1), output], total, mask=mask)


def _load(plgpu, ref, mask, shape):
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=jnp.broadcast_to(mask, shape), other=0)
