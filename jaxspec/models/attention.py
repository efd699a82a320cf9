"""Grouped-query attention over a cache: projections, the write, and what comes after the scores."""

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.norm import rms_norm
from jaxspec.models.params import Params
from jaxspec.models.rope import rotate
from pallas_kernels.linear import linear


def project(
    layer: Params,
    cfg: ModelConfig,
    x: jax.Array,  # [T, D]
    cos: jax.Array,  # [T, H / 2]
    sin: jax.Array,  # [T, H / 2]
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, K, G, H], [T, K, H], [T, K, H]
    """Queries, keys and values of T rows for the KV heads of this shard; rotary positions applied."""
    T = x.shape[0]
    K, rows, H, D = layer["qkv"].shape
    G = rows - 2
    qkv = linear(x, layer["qkv"].reshape(K * rows * H, D)).reshape(T, K, rows, H)
    if "qkv_bias" in layer:
        qkv = qkv + layer["qkv_bias"]
    query, key, value = qkv[:, :, :G], qkv[:, :, G], qkv[:, :, G + 1]
    if cfg.qk_norm:
        query = rms_norm(query, layer["q_norm"], cfg.norm_eps)
        key = rms_norm(key, layer["k_norm"], cfg.norm_eps)
    # A masked slot still meets a product with zero, and 0 * NaN is NaN: one broken row (a padding token of a damaged
    # model, an abandoned sequence in reused buffers) must not reach the others through the cache.
    value = jnp.where(jnp.isfinite(value), value, 0.0)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def write_rows(cached: jax.Array, rows: jax.Array, slot: jax.Array) -> jax.Array:
    """Write keys or values `[T, K, H]` into a cache layer `[K, S, H]` at `slot` and on."""
    start = (jnp.int32(0), slot, jnp.int32(0))
    return jax.lax.dynamic_update_slice(cached, rows.transpose(1, 0, 2).astype(cached.dtype), start)


def project_out(layer: Params, heads: jax.Array) -> jax.Array:  # [T, K, G, H] -> [T, D]
    """Output projection of this shard's heads; a partial sum over shards."""
    T, K, G, H = heads.shape
    return linear(heads.reshape(T, K * G * H), layer["out"].reshape(-1, K * G * H))
