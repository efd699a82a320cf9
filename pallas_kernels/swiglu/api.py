"""Gate and up projection of a SwiGLU block, fused with the activation that joins them."""

import jax
import jax.numpy as jnp

from pallas_kernels import native, registry
from pallas_kernels.linear.api import check_operands, live_rows, native_weight
from pallas_kernels.linear.blocks import Weight
from pallas_kernels.swiglu import reference


def swiglu(x: jax.Array, gate_up: Weight, live: jax.Array | None = None) -> jax.Array:  # [T, I], [2F, I] -> [T, F]
    """`silu(x @ gate.T) * (x @ up.T)`, float32.

    Args:
      x: `[T, I]` activations.
      gate_up: `[2F, I]`, the F rows of the gate before those of the other; see `linear`.
      live: see `linear`.

    Raises:
      ValueError: shapes do not fit together.
    """
    check_operands(x, gate_up)
    if gate_up.shape[0] % 2:
        raise ValueError(f"swiglu needs as many gate as up rows, got {gate_up.shape[0]} in all")
    kernels = registry.current()
    if not kernels.native:
        return reference.swiglu(x, gate_up)
    data, weight_format = native_weight(gate_up)
    out = jax.ShapeDtypeStruct((x.shape[0], gate_up.shape[0] // 2), jnp.float32)
    return native.call(
        "swiglu", out, x.astype(jnp.float32), data, live_rows(live, x), format=weight_format, threads=kernels.threads
    )
