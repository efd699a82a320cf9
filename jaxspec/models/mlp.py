"""SwiGLU feed-forward block."""

import jax

from jaxspec.models.params import Params
from pallas_kernels.linear import linear


def swiglu(layer: Params, x: jax.Array) -> jax.Array:  # [T, D] -> [T, D] float32
    """Gate, up and down projection with the MLP columns of this shard; a partial sum over shards."""
    _, columns, width = layer["gate_up"].shape
    hidden = linear(x, layer["gate_up"].reshape(2 * columns, width))  # [T, 2F]
    gate, up = hidden[:, :columns], hidden[:, columns:]
    return linear(jax.nn.silu(gate) * up, layer["down"])
