"""Steps of a layer that only some families take: norms of heads, factors of queries, convolutions, own inputs."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.heads import head_layout
from jaxspec.models.params import Params
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.rms_norm import rms_norm


def norm_heads(layer: Params, cfg: ModelConfig, qkv: jax.Array) -> jax.Array:  # [T, K, G + 2, H]
    """Norm of queries and keys, for models that have one."""
    query = rms_norm(qkv[:, :, :-2], layer["q_norm"], cfg.norm_eps)
    key = rms_norm(qkv[:, :, -2:-1], layer["k_norm"], cfg.norm_eps)
    return jnp.concatenate([query, key, qkv[:, :, -1:]], axis=2)


def norm_kind(layer: Params, cfg: ModelConfig, qkv: jax.Array, lent: jax.Array | None) -> jax.Array:
    """Queries, keys and values of a model of `LayerKinds`, normalised, [T, K, G + 2, H]; scores are not divided.

    With `lent`, keys and values that a layer before has normalised, `qkv` are queries alone, [T, K, G, H].
    """
    queries = qkv if lent is not None else qkv[:, :, :-2]
    # The kernels divide by the root of the width.
    queries = rms_norm(queries, layer["q_norm"], cfg.norm_eps) * math.sqrt(qkv.shape[-1])
    if lent is None:
        key = rms_norm(qkv[:, :, -2:-1], layer["k_norm"], cfg.norm_eps)
        value = rms_norm(qkv[:, :, -1:], jnp.ones(qkv.shape[-1]), cfg.norm_eps)
        lent = jnp.concatenate([key, value], axis=2)
    return jnp.concatenate([queries, lent], axis=2)


def finish_kind(
    layer: Params, cfg: ModelConfig, x: jax.Array, own: jax.Array | None, active_rows: jax.Array | None
) -> jax.Array:  # [T, D]
    """The end of a layer of a model of `LayerKinds`: what it makes of its own inputs [T, P], and its scale."""

    def add_own(active_rows: jax.Array | None, x: jax.Array, own: jax.Array) -> jax.Array:
        gate = linear(x, as_matrix(layer["input_gate"], layer["input_gate"].shape[0]), active_rows)
        made = linear(jax.nn.gelu(gate) * own, as_matrix(layer["input_out"], layer["input_out"].shape[0]), active_rows)
        return x + rms_norm(made, layer["input_norm"], cfg.norm_eps)

    if own is not None:
        with jax.named_scope("own_inputs"):
            x = map_active_rows(add_own, active_rows, x, own)
    return x * layer["scale"]


def norm_all_heads(layer: Params, cfg: ModelConfig, kinds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One norm over the queries of all heads of all devices, and one over all keys; `kinds` are `split_slots`'s.

    Padding is zeros and adds nothing. A key head that several devices hold counts once.
    """
    T, H, shards = kinds[0].shape[0], cfg.head_dim, jax.lax.axis_size(TENSOR_AXIS)
    counts = [kind.shape[1] * (kind.shape[2] - 2) for kind in kinds]
    query = jnp.concatenate([kind[:, :, :-2].reshape(T, -1, H) for kind in kinds], axis=1)
    key = jnp.concatenate([kind[:, :, -2] for kind in kinds], axis=1)

    def norm(x: jax.Array, leaf: str, heads: int, counted: jax.Array | None) -> jax.Array:  # [T, n, H]
        scale = layer[leaf].reshape(-1)
        if shards == 1:
            return rms_norm(x.reshape(T, -1), scale, cfg.norm_eps).reshape(x.shape)
        squares = jnp.sum(x * x, axis=-1) if counted is None else jnp.sum(x * x, axis=-1) * counted
        mean = jax.lax.psum(jnp.sum(squares, axis=-1), TENSOR_AXIS) / (heads * H)
        return x * jax.lax.rsqrt(mean + cfg.norm_eps)[:, None, None] * scale.reshape(x.shape[1:])

    slots = head_layout(cfg.num_kv_heads, cfg.group, shards).kv_of_slots()
    slots = slots[:, : key.shape[1]].reshape(-1)
    first = [bool(kv >= 0 and kv not in slots[:place]) for place, kv in enumerate(slots)]
    counted = jnp.asarray(np.array(first, np.float32).reshape(shards, -1))[jax.lax.axis_index(TENSOR_AXIS)]
    query = norm(query, "q_norm", cfg.num_heads, None)
    key = norm(key, "k_norm", cfg.num_kv_heads, counted)
    normed, q, k = [], 0, 0
    for kind, count in zip(kinds, counts, strict=True):
        own = query[:, q : q + count].reshape(*kind.shape[:2], -1, H)
        normed.append(jnp.concatenate([own, key[:, k : k + kind.shape[1], None], kind[:, :, -1:]], axis=2))
        q, k = q + count, k + kind.shape[1]
    return tuple(normed)


def query_factors(cfg: ModelConfig, position: jax.Array) -> jax.Array:  # int32 [T] -> float32 [T, 1, 1, 1]
    """What `query_growth` multiplies the queries of rows with; from a table, so that no row depends on the others."""
    step = cfg.rope.original_context
    table = 1 + cfg.query_growth * np.log1p(np.arange(cfg.max_context // step + 1))
    return jnp.take(jnp.asarray(table, jnp.float32), position // step, mode="clip")[:, None, None, None]
