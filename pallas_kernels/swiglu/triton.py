"""Fused norm and SwiGLU as a Pallas kernel in the Triton dialect: NVIDIA GPUs from Ampere on.

One program computes output columns `[f, f + block_f)` of all T rows. It goes over the inputs once, and reads each
element of its gate and up rows once. The norm needs no pass of its own, because a row's factor commutes with the
product: the program adds up the squares of the inputs that it multiplies, and scales the sums at the end.

Letters: T rows, D inputs, F output columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import registry
from pallas_kernels.linear.blocks import Weight
from pallas_kernels.swiglu.config import MAX_ROWS, Config, block_rows, choose

NAME = "jaxspec_swiglu"


def supports(x: jax.Array, gate_up: Weight, scale: jax.Array | None = None, eps: float = 0.0) -> bool:
    """Whether `swiglu` takes the call: few rows, and bfloat16 or float32 weights.

    Sums are scaled after the product, so the range of float16 would not be enough.
    """
    return x.shape[0] <= MAX_ROWS and getattr(gate_up, "dtype", None) in (jnp.bfloat16, jnp.float32)


def swiglu(
    x: jax.Array,  # [T, D]
    gate_up: jax.Array,  # [2F, D]
    scale: jax.Array | None = None,  # [D]
    eps: float = 0.0,
    config: Config | None = None,
) -> jax.Array:  # [T, F] float32
    """`api.norm_swiglu`, and without a scale `api.swiglu`; every row is computed.

    Args:
      x: rows, which are normed first if there is a scale.
      gate_up: gate rows before up rows.
      scale: scale of the norm; None for rows that are normed already.
      eps: epsilon of the norm.
      config: block sizes; None takes those of `config.choose`.
    """
    T, D = x.shape
    F = gate_up.shape[0] // 2
    kernels = registry.current()
    config = config or choose(kernels.device_kind, T, D, F, gate_up.dtype.itemsize)
    norm = () if scale is None else (scale.astype(jnp.float32),)
    return pl.pallas_call(
        functools.partial(_run_program, eps=eps, config=config),
        out_shape=jax.ShapeDtypeStruct((T, F), jnp.float32),
        grid=(pl.cdiv(F, config.block_f),),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=kernels.interpret,
        name=NAME,
    )(x.astype(jnp.float32), gate_up, *norm)


def _run_program(x_ref, weight_ref, *refs, eps: float, config: Config):
    """One program. `refs` are the scale, if there is a norm, and the output."""
    *scale_ref, out_ref = refs
    (T, D), F = x_ref.shape, out_ref.shape[1]
    block_t, block_f, block_k = block_rows(T), config.block_f, config.block_k
    precision = jax.lax.Precision.HIGHEST if weight_ref.dtype == jnp.float32 else None
    first = pl.program_id(0) * block_f
    # Arrays of indices: JAX 0.12 refuses a slice that it can see to reach over the end.
    row, column = jnp.arange(block_t)[:, None], first + jnp.arange(block_f)
    row_mask = _within(0, block_t, T)
    column_mask = _within(first, block_f, F)

    def step(index, sums):
        gate, up, squares = sums
        inputs = index * block_k + jnp.arange(block_k)
        input_mask = _within(index * block_k, block_k, D)
        rows = _load(x_ref.at[row, inputs[None, :]], row_mask, input_mask)  # [block_t, block_k] float32
        if scale_ref:
            squares += jnp.sum(rows * rows, axis=1)
            rows = rows * _load(scale_ref[0].at[inputs], input_mask)
        rows = rows.astype(weight_ref.dtype)
        # Weights are read once, and leave the cache to the rows, which every program reads.
        read = functools.partial(_load, eviction_policy="evict_first")
        multiply = functools.partial(plgpu.dot, rows, trans_b=True, precision=precision)
        gate += multiply(read(weight_ref.at[column[:, None], inputs[None, :]], column_mask, input_mask))
        up += multiply(read(weight_ref.at[F + column[:, None], inputs[None, :]], column_mask, input_mask))
        return gate, up, squares

    zeros = jnp.zeros((block_t, block_f), jnp.float32)
    sums = zeros, zeros, jnp.zeros(block_t, jnp.float32)
    gate, up, squares = jax.lax.fori_loop(0, pl.cdiv(D, block_k), step, sums)
    if scale_ref:
        factor = jax.lax.rsqrt(squares / D + eps)[:, None]
        gate, up = gate * factor, up * factor
    mask = _combine(row_mask, column_mask)
    plgpu.store(out_ref.at[row, column[None, :]], gate * jax.nn.sigmoid(gate) * up, mask=mask)


def _within(start, block: int, size: int):  # -> bool [block] | None
    """Which places of a block lie within an axis; None where all are known to."""
    return None if size % block == 0 else start + jnp.arange(block) < size


def _combine(first, second):
    """The mask of a tile from the masks of its two axes."""
    if first is None or second is None:
        return first[:, None] if first is not None else second[None, :] if second is not None else None
    return first[:, None] & second[None, :]


def _load(ref, first, second=None, eviction_policy: str | None = None):
    """A block of one or two axes, with zeros outside the array."""
    mask = first if len(ref.shape) == 1 else _combine(first, second)
    other = None if mask is None else 0.0
    if mask is not None:
        mask = jnp.broadcast_to(mask, ref.shape)
    return plgpu.load(ref, mask=mask, other=other, eviction_policy=eviction_policy)
