"""From Hugging Face names to jaxspec's parameters: which tensors make each leaf, and how.

Letters are those of `ModelConfig`. The canonical leaves are those of `declare_params`, unpadded.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.source import TensorSource
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import declare_params, is_info, leaf_name

Shape = tuple[int, ...]
Assemble = Callable[[Sequence[np.ndarray]], np.ndarray]

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make one leaf: `assemble` takes the tensors named in `sources`, in that order and of those shapes."""

    sources: tuple[tuple[str, Shape], ...]
    assemble: Assemble

    def read(self, source: TensorSource, dtype: Any) -> np.ndarray:
        """The leaf from an open checkpoint, rounded to nearest where `dtype` is narrower; one leaf of memory."""
        arrays = [source.read(name) for name, _ in self.sources]
        if len({array.dtype for array in arrays}) > 1:
            # Half formats have no common type of their own.
            arrays = [array.astype(np.float32, copy=False) for array in arrays]
        # Values beyond the range of a narrower type become infinite, as in every other framework.
        with np.errstate(over="ignore"):
            leaf = self.assemble(arrays).astype(dtype, copy=False)
        # Read-only means a view of the mapped file: a parameter must not change, or fault, when the file does.
        return leaf if leaf.flags.writeable else leaf.copy()


def recipes(cfg: ModelConfig) -> dict[str, Recipe]:
    """One recipe per leaf of `declare_params`, by leaf name such as `layers.3.qkv`."""
    D, F, K, G, H, V = cfg.embed_dim, cfg.mlp_dim, cfg.num_kv_heads, cfg.group, cfg.head_dim, cfg.vocab_size

    def plain(name: str, *shape: int) -> Recipe:
        return Recipe(((name, shape),), lambda arrays: arrays[0])

    def group_heads(arrays: Sequence[np.ndarray]) -> np.ndarray:
        """q `[N*H, ...]`, k and v `[K*H, ...]` -> `[K, G+2, H, ...]`: each KV head's queries, key and value."""
        query, key, value = (a.reshape(K, -1, H, *a.shape[1:]) for a in arrays)
        return np.concatenate([query, key, value], axis=1)

    made = {
        "embed": plain(EMBED, V, D),
        "final_norm": plain("model.norm.weight", D),
    }
    if not cfg.tied:
        made["head"] = plain(HEAD, V, D)
    for index in range(cfg.num_layers):
        leaf, layer = f"layers.{index}", f"model.layers.{index}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        made[f"{leaf}.attn_norm"] = plain(f"{layer}.input_layernorm.weight", D)
        made[f"{leaf}.qkv"] = Recipe(
            (
                (f"{attn}.q_proj.weight", (K * G * H, D)),
                (f"{attn}.k_proj.weight", (K * H, D)),
                (f"{attn}.v_proj.weight", (K * H, D)),
            ),
            group_heads,
        )
        made[f"{leaf}.out"] = Recipe(
            ((f"{attn}.o_proj.weight", (D, K * G * H)),), lambda arrays: arrays[0].reshape(D, K, G, H)
        )
        made[f"{leaf}.mlp_norm"] = plain(f"{layer}.post_attention_layernorm.weight", D)
        made[f"{leaf}.gate_up"] = Recipe(
            ((f"{mlp}.gate_proj.weight", (F, D)), (f"{mlp}.up_proj.weight", (F, D))), np.stack
        )
        made[f"{leaf}.down"] = plain(f"{mlp}.down_proj.weight", D, F)
        if cfg.qkv_bias:
            made[f"{leaf}.qkv_bias"] = Recipe(
                (
                    (f"{attn}.q_proj.bias", (K * G * H,)),
                    (f"{attn}.k_proj.bias", (K * H,)),
                    (f"{attn}.v_proj.bias", (K * H,)),
                ),
                group_heads,
            )
        if cfg.qk_norm:
            made[f"{leaf}.q_norm"] = plain(f"{attn}.q_norm.weight", H)
            made[f"{leaf}.k_norm"] = plain(f"{attn}.k_norm.weight", H)
    # In the order of the declaration, so that walking one walks the other.
    leaves, _ = jax.tree.flatten_with_path(declare_params(cfg, np.float32), is_leaf=is_info)
    return {name: made[name] for name in (leaf_name(path) for path, _ in leaves)}


def check_accounted(source: TensorSource) -> None:
    """Every tensor of a checkpoint has a place in the model its config describes, and every place a tensor.

    Raises:
      CheckpointError: some are missing, unexpected or of another shape; all of them are in the one message.
    """
    found = source.shapes()
    # Before anything as long as the config claims is built.
    if source.config.num_layers > len(found):
        raise CheckpointError(
            f"{source.path}: the config asks for {source.config.num_layers} layers, "
            f"but the checkpoint holds only {len(found)} tensors"
        )
    expected = {name: shape for recipe in recipes(source.config).values() for name, shape in recipe.sources}
    misshapen = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        _list_some("missing", [name for name in expected if name not in found]),
        _list_some("unexpected", [n for n, s in found.items() if n not in expected and not _is_harmless(n, s, source)]),
        _list_some("of the wrong shape", misshapen),
    ]
    if any(problems):
        listed = "; ".join(filter(None, problems))
        raise CheckpointError(f"{source.path}: tensors do not match the {source.config.family} config: {listed}")


def _is_harmless(name: str, shape: Shape, source: TensorSource) -> bool:
    """Tensors that say nothing the config does not: saved rotary frequencies, and the head of a tied model."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    return name == HEAD and source.config.tied and shape == (source.config.vocab_size, source.config.embed_dim)


def _list_some(what: str, items: list[str]) -> str:
    """`3 missing (a, b, c)`, with at most a few of them spelled out; empty where there are none."""
    if not items:
        return ""
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return f"{len(items)} {what} ({', '.join(items[:_MAX_LISTED])}{more})"
