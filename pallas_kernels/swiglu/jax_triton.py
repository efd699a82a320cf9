"""Fused norm and SwiGLU as a Triton kernel called through jax-triton, an optional dependency.

It is the program of `triton.py`, where its steps are explained, in Triton's own language. The dialect inside Pallas is
deprecated, and Triton's own compiler is newer than the one inside XLA.

jax-triton needs JAX's CUDA plugin. Elsewhere the import of this module fails, and `selection.find_failure` reports it.

Letters: T rows, D inputs, F output columns.
"""

# The two packages have the names of modules in this folder, and pyright confuses them.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels import registry
from pallas_kernels.linear.blocks import Weight
from pallas_kernels.swiglu.config import MAX_ROWS, Config, block_rows, choose

NAME = "jaxspec_swiglu"


def supports(x: jax.Array, gate_up: Weight, scale: jax.Array | None = None, eps: float = 0.0) -> bool:
    """Whether `swiglu` takes the call, as in `triton.py`. JAX cannot call Triton's interpreter."""
    few = x.shape[0] <= MAX_ROWS and not registry.current().interpret
    return few and getattr(gate_up, "dtype", None) in (jnp.bfloat16, jnp.float32)


def swiglu(
    x: jax.Array,  # [T, D]
    gate_up: jax.Array,  # [2F, D]
    scale: jax.Array | None = None,  # [D]
    eps: float = 0.0,
    config: Config | None = None,
) -> jax.Array:  # [T, F] float32
    """The operation, with the contract of `triton.swiglu`."""
    T, D = x.shape
    F = gate_up.shape[0] // 2
    kernels = registry.current()
    config = config or choose(kernels.device_kind, T, D, F, gate_up.dtype.itemsize)
    x = x.astype(jnp.float32)
    major, minor = kernels.capability or (0, 0)
    return jax_triton.triton_call(
        x,
        gate_up,
        # Without a norm this pointer is not read.
        x if scale is None else scale.astype(jnp.float32),
        kernel=_run_program,
        out_shape=jax.ShapeDtypeStruct((T, F), jnp.float32),
        grid=(triton.cdiv(F, config.block_f),),
        name=NAME,
        num_warps=config.warps,
        num_stages=config.stages,
        # Without a value jax-triton asks the first GPU.
        compute_capability=10 * major + minor or None,
        normed=scale is not None,
        eps=eps,
        T=T,
        D=D,
        F=F,
        block_t=block_rows(T),
        block_f=config.block_f,
        block_k=config.block_k,
    )


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
