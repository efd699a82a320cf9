"""A sum of residuals and the norm after it in one launch, in Pallas' Triton dialect: NVIDIA GPUs from Ampere on.

A program has one row in its registers. It adds up the parts in their order, so that the sum does not depend on the rows
beside it.

Letters: T rows, D width, P parts of what is added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import registry

NAME = "jaxspec_add_norm"
# Many rows are bound by memory, which XLA's launches use as well.
MAX_ROWS = 64
# Numbers of a row that a program holds in registers, and those of one thread.
MOST_WIDTH, THREAD_NUMBERS = 32768, 16


def supports(x: jax.Array, parts: jax.Array, scale: jax.Array) -> bool:
    """Whether `add_norm` takes a call: a few rows that registers hold."""
    return 1 <= x.shape[0] <= MAX_ROWS and x.shape[1] <= MOST_WIDTH and parts.shape[0] >= 1


def add_norm(
    x: jax.Array,  # [T, D] float32
    parts: jax.Array,  # [P, T, D] float32
    scale: jax.Array,  # [D]
    eps: float,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:  # [T, D] float32, [T, D]
    """The operation, with the contract of `api.add_norm`."""
    T, D = x.shape
    block = max(1 << (D - 1).bit_length(), 32)
    warps = min(max(block // (32 * THREAD_NUMBERS), 1), 16)
    return pl.pallas_call(
        functools.partial(_add_row, eps=eps, block=block),
        out_shape=(jax.ShapeDtypeStruct((T, D), jnp.float32), jax.ShapeDtypeStruct((T, D), dtype)),
        grid=(T,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=registry.current().interpret,
        name=NAME,
    )(x, parts, scale)


def _add_row(x_ref, parts_ref, scale_ref, sum_ref, normed_ref, *, eps: float, block: int):
    """One program, which has one row."""
    row, column, D = pl.program_id(0), jnp.arange(block), x_ref.shape[1]
    mask = None if D == block else column < D

    def read(ref) -> jax.Array:
        loaded = plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)
        return loaded.astype(jnp.float32)

    added = read(parts_ref.at[0, row, column])
    for part in range(1, parts_ref.shape[0]):
        added = added + read(parts_ref.at[part, row, column])
    total = read(x_ref.at[row, column]) + added
    plgpu.store(sum_ref.at[row, column], total, mask=mask)
    normed = total * jax.lax.rsqrt(jnp.sum(total * total) / D + eps) * read(scale_ref.at[column])
    plgpu.store(normed_ref.at[row, column], normed.astype(normed_ref.dtype), mask=mask)
