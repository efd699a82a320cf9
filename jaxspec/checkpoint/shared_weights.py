"""Drafts made of their target's arrays.

A draft may share the embedding, and a head of all or some of the target's rows. A layer subset is the target without
some attention or MLP blocks, such as `draft="self:attention=1,3-5;mlp=2"`; it holds the blocks that it keeps.
On the target's devices these are the target's own arrays, elsewhere copies.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.load import Weights
from jaxspec.models.config import ModelConfig, keep_layers
from jaxspec.models.layer_set import LayerSet, parse_layers
from jaxspec.models.params import Params, declare_params
from jaxspec.models.quantization import collect_storage, encode_blocks, fit_storage, undo_order, weight_leaves
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement, SharedEmbedding
from jaxspec.runtime.sharding import collect_declared, place_array, place_declared
from jaxspec.runtime.transfer import read_whole
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
    units = units if units.num_skipped else None
    return dataclasses.replace(keep_layers(cfg, kept), shares_embedding=True, units=units)


def place_layer_subset(target: Placement, layers: LayerSet, plan: MeshPlan, dtype: Any) -> Placement:
    """The draft's placement: its weights are kept as the target's are, where the kernels on `plan` read those.

    Its cache, and weights that are not kept as the target keeps them, have the type `dtype`.
    """
    cfg, storage = cut_config(target.cfg, layers), None
    if target.storage is not None and plan.kernels.native:
        # Layer j of the draft is layer kept[j] of the target.
        def name_in_target(leaf: str) -> str:
            _, index, name = leaf.split(".")
            return f"layers.{layers.kept[int(index)]}.{name}"

        types = {leaf: target.weights.type_of(name_in_target(leaf)) for leaf in weight_leaves(cfg)}
        ordered = {leaf for leaf in types if name_in_target(leaf) in target.weights.ordered}
        storage = fit_storage(collect_storage(types, ordered), cfg, plan.tensor)
    shared = SharedEmbedding(target.cfg, target.weights, target.activations)
    return Placement(cfg, plan, dtype, target.cfg.vocab_size, target.cfg.vocab_size, storage, shared)


def take_layers(target: Placement, draft: Placement, layers: LayerSet, params: Params) -> Params:
    """The parameters of `Placement.own_params` of the draft, from the target's placed ones."""
    have, want = (declare_params(placement.cfg, placement.weights) for placement in (target, draft))
    shapes = draft.own_params()
    taken = []
    for j, i in enumerate(layers.kept):
        layer, orders = params["layers"][i], shapes["layers"][j].keys()
        # A weight that is wanted as numbers, on several devices, has its inputs in order.
        undo = {name: layer[f"{name}_order"] for name in orders if f"{name}_order" in layer.keys() - orders}
        taken.append({
            name: _take(layer[name], have["layers"][i][name], want["layers"][j][name], shape, undo.get(name))
            for name, shape in shapes["layers"][j].items()
        })  # fmt: skip
    norm = _take(params["final_norm"], have["final_norm"], want["final_norm"], shapes["final_norm"])
    return {"final_norm": norm, "layers": taken}


def _take(leaf: Any, have: Any, want: Any, shape: Any, order: jax.Array | None = None) -> Any:
    """A weight as `want` declares it and `shape` places it; the same arrays where they already are that.

    `order` is that of the weight's inputs, where they are wanted in order.
    """
    placed, wanted = jax.tree.leaves(leaf), jax.tree.leaves(shape)
    if jax.tree.structure(leaf) == jax.tree.structure(shape) and all(map(_is_placed, placed, wanted)):
        return leaf
    if isinstance(want, dict):
        return {part: _take(leaf[part], have[part], want[part], shape[part]) for part in want}
    if isinstance(want, Blocks):
        return Blocks(place_declared(collect_declared(leaf.data, have.data), want.data, shape.data), want.format)  # pyright: ignore[reportArgumentType]
    numbers = _numbers(leaf, have)
    if order is not None:
        numbers = undo_order(numbers, np.asarray(order))
    return place_declared(numbers.reshape(want.shape).astype(want.dtype), want, shape)


def _is_placed(leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> bool:
    return leaf.sharding == shape.sharding and leaf.shape == shape.shape and leaf.dtype == shape.dtype


def _numbers(leaf: Any, have: Any) -> np.ndarray:
    """A whole weight, without padding; the parts of a `qkv` beside each other."""
    if isinstance(leaf, dict):
        return np.concatenate([_numbers(leaf[part], have[part]) for part in have], axis=1)
    if isinstance(leaf, Blocks):
        whole: Any = Blocks(collect_declared(leaf.data, have.data), leaf.format)  # pyright: ignore[reportArgumentType]
        return np.asarray(dequantise(whole))
    return collect_declared(leaf, have)


def share_embedding(draft: Placement, target: Params) -> Params:
    """The parameters of `Placement.shared_params` of a draft, from the target's placed ones."""
    shared = {}
    for leaf, shape in draft.shared_params().items():
        if leaf == "head" and draft.cfg.head_ids:
            shared[leaf] = _take_rows(target.get("head", target["embed"]), draft, shape)
        elif leaf == "head" and leaf not in target:
            shared[leaf] = jax.tree.map(_move, target["embed"], shape)
        else:
            shared[leaf] = jax.tree.map(_move, target[leaf], shape)
    return shared


def _move(leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """The same array where it is placed as `shape` says, else a copy, padded for its devices."""
    if leaf.sharding == shape.sharding and leaf.shape == shape.shape:
        return leaf
    rows = min(leaf.shape[0], shape.shape[0])  # what differs is padding
    return place_array(read_whole(leaf)[:rows], shape)


def _take_rows(table: Any, draft: Placement, shape: Any) -> Any:
    """The rows of `head_ids` in the draft's own type."""
    ids = np.array(draft.cfg.head_ids, np.int32)
    rows = jax.tree.map(lambda leaf: read_whole(leaf)[ids], table)
    if isinstance(rows, Blocks) and isinstance(shape, Blocks) and rows.format == shape.format:
        return jax.tree.map(place_array, rows, shape)
    numbers = np.asarray(dequantise(rows)) if isinstance(rows, Blocks) else rows
    if not isinstance(shape, Blocks):
        return place_array(numbers.astype(shape.dtype), shape)
    data = encode_blocks(numbers.astype(np.float32), shape.format).reshape(len(ids), *shape.data.shape[1:])
    return jax.tree.map(place_array, Blocks(data, shape.format), shape)  # pyright: ignore[reportArgumentType]
