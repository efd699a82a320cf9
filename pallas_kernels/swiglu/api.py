"""The gate and up projections of a SwiGLU block, their activation, and the norm before them, as one operation."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native, registry
from pallas_kernels.linear.api import check_operands, find_packed, linear, native_weight
from pallas_kernels.linear.blocks import PLANES, Blocks, Weight
from pallas_kernels.linear.config import MAX_ROWS
from pallas_kernels.rms_norm import rms_norm


def swiglu(
    x: jax.Array, gate_up: Weight, active_rows: jax.Array | None = None, dtype: Any = jnp.float32
) -> jax.Array:  # [T, I], [2F, I] -> [T, F]
    """`silu(x @ gate.T) * (x @ up.T)` in float32, rounded to `dtype` at last.

    Args:
      x: `[T, I]` activations.
      gate_up: `[2F, I]`, the F rows of the gate before the F rows of the up projection; a weight as `linear` takes it.
      active_rows: int32 [], at least 1: the rows that matter, as in `linear`. None for all.
      dtype: of the result; what reads it may round it to that anyway.

    Raises:
      ValueError: shapes do not fit together.
    """
    _check(x, gate_up)
    kernels = registry.current()
    if not kernels.native:
        if packed := find_packed(x, gate_up):
            return packed.swiglu(x, gate_up, dtype=dtype)
        fused = _find(x, gate_up)
        return (fused.swiglu if fused else reference)(x, gate_up).astype(dtype)
    data, weight_format = native_weight(gate_up)
    out = jax.ShapeDtypeStruct((x.shape[0], gate_up.shape[0] // 2), jnp.float32)
    result = native.call(
        "swiglu", out, x.astype(jnp.float32), data, native.row_count(active_rows, x),
        format=weight_format, threads=kernels.threads,
    )  # fmt: skip
    return result.astype(dtype)


def reference(x: jax.Array, gate_up: Weight) -> jax.Array:  # [T, I], [2F, I] -> [T, F] float32
    """`swiglu` as one product and XLA's own fusion of the rest; every row is computed."""
    hidden = linear(x, gate_up)
    columns = gate_up.shape[0] // 2
    return jax.nn.silu(hidden[:, :columns]) * hidden[:, columns:]


def norm_swiglu(
    x: jax.Array,  # [T, I]
    scale: jax.Array,  # [I]
    gate_up: Weight,  # [2F, I]
    eps: float,
    active_rows: jax.Array | None = None,  # int32 []
    dtype: Any = jnp.float32,
) -> jax.Array:  # [T, F]
    """`swiglu(rms_norm(x, scale, eps), gate_up, active_rows, dtype)`, by GPU kernels in one pass over the weights.

    GPU kernels round rows to the weights' dtype before the division by the root mean square, all others after it. Both
    round once.

    Raises:
      ValueError: shapes do not fit together.
    """
    _check(x, gate_up)
    fused = _find(x, gate_up, scale, eps) if scale.shape == x.shape[1:] else None
    if fused is None:
        return swiglu(rms_norm(x, scale, eps), gate_up, active_rows, dtype)
    return fused.swiglu(x, gate_up, scale, eps).astype(dtype)


def _find(x: jax.Array, gate_up: Weight, *norm: Any) -> ModuleType | None:
    """The GPU kernel that takes numbers, or None. Calls of more than `MAX_ROWS` rows go to XLA without a warning."""
    in_planes = isinstance(gate_up, Blocks) and gate_up.format in PLANES
    few = x.shape[0] <= MAX_ROWS and not in_planes and not registry.current().exact
    return registry.current().find("swiglu", x, gate_up, *norm) if few else None


def _check(x: jax.Array, gate_up: Weight) -> None:
    check_operands(x, gate_up)
    if gate_up.shape[0] % 2:
        raise ValueError(f"swiglu needs as many gate as up rows, got {gate_up.shape[0]} in all")


def geglu(
    x: jax.Array, gate_up: Weight, active_rows: jax.Array | None = None
) -> jax.Array:  # [T, I], [2F, I] -> [T, F]
    """`gelu(x @ gate.T) * (x @ up.T)` with the approximation of gelu by tanh, float32; operands as in `swiglu`.

    Raises:
      ValueError: shapes do not fit together.
    """
    _check(x, gate_up)
    hidden = linear(x, gate_up, active_rows)
    columns = gate_up.shape[0] // 2
    return jax.nn.gelu(hidden[:, :columns], approximate=True) * hidden[:, columns:]
