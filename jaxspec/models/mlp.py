"""SwiGLU feed-forward block."""

import jax

from jaxspec.models.params import Params
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.swiglu import swiglu


def feed_forward(layer: Params, x: jax.Array, live: jax.Array | None) -> jax.Array:  # [T, D] -> [T, D] float32
    """Gate, up and down projection with the MLP columns of this shard; a partial sum over shards."""
    columns = layer["gate_up"].shape[1]
    hidden = swiglu(x, as_matrix(layer["gate_up"], 2 * columns), live)  # [T, F]
    return linear(hidden, as_matrix(layer["down"], layer["down"].shape[0]), live)
