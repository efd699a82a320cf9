"""Drafts made of their target's arrays.

A draft may share the embedding, and a head of all or some of the target's rows. A layer subset is the target without
some attention or MLP blocks, such as `draft="self:attention=1,3-5;mlp=2"`; it holds the blocks that it keeps.
On the target's devices these are the target's own arrays, elsewhere copies. A process that has no part of the target
has nothing to copy: with several processes, such a draft reads the target's checkpoint.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.load import Weights
from jaxspec.models.config import ModelConfig, keep_layers
from jaxspec.models.layer_set import LayerSet, parse_layers
from jaxspec.models.params import Params, declare_params, is_info, leaf_name
from jaxspec.models.quantization import collect_storage, encode_blocks, fit_storage, undo_order, weight_leaves
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement, SharedEmbedding
from jaxspec.runtime.sharding import collect_declared, is_elsewhere, place_array, place_declared
from jaxspec.runtime.transfer import empty
from pallas_kernels.linear.blocks import Blocks, dequantise

# Begins the name of such a draft; the set of skipped blocks follows, as `parse_layers` reads it.
PREFIX = "self:"

# Reads whole arrays of the target as they are declared: the beginning of their names, and declarations by the rest.
ReadTarget = Callable[[str, dict[str, Any]], dict[str, Any]]


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


def target_reader(weights: Weights, target: Placement, draft: Placement) -> ReadTarget | None:
    """A reader of the target's checkpoint for a draft of its arrays; None where the draft's processes have them."""
    if jax.process_count() == 1 or draft.plan.devices == target.plan.devices:
        return None

    def read(begin: str, declared: dict[str, Any]) -> dict[str, Any]:
        def read_leaf(path: tuple[Any, ...], info: Any) -> np.ndarray:
            return weights.read(f"{begin}{leaf_name(path)}", info)

        return jax.tree.map_with_path(read_leaf, declared, is_leaf=is_info)

    return read


def take_layers(
    target: Placement, draft: Placement, layers: LayerSet, params: Params, read: ReadTarget | None = None
) -> Params:
    """The parameters of `Placement.own_params` of the draft, from the target's placed ones, or by `read`."""
    have, want = (declare_params(placement.cfg, placement.weights) for placement in (target, draft))
    shapes = draft.own_params()
    if read is not None:
        if all(map(is_elsewhere, jax.tree.leaves(shapes))):
            return jax.tree.map(empty, shapes)
        params = read("", {"final_norm": have["final_norm"]})
        params["layers"] = {i: read(f"layers.{i}.", have["layers"][i]) for i in layers.kept}
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
        return Blocks(place_declared(_collect(leaf.data, have.data), want.data, shape.data), want.format)  # pyright: ignore[reportArgumentType]
    numbers = _numbers(leaf, have)
    if order is not None:
        numbers = undo_order(numbers, np.asarray(order))
    return place_declared(numbers.reshape(want.shape).astype(want.dtype), want, shape)


def _is_placed(leaf: jax.Array | np.ndarray, shape: jax.ShapeDtypeStruct) -> bool:
    if isinstance(leaf, np.ndarray):
        return False
    return leaf.sharding == shape.sharding and leaf.shape == shape.shape and leaf.dtype == shape.dtype


def _collect(leaf: jax.Array | np.ndarray, info: Any) -> np.ndarray:
    """A whole array as it is declared: a placed one, or one that was read so."""
    return leaf if isinstance(leaf, np.ndarray) else collect_declared(leaf, info)


def _numbers(leaf: Any, have: Any) -> np.ndarray:
    """A whole weight, without padding; the parts of a `qkv` beside each other."""
    if isinstance(leaf, dict):
        return np.concatenate([_numbers(leaf[part], have[part]) for part in have], axis=1)
    if isinstance(leaf, Blocks):
        whole: Any = Blocks(_collect(leaf.data, have.data), leaf.format)  # pyright: ignore[reportArgumentType]
        return np.asarray(dequantise(whole))
    return _collect(leaf, have)


def share_embedding(draft: Placement, target: Params, read: ReadTarget | None = None) -> Params:
    """The parameters of `Placement.shared_params` of a draft, from the target's placed ones, or by `read`."""
    shared, lender = {}, draft.shared_embedding
    for leaf, shape in draft.shared_params().items():
        assert lender is not None
        if read is not None and all(map(is_elsewhere, jax.tree.leaves(shape))):
            shared[leaf] = jax.tree.map(empty, shape)
            continue
        name = leaf if leaf in target else "embed"
        declared = declare_params(lender.cfg, lender.storage)[name]
        table = target[name] if read is None else read("", {name: declared})[name]
        restricted = leaf == "head" and draft.cfg.head_ids
        own = _take_rows(table, declared, draft, shape) if restricted else _take(table, declared, declared, shape)
        shared[leaf] = own
    return shared


def _take_rows(table: Any, have: Any, draft: Placement, shape: Any) -> Any:
    """The rows of `head_ids` in the draft's own type."""
    ids = np.array(draft.cfg.head_ids, np.int32)
    rows = jax.tree.map(lambda leaf, info: _collect(leaf, info)[ids], table, have)
    if isinstance(rows, Blocks) and isinstance(shape, Blocks) and rows.format == shape.format:
        return jax.tree.map(place_array, rows, shape)
    numbers = np.asarray(dequantise(rows)) if isinstance(rows, Blocks) else rows
    if not isinstance(shape, Blocks):
        return place_array(numbers.astype(shape.dtype), shape)
    data = encode_blocks(numbers.astype(np.float32), shape.format).reshape(len(ids), *shape.data.shape[1:])
    return jax.tree.map(place_array, Blocks(data, shape.format), shape)  # pyright: ignore[reportArgumentType]
