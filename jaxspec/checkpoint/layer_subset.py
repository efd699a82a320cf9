"""A draft that is its target without some attention or MLP blocks: `draft="self:attention=1,3-5;mlp=2"`.

It holds the blocks that it keeps and no others: on the target's devices the target's own arrays, elsewhere copies.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.load import Weights
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_set import LayerSet, parse_layers
from jaxspec.models.params import Params, declare_params
from jaxspec.models.quantization import collect_storage, fit_storage, weight_leaves
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement, SharedEmbedding
from jaxspec.runtime.sharding import place_array
from pallas_kernels.linear.blocks import Blocks, dequantise

# Begins the name of such a draft; the set of skipped blocks follows, as `parse_layers` reads it.
PREFIX = "self:"


def open_layer_subset(name: str, weights: Weights, vocabulary: str) -> Weights:
    """The draft of this name for an open target; `vocabulary` is the digest of the target's.

    Raises:
      ConfigError: the name holds no layer set, or one that does not fit the model.
    """
    layers = parse_layers(name.removeprefix(PREFIX), weights.config.num_layers)
    return dataclasses.replace(
        weights, path=Path(f"{PREFIX}{layers}"), config=cut_config(weights.config, layers), vocabulary=vocabulary,
        layers=layers,
    )  # fmt: skip


def cut_config(cfg: ModelConfig, layers: LayerSet) -> ModelConfig:
    """The geometry of the draft: a layer without a kept block is dropped, others may lack one block."""
    kept = layers.kept
    units = LayerSet(tuple(layers.attention[i] for i in kept), tuple(layers.mlp[i] for i in kept))
    return dataclasses.replace(
        cfg,
        num_layers=len(kept),
        sliding_layers=tuple(cfg.sliding_layers[i] for i in kept) if cfg.sliding_layers else (),
        shares_embedding=True,
        units=units if units.num_skipped else None,
    )


def place_layer_subset(target: Placement, layers: LayerSet, plan: MeshPlan, dtype: Any) -> Placement:
    """The draft's placement: its weights are kept as the target's are, where the draft's kernels read those.

    Args:
      target: the whole model.
      layers: the blocks that the draft has.
      plan: its devices.
      dtype: of its cache, and of weights that are not kept as the target keeps them.
    """
    cfg, storage = cut_config(target.cfg, layers), None
    if target.storage is not None and plan.kernels.native:
        # Layer j of the draft is layer kept[j] of the target.
        def type_of(leaf: str) -> Any:
            _, index, name = leaf.split(".")
            return target.weights.type_of(f"layers.{layers.kept[int(index)]}.{name}")

        storage = fit_storage(collect_storage({leaf: type_of(leaf) for leaf in weight_leaves(cfg)}), cfg, plan.tensor)
    shared = SharedEmbedding(target.cfg, target.weights)
    return Placement(cfg, plan, dtype, target.cfg.vocab_size, target.cfg.vocab_size, storage, shared)


def take_layers(target: Placement, draft: Placement, layers: LayerSet, params: Params) -> Params:
    """The parameters of `Placement.own_params` of the draft, from the target's placed ones."""
    have, want = (declare_params(placement.cfg, placement.weights) for placement in (target, draft))
    shapes = draft.own_params()
    taken = [
        {name: _take(params["layers"][i][name], have["layers"][i][name], want["layers"][j][name], shape)
         for name, shape in shapes["layers"][j].items()}
        for j, i in enumerate(layers.kept)
    ]  # fmt: skip
    norm = _take(params["final_norm"], have["final_norm"], want["final_norm"], shapes["final_norm"])
    return {"final_norm": norm, "layers": taken}


def _take(leaf: Any, have: Any, want: Any, shape: Any) -> Any:
    """A weight as `want` declares it and `shape` places it; the same arrays where they already are that."""
    if _is_placed(leaf, shape):
        return leaf
    if isinstance(want, dict):
        return {part: _take(leaf[part], have[part], want[part], shape[part]) for part in want}
    if isinstance(want, Blocks):
        return Blocks(place_array(_cut(leaf.data, have.data), shape.data), want.format)
    return place_array(_numbers(leaf, have).reshape(want.shape).astype(want.dtype), shape)


def _is_placed(leaf: Any, shape: Any) -> bool:
    leaves, shapes = jax.tree.leaves(leaf), jax.tree.leaves(shape)
    return jax.tree.structure(leaf) == jax.tree.structure(shape) and all(
        a.sharding == b.sharding and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(leaves, shapes, strict=True)
    )


def _numbers(leaf: Any, have: Any) -> np.ndarray:
    """A whole weight, without padding; the parts of a `qkv` beside each other."""
    if isinstance(leaf, dict):
        return np.concatenate([_numbers(leaf[part], have[part]) for part in have], axis=1)
    if isinstance(leaf, Blocks):
        whole: Any = Blocks(_cut(leaf.data, have.data), leaf.format)  # pyright: ignore[reportArgumentType]
        return np.asarray(dequantise(whole))
    return _cut(leaf, have)


def _cut(array: jax.Array, have: Any) -> np.ndarray:
    """An array on the host, without the padding that the target's devices needed, which comes last."""
    return np.asarray(array)[tuple(slice(n) for n in have.shape)]
