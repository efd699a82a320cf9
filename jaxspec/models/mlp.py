"""SwiGLU feed-forward block."""

import jax

from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.swiglu import norm_swiglu


def feed_forward(
    layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None
) -> jax.Array:  # [T, D] -> [T, D] float32
    """Norm, gate, up and down projection with the MLP columns of this shard; a partial sum over shards."""
    columns = layer["gate_up"].shape[1]
    gate_up = as_matrix(layer["gate_up"], 2 * columns)
    hidden = norm_swiglu(x, layer["mlp_norm"], gate_up, cfg.norm_eps, active_rows)  # [T, F]
    return linear(hidden, as_matrix(layer["down"], layer["down"].shape[0]), active_rows)
