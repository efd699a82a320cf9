"""The matrix products of a layer: those before and after the attention scores, and the SwiGLU block."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params
from jaxspec.models.quantization import PARTS
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import norm_swiglu


def project(
    layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None
) -> jax.Array:  # [T, D] -> [T, K, G + 2, H] float32
    """Queries, key and value of each KV head of this shard, for T rows; positions are not applied yet."""
    qkv = multiply_heads(layer["qkv"], x, active_rows)
    if "qkv_bias" in layer:
        qkv = qkv + layer["qkv_bias"]
    if cfg.qk_norm:
        query = rms_norm(qkv[:, :, :-2], layer["q_norm"], cfg.norm_eps)
        key = rms_norm(qkv[:, :, -2:-1], layer["k_norm"], cfg.norm_eps)
        qkv = jnp.concatenate([query, key, qkv[:, :, -1:]], axis=2)
    return qkv


def project_out(layer: Params, heads: jax.Array, active_rows: jax.Array | None) -> jax.Array:  # [T, K, G, H] -> [T, D]
    """Output projection of this shard's heads; a partial sum over shards."""
    return linear(heads.reshape(heads.shape[0], -1), as_matrix(layer["out"], layer["out"].shape[0]), active_rows)


def multiply_heads(weight: Any, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:  # [T, D] -> [T, K, n, H]
    """Rows times `[K, n, H, D]`, or times the parts of one that are kept in different types."""
    if isinstance(weight, dict):
        return jnp.concatenate([multiply_heads(weight[part], x, active_rows) for part in PARTS], axis=2)
    K, n, H = weight.shape[:3]
    return linear(x, as_matrix(weight, K * n * H), active_rows).reshape(x.shape[0], K, n, H)


def feed_forward(
    layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None
) -> jax.Array:  # [T, D] -> [T, D] float32
    """Norm, gate, up and down projection with the MLP columns of this shard; a partial sum over shards."""
    columns = layer["gate_up"].shape[1]
    gate_up = as_matrix(layer["gate_up"], 2 * columns)
    hidden = norm_swiglu(x, layer["mlp_norm"], gate_up, cfg.norm_eps, active_rows)  # [T, F]
    return linear(hidden, as_matrix(layer["down"], layer["down"].shape[0]), active_rows)
