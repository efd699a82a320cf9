"""Fused norm and SwiGLU as a Triton kernel called through jax-triton, an optional dependency.

One program computes output columns `[f, f + block_f)` of all T rows. It goes over the inputs once, and reads each
element of its gate and up rows once. The norm needs no pass of its own, because a row's factor commutes with the
product: the program adds up the squares of the inputs that it multiplies, and scales the sums at the end.

Measured on an H100, XLA's fusion of norm and SwiGLU runs at the memory's speed (docs/results/gpu-h100.md), so `auto`
does not choose this kernel.

jax-triton needs JAX's CUDA plugin. Elsewhere the import of this module fails, and `selection.find_failure` reports it.

Letters: T rows, D inputs, F output columns.
"""

# The two packages have the names of modules in this folder, and pyright confuses them.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels import registry
from pallas_kernels.linear.blocks import Weight
from pallas_kernels.linear.config import MAX_ROWS

NAME = "jaxspec_swiglu"

# The fewest rows and columns of a matrix instruction's tile.
MIN_BLOCK = 16
WARPS = 4
# Fewest programs that a launch should have: two for each of an H100's 132 multiprocessors.
_PROGRAMS = 264
# Most bytes that one step of the pipeline holds, and that all steps hold. Ampere's smaller GPUs have 100 KB.
_STEP_BYTES = 32 << 10
_SHARED_BYTES = 96 << 10


def supports(x: jax.Array, gate_up: Weight, scale: jax.Array | None = None, eps: float = 0.0) -> bool:
    """Whether `swiglu` takes the call: few rows, and bfloat16 or float32 weights.

    Sums are scaled after the product, so the range of float16 would not be enough. JAX cannot call Triton's
    interpreter.
    """
    few = x.shape[0] <= MAX_ROWS and not registry.current().interpret
    return few and getattr(gate_up, "dtype", None) in (jnp.bfloat16, jnp.float32)


def swiglu(
    x: jax.Array,  # [T, D]
    gate_up: jax.Array,  # [2F, D]
    scale: jax.Array | None = None,  # [D]
    eps: float = 0.0,
) -> jax.Array:  # [T, F] float32
    """`api.norm_swiglu`, and without a scale `api.swiglu`; every row is computed.

    Args:
      x: rows, which are normed first if there is a scale.
      gate_up: gate rows before up rows.
      scale: scale of the norm; None for rows that are normed already.
      eps: epsilon of the norm.
    """
    T, D = x.shape
    F = gate_up.shape[0] // 2
    kernels = registry.current()
    blocks = choose_blocks(T, D, F, gate_up.dtype.itemsize)
    x = x.astype(jnp.float32)
    major, minor = kernels.capability or (0, 0)
    return jax_triton.triton_call(
        x,
        gate_up,
        # Without a norm this pointer is not read.
        x if scale is None else scale.astype(jnp.float32),
        kernel=_run_program,
        out_shape=jax.ShapeDtypeStruct((T, F), jnp.float32),
        grid=(triton.cdiv(F, blocks.columns),),
        name=NAME,
        num_warps=WARPS,
        num_stages=blocks.stages,
        # Without a value jax-triton asks the first GPU.
        compute_capability=10 * major + minor or None,
        normed=scale is not None,
        eps=eps,
        T=T,
        D=D,
        F=F,
        block_t=blocks.rows,
        block_f=blocks.columns,
        block_k=blocks.inputs,
    )


class BlockSizes(NamedTuple):
    """How the kernel is cut into programs.

    Attributes:
      rows: T, padded to a power of two.
      columns: output columns of a program, each of which reads a gate row and an up row.
      inputs: inputs of every row that one step of its loop reads.
      stages: steps of the loop whose reads are in flight.
    """

    rows: int
    columns: int
    inputs: int
    stages: int


def choose_blocks(T: int, D: int, F: int, itemsize: int) -> BlockSizes:
    """Enough programs to fill the device, then the longest steps that fit, then as many of them in flight as fit."""
    rows = max(MIN_BLOCK, 1 << (T - 1).bit_length())
    # Every program reads all rows from the second-level cache. Narrower blocks would read more bytes of rows than of
    # weights.
    columns = next((block for block in (128, 64, 32) if F >= block * _PROGRAMS or block == rows), MIN_BLOCK)
    step_bytes = 4 * rows + 2 * itemsize * columns  # of one input: float32 rows, gate and up weights
    # Exact float32 products run without the matrix unit and keep whole tiles in registers, so longer steps would spill.
    lengths = (128, 64, 32) if itemsize < 4 else (32,)
    fitting = [length for length in lengths if length * step_bytes <= _STEP_BYTES] or [MIN_BLOCK]
    # A width that the block does not divide needs masks in every step.
    inputs = next((length for length in fitting if D % length == 0), fitting[-1])
    stages = min(4, max(1, _SHARED_BYTES // (inputs * step_bytes)))
    return BlockSizes(rows, columns, inputs, stages)


@triton.jit
def _run_program(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    normed: tl.constexpr,
    eps: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    block_t: tl.constexpr,
    block_f: tl.constexpr,
    block_k: tl.constexpr,
):
    """One program: output columns `[f, f + block_f)` of all rows. A model has few sizes, so they are constants."""
    row = tl.arange(0, block_t)[:, None]
    column = tl.program_id(0) * block_f + tl.arange(0, block_f)
    # Where blocks divide a size the compiler sees that the mask is all true, and drops it.
    row_mask = row < T
    column_mask = (column < F) | (F % block_f == 0)
    # A large weight has more than 2^31 elements.
    weight_row = weight_ptr + column.to(tl.int64)[None, :] * D
    gate = tl.zeros((block_t, block_f), tl.float32)
    up = tl.zeros((block_t, block_f), tl.float32)
    squares = tl.zeros((block_t,), tl.float32)
    for start in range(0, D, block_k):
        inputs = start + tl.arange(0, block_k)
        input_mask = (inputs < D) | (D % block_k == 0)
        rows = tl.load(x_ptr + row * D + inputs[None, :], mask=row_mask & input_mask[None, :], other=0.0)
        if normed:
            squares += tl.sum(rows * rows, axis=1)
            rows = rows * tl.load(scale_ptr + inputs, mask=input_mask, other=0.0)[None, :]
        rows = rows.to(weight_ptr.dtype.element_ty)
        mask = column_mask[None, :] & input_mask[:, None]
        tile = weight_row + inputs[:, None]
        gate_tile = tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")
        up_tile = tl.load(tile + F * D, mask=mask, other=0.0, eviction_policy="evict_first")
        gate = tl.dot(rows, gate_tile, gate, input_precision="ieee")
        up = tl.dot(rows, up_tile, up, input_precision="ieee")
    if normed:
        factor = tl.rsqrt(squares / D + eps)[:, None]
        gate = gate * factor
        up = up * factor
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * F + column[None, :], out, mask=row_mask & column_mask[None, :])
