"""From Hugging Face names to jaxspec's parameters: which tensors make each leaf, and how.

Letters are those of `ModelConfig`. The leaves are those of `declare_params`, unpadded. Blocks move as numbers do, in
whole rows: `[out, in]` is then `[out, in / values, nbytes]`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import ArrayInfo, declare_leaves
from jaxspec.models.quantization import PARTS, LeafType, Storage, collect_storage, weight_leaves

Shape = tuple[int, ...]
Assemble = Callable[[Sequence[np.ndarray]], np.ndarray]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_LISTED = 8


class TensorSource(Protocol):
    """An open Hugging Face folder or GGUF file, already checked, with tensors under Hugging Face names.

    Opening reads headers only. Tensors are laid out as Hugging Face lays them out: `[out, in]`, rotary halves.
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def weight_type(self, name: str) -> str:
        """How one tensor can be kept without loss: one of `jaxspec.models.quantization.WEIGHT_TYPES`."""
        ...

    def read(self, name: str, keep_blocks: bool = False) -> np.ndarray:
        """One whole tensor in its own dtype, blocks dequantised to float32.

        With `keep_blocks`, blocks of the format that `weight_type` names are uint8 `[out, in / values, nbytes]`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make one leaf: `assemble` takes the tensors that `sources` names, in that order and of those shapes.

    The result is reshaped to the declared shape of the leaf, `info`.
    """

    sources: tuple[tuple[str, Shape], ...]
    assemble: Assemble
    info: ArrayInfo

    def read(self, source: TensorSource) -> np.ndarray:
        """The leaf from an open checkpoint, rounded to nearest where its dtype is narrower; one leaf of memory.

        Raises:
          ConfigError: blocks of a format are asked for, and a tensor is not kept in it.
        """
        block_format = self.info.format
        for name, _ in self.sources:
            if block_format is not None and (found := source.weight_type(name)) != block_format:
                raise ConfigError(f"{source.path}: {name} is kept as {found}, it cannot be loaded as {block_format}")
        read = source.read if block_format is None else functools.partial(source.read, keep_blocks=True)
        arrays = [read(name) for name, _ in self.sources]
        if len({array.dtype for array in arrays}) > 1:
            # Half formats have no common type of their own.
            arrays = [array.astype(np.float32, copy=False) for array in arrays]
        # Values beyond the range of a narrower type become infinite, as in every other framework.
        with np.errstate(over="ignore"):
            leaf = self.assemble(arrays).astype(self.info.dtype, copy=False).reshape(self.info.shape)
        # Read-only means a view of the mapped file: a parameter must not change, or fault, when the file does.
        return leaf if leaf.flags.writeable else leaf.copy()


def recipes(cfg: ModelConfig, storage: Storage | Any = jnp.float32) -> dict[str, Recipe]:
    """One recipe per leaf of `declare_params(cfg, storage)`, by leaf name such as `layers.3.qkv`."""
    D, F, K, G, H, V = cfg.embed_dim, cfg.mlp_dim, cfg.num_kv_heads, cfg.group, cfg.head_dim, cfg.vocab_size
    infos = declare_leaves(cfg, storage)
    made: dict[str, Recipe] = {}

    def group_heads(arrays: Sequence[np.ndarray]) -> np.ndarray:
        """q `[N*H, ...]`, k and v `[K*H, ...]` -> `[K, G+2, H, ...]`: each KV head's queries, key and value."""
        return np.concatenate([a.reshape(K, -1, H, *a.shape[1:]) for a in arrays], axis=1)

    def add(leaf: str, *sources: tuple[str, Shape], assemble: Assemble = lambda arrays: arrays[0]) -> None:
        made[leaf] = Recipe(sources, assemble, infos[leaf])

    add("embed", (EMBED, (V, D)))
    add("final_norm", ("model.norm.weight", (D,)))
    if not cfg.tied:
        add("head", (HEAD, (V, D)))
    for index in range(cfg.num_layers):
        leaf, layer = f"layers.{index}", f"model.layers.{index}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        heads = {"q_proj": K * G * H, "k_proj": K * H, "v_proj": K * H}
        qkv = [(f"{attn}.{name}.weight", (rows, D)) for name, rows in heads.items()]
        add(f"{leaf}.attn_norm", (f"{layer}.input_layernorm.weight", (D,)))
        if f"{leaf}.qkv" in infos:
            add(f"{leaf}.qkv", *qkv, assemble=group_heads)
        else:
            for part, tensor in zip(PARTS, qkv, strict=True):
                add(f"{leaf}.qkv.{part}", tensor, assemble=group_heads)
        add(f"{leaf}.out", (f"{attn}.o_proj.weight", (D, K * G * H)))
        add(f"{leaf}.mlp_norm", (f"{layer}.post_attention_layernorm.weight", (D,)))
        gate_up = [(f"{mlp}.{name}.weight", (F, D)) for name in ("gate_proj", "up_proj")]
        add(f"{leaf}.gate_up", *gate_up, assemble=np.stack)
        add(f"{leaf}.down", (f"{mlp}.down_proj.weight", (D, F)))
        if cfg.qkv_bias:
            biases = [(f"{attn}.{name}.bias", (rows,)) for name, rows in heads.items()]
            add(f"{leaf}.qkv_bias", *biases, assemble=group_heads)
        if cfg.qk_norm:
            for name in ("q_norm", "k_norm"):
                add(f"{leaf}.{name}", (f"{attn}.{name}.weight", (H,)))
    # In the order of the declaration.
    return {name: made[name] for name in infos}


def source_storage(source: TensorSource) -> Storage:
    """How every weight of a checkpoint can be kept without loss, each in the type of its tensors.

    A query, key and value of different types are kept apart; gate and up projections that differ meet in float32.
    """
    types: dict[str, LeafType] = {}
    made = recipes(source.config)
    for leaf in weight_leaves(source.config):
        kinds = tuple(source.weight_type(name) for name, _ in made[leaf].sources)
        alike = "float32" if len(set(kinds)) > 1 else kinds[0]
        types[leaf] = kinds if len(set(kinds)) > 1 and len(kinds) == len(PARTS) else alike
    return collect_storage(types)


def check_accounted(source: TensorSource) -> None:
    """Check that the tensors of a checkpoint are those of the model that its config describes.

    Raises:
      CheckpointError: some are missing, unexpected or of another shape; all of them are in the one message.
    """
    cfg, found = source.config, source.shapes()
    # Before anything as long as the config claims is built.
    if cfg.num_layers > len(found):
        held = f"the checkpoint holds only {len(found)} tensors"
        raise CheckpointError(f"{source.path}: the config asks for {cfg.num_layers} layers, but {held}")

    def is_harmless(name: str, shape: Shape) -> bool:
        """Whether a tensor adds nothing to the config: saved rotary frequencies, and the head of a tied model."""
        tied_head = name == HEAD and cfg.tied and shape == (cfg.vocab_size, cfg.embed_dim)
        return tied_head or name.endswith(".rotary_emb.inv_freq")

    expected = {name: shape for recipe in recipes(cfg).values() for name, shape in recipe.sources}
    differ = (f"{n} is {list(found[n])}, not {list(s)}" for n, s in expected.items() if n in found and found[n] != s)
    problems = [
        _list_some("missing", (name for name in expected if name not in found)),
        _list_some("unexpected", (n for n, s in found.items() if n not in expected and not is_harmless(n, s))),
        _list_some("of the wrong shape", differ),
    ]
    if any(problems):
        listed = "; ".join(filter(None, problems))
        raise CheckpointError(f"{source.path}: tensors do not match the {cfg.family} config: {listed}")


def _list_some(what: str, names: Iterable[str]) -> str:
    """`3 missing (a, b, c)`, with at most a few of them spelled out; empty where there are none."""
    if not (items := list(names)):
        return ""
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return f"{len(items)} {what} ({', '.join(items[:_MAX_LISTED])}{more})"
