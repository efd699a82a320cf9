"""Tiny random models of every family, loaded through the production path, and ways to run them."""

import contextlib
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
from jaxspec.models.kv_cache import commit_rows, init_cache
from jaxspec.models.params import declare_params, is_info, leaf_name
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


@contextlib.contextmanager
def quick_compilation():
    """Compile with few optimisations: tiny programs run for milliseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def place(cfg, degree=1, dtype="float32"):
    """A placement of a tiny model on the first `degree` devices."""
    return Placement(cfg, plan_mesh(degree), np.dtype(dtype))


@functools.cache
def tiny_params(family, degree=1):
    """Random parameters of `FAMILIES[family]`, the same for every degree, padded and placed."""
    target = place(FAMILIES[family], degree)
    return load_foreign(RandomSource(FAMILIES[family]), target.plan, target.dtype)


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
    return vocab_logits(params, hidden)[0], commit_rows(cache, jnp.int32(1))


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
