"""Parameters: one declaration from which initial values, abstract shapes, shardings and restores derive.

Axis letters are those of `ModelConfig`. Weights are stored `[out..., in...]`, as checkpoints have them: a
one-token step is then a row-major matrix-vector product, the fastest form on CPU (docs/design.md). Query, key and
value share one tensor grouped by KV head, gate and up share another, so that sharding the first named axis gives
each device whole heads with their keys.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One declared array: shape, dtype, one logical axis name per dimension, and how to initialise it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"

    def __post_init__(self):
        """Every dimension has a logical name or None."""
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


def declare_params(cfg: ModelConfig, dtype: Any) -> Params:
    """Declare every parameter of `cfg` as an `ArrayInfo`; layers are a list of per-layer dicts.

    Norm scales stay float32: they are tiny and multiply float32 activations.
    """
    D, F, K, G, H, V = cfg.embed_dim, cfg.mlp_dim, cfg.num_kv_heads, cfg.group, cfg.head_dim, cfg.vocab_size
    norm = ArrayInfo((D,), jnp.float32, (None,), "ones")

    def declare_layer() -> Params:
        layer = {
            "attn_norm": norm,
            "qkv": ArrayInfo((K, G + 2, H, D), dtype, ("kv_heads", None, None, "embed")),
            "out": ArrayInfo((D, K, G, H), dtype, ("embed", "kv_heads", None, None)),
            "mlp_norm": norm,
            "gate_up": ArrayInfo((2, F, D), dtype, (None, "mlp", "embed")),
            "down": ArrayInfo((D, F), dtype, ("embed", "mlp")),
        }
        if cfg.qkv_bias:
            layer["qkv_bias"] = ArrayInfo((K, G + 2, H), jnp.float32, ("kv_heads", None, None), "zeros")
        if cfg.qk_norm:
            layer["q_norm"] = ArrayInfo((H,), jnp.float32, (None,), "ones")
            layer["k_norm"] = ArrayInfo((H,), jnp.float32, (None,), "ones")
        return layer

    params: Params = {
        "embed": ArrayInfo((V, D), dtype, ("vocab", "embed")),
        "final_norm": norm,
        "layers": [declare_layer() for _ in range(cfg.num_layers)],
    }
    if not cfg.tied:
        params["head"] = ArrayInfo((V, D), dtype, ("vocab", "embed"))
    return params


def is_info(leaf: Any) -> bool:
    """Tree predicate: stop at declarations."""
    return isinstance(leaf, ArrayInfo)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a leaf from its tree path, such as `layers.3.qkv`; the name used in native checkpoints."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def init_params(key: jax.Array, cfg: ModelConfig, dtype: Any = jnp.float32, scale: float = 0.02) -> Params:
    """Random parameters for tests and distillation: normal weights of standard deviation `scale`, unit norms."""
    leaves, treedef = jax.tree.flatten(declare_params(cfg, dtype), is_leaf=is_info)
    keys = jax.random.split(key, len(leaves))

    def init_leaf(k: jax.Array, info: ArrayInfo) -> jax.Array:
        if info.init == "normal":
            return (scale * jax.random.normal(k, info.shape, jnp.float32)).astype(info.dtype)
        return (jnp.ones if info.init == "ones" else jnp.zeros)(info.shape, info.dtype)

    return jax.tree.unflatten(treedef, [init_leaf(k, i) for k, i in zip(keys, leaves, strict=True)])


def count_params(cfg: ModelConfig) -> int:
    """Number of scalar parameters."""
    sizes = jax.tree.leaves(jax.tree.map(lambda i: _size(i.shape), declare_params(cfg, jnp.float32), is_leaf=is_info))
    return sum(sizes)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
