"""The draft in training: its geometry, where its weights start, and its forward pass over whole texts.

The pass runs the library's own projections, norms and rotary tables through XLA, over many texts at once and without a
cache, so that it can be differentiated; tests compare it with the pass that decodes.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.family_steps import norm_heads
from jaxspec.models.layer import feed_forward, project, project_out
from jaxspec.models.params import Params
from jaxspec.models.rope import rope_frequencies
from pallas_kernels.registry import Kernels, using
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables

# Plain XLA products: what decodes fast on CPU (few rows) does not train fast.
KERNELS = Kernels("xla", "training")
_HIDDEN = -1e30


def student_config(target: ModelConfig, layers: Sequence[int], head_ids: Sequence[int]) -> ModelConfig:
    """Geometry of a draft of the given layers of its target, which scores `head_ids` only (all tokens if empty).

    Raises:
      ConfigError: the target has something that `student_hidden` does not compute.
    """
    plain = dataclasses.replace(
        target, experts=None, activation="silu", norms="pre", wide_qk_norm=False, query_scale=1.0,
        attention_softcap=None, logit_softcap=None, local_rope=None, attention_sinks=False, out_bias=False,
        nope_layers=(), query_growth=0.0, residual_scale=1.0, logit_scale=1.0,
        rope=dataclasses.replace(target.rope, attention_factor=1.0),
    )  # fmt: skip
    if plain != target:
        raise ConfigError(f"students of {target.family} models are not supported")
    sliding = tuple(target.sliding_layers[i] for i in layers) if target.sliding_layers else ()
    return dataclasses.replace(
        target, num_layers=len(layers), sliding_layers=sliding, shares_embedding=True, head_ids=tuple(head_ids)
    )


def init_student(target: Params, layers: Sequence[int]) -> Params:
    """The student's own parameters, copied from layers of the target; float32."""
    params = {"final_norm": target["final_norm"], "layers": [target["layers"][i] for i in layers]}
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)


def student_hidden(
    params: Params,
    cfg: ModelConfig,
    embed: jax.Array,  # [V, D]
    token: jax.Array,  # int32 [B, T]
    position: jax.Array,  # int32 [B, T]
    segment: jax.Array,  # int32 [B, T]
) -> jax.Array:  # [B, T, D]
    """Hidden states after the final norm. Tokens see those before them in their own segment."""
    B, T = token.shape
    order = jnp.arange(T)
    seen = (segment[:, :, None] == segment[:, None, :]) & (order[:, None] >= order[None, :])
    with using(KERNELS):
        cos, sin = rope_tables(position.reshape(-1), jnp.asarray(rope_frequencies(cfg.rope, cfg.head_dim)))
        x = embed[token].reshape(B * T, cfg.embed_dim)
        for index, layer in enumerate(params["layers"]):
            qkv = project(layer, cfg, rms_norm(x, layer["attn_norm"], cfg.norm_eps), None)
            qkv = norm_heads(layer, cfg, qkv) if cfg.qk_norm else qkv
            qkv = qkv.reshape(B, T, cfg.num_kv_heads, cfg.group + 2, cfg.head_dim)
            rotated = _rotate(qkv[..., :-1, :], cos.reshape(B, T, 1, 1, -1), sin.reshape(B, T, 1, 1, -1))
            query, key, value = rotated[..., :-1, :], rotated[..., -1, :], qkv[..., -1, :]
            window, mask = cfg.window(index), seen
            if window is not None:
                mask = seen & (position[:, :, None] - position[:, None, :] < window)
            scores = jnp.einsum("btkgh,bskh->bkgts", query, key) * cfg.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, _HIDDEN), axis=-1)
            heads = jnp.einsum("bkgts,bskh->btkgh", weights, value)
            x = x + project_out(layer, heads.reshape(B * T, *heads.shape[2:]), None)
            x = x + feed_forward(layer, cfg, x, None)
        return rms_norm(x, params["final_norm"], cfg.norm_eps).reshape(B, T, cfg.embed_dim)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
