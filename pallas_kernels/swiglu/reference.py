"""SwiGLU as one product and what XLA makes of the rest."""

import jax

from pallas_kernels.linear import linear
from pallas_kernels.linear.blocks import Weight


def swiglu(x: jax.Array, gate_up: Weight) -> jax.Array:  # [T, I], [2F, I] -> [T, F] float32
    """Same contract as `api.swiglu`; every row is computed."""
    hidden = linear(x, gate_up)
    columns = gate_up.shape[0] // 2
    return jax.nn.silu(hidden[:, :columns]) * hidden[:, columns:]
