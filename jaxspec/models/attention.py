"""Attention block: fused projection, rotary positions, cache write, attention, output projection."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.norm import rms_norm
from jaxspec.models.params import Params
from jaxspec.models.rope import rotate
from pallas_kernels.linear import linear

# (query [T, K, G, H], key [K, S, H], value [K, S, H]) -> [T, K, G, H]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attention(
    layer: Params,
    cfg: ModelConfig,
    x: jax.Array,  # [T, D]
    rope: tuple[jax.Array, jax.Array],  # cos, sin [T, H / 2]
    key: jax.Array,  # [K, S, H]
    value: jax.Array,  # [K, S, H]
    slot: jax.Array,  # int32 []
    attend: Attend | None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Write the keys and values of T rows at `slot` and on, then attend with the KV heads of this shard.

    Returns:
      The partial sum over shards `[T, D]` (None when `attend` is None: only the cache was wanted), and the new
      cache arrays.
    """
    T = x.shape[0]
    K, rows, H, D = layer["qkv"].shape
    G = rows - 2
    qkv = linear(x, layer["qkv"].reshape(K * rows * H, D)).reshape(T, K, rows, H)
    if "qkv_bias" in layer:
        qkv = qkv + layer["qkv_bias"]
    new_key, new_value = qkv[:, :, G], qkv[:, :, G + 1]  # [T, K, H]
    if cfg.qk_norm:
        new_key = rms_norm(new_key, layer["k_norm"], cfg.norm_eps)
    start = (jnp.int32(0), slot, jnp.int32(0))
    new_key = rotate(new_key, *rope).transpose(1, 0, 2).astype(key.dtype)
    key = jax.lax.dynamic_update_slice(key, new_key, start)
    # A masked slot still meets a product with zero, and 0 * NaN is NaN: one broken row (a padding token of a damaged
    # model, an abandoned sequence in reused buffers) must not reach the others through the cache.
    new_value = jnp.where(jnp.isfinite(new_value), new_value, 0.0)
    value = jax.lax.dynamic_update_slice(value, new_value.transpose(1, 0, 2).astype(value.dtype), start)
    if attend is None:
        return None, key, value
    query = qkv[:, :, :G]
    if cfg.qk_norm:
        query = rms_norm(query, layer["q_norm"], cfg.norm_eps)
    out = attend(rotate(query, *rope), key, value)  # [T, K, G, H]
    return linear(out.reshape(T, K * G * H), layer["out"].reshape(D, K * G * H)), key, value
