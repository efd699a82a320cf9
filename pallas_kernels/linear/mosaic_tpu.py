"""Rows times a weight in columns, for TPUs, in Pallas' TPU dialect: the weight stays packed, in HBM and on its way.

One program computes `block` outputs of up to `ROWS` rows. It has all bytes of its outputs, makes bfloat16 numbers of a
few planes of codes at a time, and multiplies rows by them on the matrix unit. Of up to `ROWS` rows the weight is read
once, of more once for each tile of them. One row is padded to a tile of eight, so that it takes the products of many.

Letters: T rows, I inputs, O outputs, n blocks of a row, C planes of codes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import registry
from pallas_kernels.linear.blocks import COLUMNS, Blocks, Weight
from pallas_kernels.linear.columns import head_bytes
from pallas_kernels.linear.reference import PRECISION

ROWS, TILE = 128, 8
# Bytes of a weight that a program has in the memory beside the core; the next program's are on their way.
BLOCK_BYTES, MOST_OUTPUTS = 2 << 20, 512
# Inputs that are multiplied at a time, at least: whole rows of the matrix unit.
INPUTS = 512
LIMIT = 48 << 20  # bytes beside the core


def supports(x: jax.Array, weight: Weight) -> bool:
    """Whether `linear` and `swiglu` take a call: any rows, and a weight in columns."""
    return x.shape[0] > 0 and isinstance(weight, Blocks) and weight.format in COLUMNS


def linear_parts(x: jax.Array, weight: Blocks) -> jax.Array:  # [T, I], [O, I] -> [1, T, O] float32
    """`api.linear_parts`: one part."""
    return linear(x, weight)[None]


def swiglu(x: jax.Array, gate_up: Blocks, dtype: Any = jnp.float32) -> jax.Array:  # [T, I], [2F, I] -> [T, F]
    """`swiglu.api.swiglu`, whose activation XLA computes."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(dtype)


def linear(x: jax.Array, weight: Blocks) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """`api.linear` of a weight in columns; every row is computed."""
    (nbytes, n, outputs), T, head = weight.data.shape, x.shape[0], head_bytes(weight.format)
    halves, C = 2 if weight.format.startswith("int4") else 1, nbytes - head
    planes = 1
    while planes < C and (planes * n < INPUTS or planes * n % 128):
        planes *= 2
    rows = min(-(-T // TILE) * TILE, ROWS)
    # The inputs in the order of the bytes: byte c of block j has those of lane c * n + j, and of int4 an upper one.
    x = jnp.pad(x.astype(jnp.bfloat16), [(0, -T % rows), (0, n * halves * C - x.shape[1])])
    x = x.reshape(-1, n, C // (16 if halves == 2 else C), halves, 16 if halves == 2 else C)
    x = x.transpose(3, 2, 4, 1, 0).reshape(halves, C // planes, planes * n, -1).swapaxes(2, 3)
    block = MOST_OUTPUTS
    while block > 128 and nbytes * n * block > BLOCK_BYTES:
        block //= 2
    out = pl.pallas_call(
        functools.partial(_run, head=head, planes=planes, interpret=registry.current().interpret),
        grid=(x.shape[2] // rows, pl.cdiv(outputs, block)),
        in_specs=[
            pl.BlockSpec((halves, C // planes, rows, planes * n), lambda part, column: (0, 0, part, 0)),
            pl.BlockSpec((nbytes, n, block), lambda part, column: (0, 0, column)),
        ],
        out_specs=pl.BlockSpec((rows, block), lambda part, column: (part, column)),
        out_shape=jax.ShapeDtypeStruct((x.shape[2], outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=LIMIT),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if registry.current().interpret else False,
        name="jaxspec_linear",
    )(x, weight.data)  # fmt: skip
    return out[:T]


def _run(x_ref, data_ref, out_ref, *, head: int, planes: int, interpret: bool):
    """One tile of rows and one block of outputs."""
    halves, steps, _, inputs = x_ref.shape
    block = data_ref.shape[2]
    # The interpreter's host has no product of bfloat16; those of the same numbers in float32 are the same.
    wide = jnp.float32 if interpret else jnp.bfloat16
    first = [data_ref[plane].astype(jnp.int32) for plane in range(head)]
    word = functools.reduce(jnp.bitwise_or, [byte << 8 * plane for plane, byte in enumerate(first[:4])])
    if head == 3:  # int4_g32
        scale, zero = (word & 0xFFFFF0) << 8, word & 15
    else:
        scale, zero = word, (first[4] ^ 128) - 128 + (8 if halves == 2 else 0)
    scale, zero = lax.bitcast_convert_type(scale, jnp.float32), zero.astype(jnp.float32)

    def step(index, total):
        codes = data_ref[pl.ds(head + index * planes, planes)].astype(jnp.int32)
        parts = (codes & 15, codes >> 4) if halves == 2 else ((codes ^ 128) - 128,)
        for half, part in enumerate(parts):
            numbers = ((part.astype(jnp.float32) - zero) * scale).reshape(inputs, block)
            total += jnp.dot(
                x_ref[half, index].astype(wide), numbers.astype(jnp.bfloat16).astype(wide),
                precision=PRECISION if interpret else None, preferred_element_type=jnp.float32,
            )  # fmt: skip
        return total

    out_ref[...] = lax.fori_loop(0, steps, step, jnp.zeros(out_ref.shape, jnp.float32))
