"""Tiny random models of every family, loaded through the production path, and ways to run them."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.checkpoint.load import load_foreign
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.kv_cache import commit_rows, init_cache
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.models.params import declare_params, is_info, leaf_name
from jaxspec.models.recurrent import RecurrentConfig
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

LLAMA3_ROPE = RopeConfig(10000.0, "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)

_BASE = ModelConfig("llama", 2, 48, 70, 9, 3, 8, 101, max_context=512)

# Nine heads over three KV heads, as the default model has, and widths that no power of two divides.
FAMILIES: dict[str, ModelConfig] = {
    "llama": dataclasses.replace(_BASE, rope=LLAMA3_ROPE),
    "llama-tied": dataclasses.replace(_BASE, tied=True),
    "mistral": dataclasses.replace(_BASE, family="mistral", sliding_window=7),
    "qwen2": dataclasses.replace(
        _BASE, family="qwen2", qkv_bias=True, sliding_window=7, sliding_layers=(False, True)
    ),
    "qwen3": dataclasses.replace(_BASE, family="qwen3", qk_norm=True, head_dim=12, num_heads=6, tied=True),
}  # fmt: skip

_GEMMA4 = dict(
    family="gemma4_text", num_layers=4, activation="gelu", norms="both", tied=True, embed_scale=48**0.5,
    qk_norm=True, rope=RopeConfig(1e6, "proportional", partial=1 / 3), local_rope=RopeConfig(), sliding_window=7,
    sliding_layers=(True, False) * 2,
)  # fmt: skip
# Families that differ in more than that; tests that take long for each family have tests of their own for these.
MORE_FAMILIES: dict[str, ModelConfig] = {
    "mixtral": dataclasses.replace(_BASE, family="mixtral", experts=ExpertsConfig(5, 2, 37)),
    "qwen2-moe": dataclasses.replace(
        _BASE, family="qwen2_moe", qkv_bias=True, experts=ExpertsConfig(6, 3, 20, False, 30, (False, True))
    ),
    "qwen3-moe": dataclasses.replace(
        _BASE, family="qwen3_moe", qk_norm=True, head_dim=12, num_heads=6, experts=ExpertsConfig(7, 2, 20)
    ),
    "gemma2": dataclasses.replace(
        _BASE, family="gemma2", activation="gelu", norms="both", tied=True, embed_scale=48**0.5, query_scale=0.8,
        attention_softcap=2.0, logit_softcap=12.0, sliding_window=7, sliding_layers=(True, False),
    ),
    "gemma3": dataclasses.replace(
        _BASE, family="gemma3_text", activation="gelu", norms="both", tied=True, embed_scale=48**0.5, qk_norm=True,
        rope=RopeConfig(1e6, "linear", 8.0), local_rope=RopeConfig(), sliding_window=7, sliding_layers=(True, False),
    ),
    "phi3": dataclasses.replace(
        _BASE, family="phi3", sliding_window=40,
        rope=RopeConfig(scaling="longrope", divisors=(1.0, 1.5, 2.0, 3.0), attention_factor=1.1),
    ),
    "olmo2": dataclasses.replace(_BASE, family="olmo2", norms="post", qk_norm=True, wide_qk_norm=True),
    "gpt-oss": dataclasses.replace(
        _BASE, family="gpt_oss", qkv_bias=True, out_bias=True, attention_sinks=True, sliding_window=7,
        sliding_layers=(True, False), experts=ExpertsConfig(6, 3, 37, chosen_scores=True, biases=True, limit=0.8),
        rope=RopeConfig(150000.0, "yarn", 4.0, original_context=32, truncate=False, attention_factor=1.14),
    ),
    "exaone4": dataclasses.replace(
        _BASE, family="exaone4", num_layers=3, norms="post", qk_norm=True, sliding_window=7,
        sliding_layers=(True, False, True), nope_layers=(False, True, False),
    ),
    "glm4": dataclasses.replace(_BASE, family="glm4", norms="both", qkv_bias=True, rope=RopeConfig(partial=0.5)),
    # With Ministral's growing queries.
    "granite": dataclasses.replace(
        _BASE, family="granite", embed_scale=3.0, query_scale=0.7, residual_scale=0.4, logit_scale=1.5,
        query_growth=0.2, rope=RopeConfig(original_context=16),
    ),
    "yarn": dataclasses.replace(
        _BASE, rope=RopeConfig(scaling="yarn", factor=4.0, original_context=32, attention_factor=1.14)
    ),
    "lfm2": dataclasses.replace(
        _BASE, family="lfm2", num_layers=4, qk_norm=True, tied=True,
        recurrent=RecurrentConfig("convolution", (True, False, True, False), 3, 3, 16),
    ),
    "gemma4": dataclasses.replace(
        _BASE, **_GEMMA4, logit_softcap=12.0,
        kinds=LayerKinds(12, 3, sharing=2, sharing_mlp_dim=140, inputs_dim=5),
    ),
    "gemma4-large": dataclasses.replace(
        _BASE, **_GEMMA4, kinds=LayerKinds(12, 1, keys_are_values=True),
        experts=ExpertsConfig(5, 2, 37, shared_dim=70, beside=True),
    ),
    "qwen3.5": dataclasses.replace(
        _BASE, family="qwen3_5_text", num_layers=4, qk_norm=True, attention_gate=True, rope=RopeConfig(partial=0.5),
        recurrent=RecurrentConfig("delta", (True, True, False, True), 4, 2, 0, 6, 16, 12),
    ),
}  # fmt: skip

# Gemma 4, and one with experts, with KV heads for two devices.
FOR_TWO_DEVICES = {
    f"{name}-two": dataclasses.replace(
        MORE_FAMILIES[name], num_heads=8, num_kv_heads=2,
        kinds=dataclasses.replace(MORE_FAMILIES[name].kinds, full_kv_heads=2),
    )
    for name in ("gemma4", "gemma4-large")
}  # fmt: skip
ALL_FAMILIES = FAMILIES | MORE_FAMILIES


class RandomSource:
    """A checkpoint in memory, every tensor random: weights of unit gain, norms about one, biases not zero."""

    path = Path("random")
    eos_ids = ()

    def __init__(self, config: ModelConfig, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.config = config
        self._tensors = {}
        for recipe in recipes(config).values():
            for name, shape in recipe.sources:
                noise = rng.normal(size=shape).astype(np.float32)
                if len(shape) == 2:
                    self._tensors[name] = noise / np.sqrt(np.float32(shape[1]))
                else:
                    self._tensors[name] = noise / 2 if name.endswith("bias") else 1 + noise / 4

    def shapes(self):
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name):
        return self._tensors[name]


def place(cfg, degree=1, dtype="float32"):
    """A placement of a tiny model on the first `degree` devices."""
    return Placement(cfg, plan_mesh(degree), np.dtype(dtype))


@functools.cache
def tiny_params(family, degree=1):
    """Random parameters of `ALL_FAMILIES[family]`, the same for every degree, padded and placed."""
    target = place(ALL_FAMILIES[family], degree)
    return load_foreign(RandomSource(ALL_FAMILIES[family]), target.plan, target.dtype)


def init_params(key, cfg, dtype=jnp.float32, scale=0.02):
    """Random parameters, not placed: normal weights of standard deviation `scale`, norms of one, biases of zero."""
    leaves, treedef = jax.tree.flatten_with_path(declare_params(cfg, dtype), is_leaf=is_info)

    def make(key, path, info):
        if leaf_name(path).endswith("norm"):
            return jnp.ones(info.shape, info.dtype)
        if leaf_name(path).endswith("bias"):
            return jnp.zeros(info.shape, info.dtype)
        return (scale * jax.random.normal(key, info.shape, jnp.float32)).astype(info.dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [make(k, *leaf) for k, leaf in zip(keys, leaves, strict=True)])


def on_one_device(function):
    """Compile a function that is written for a shard, for a mesh of one device."""
    return jax.jit(jax.shard_map(function, mesh=plan_mesh(1).mesh, in_specs=P(), out_specs=P(), check_vma=False))


def empty_cache(cfg, slots):
    return init_cache(cfg, cfg.num_kv_heads, slots, jnp.dtype("float32"))


def step_logits(params, cfg, token, cache):  # int32 [] -> [V], KVCache
    """Run one token behind the prefix and commit it, as plain decoding does."""
    hidden, cache = forward(params, cfg, token[None], cache.length[None], cache, jnp.ones((1, 1), bool))
    return vocab_logits(params, cfg, hidden)[0], commit_rows(cache, jnp.int32(1))


def logits_after(params, cfg, tokens, count, slots, chunk=None):  # int32 [T], int32 [] -> [V]
    """Logits after the first `count + 1` tokens: `count` are prefilled, in chunks of `chunk`, and one is decoded."""
    chunk = chunk or tokens.shape[0]
    pieces = jnp.pad(tokens, (0, -tokens.shape[0] % chunk)).reshape(-1, chunk)
    starts = jnp.arange(pieces.shape[0]) * chunk

    def fill(cache, piece):
        # A chunk behind the last counted token holds padding only and commits nothing.
        return prefill(params, cfg, piece[0], jnp.clip(count - piece[1], 0, chunk), cache), None

    cache, _ = jax.lax.scan(fill, empty_cache(cfg, slots), (pieces, starts))
    return step_logits(params, cfg, tokens[count], cache)[0]


def relative_error(got, expected):
    """Largest absolute difference over the largest magnitude expected."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.abs(got - expected).max() / np.abs(expected).max()
