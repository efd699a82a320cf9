"""What a draft shares with its target: the embedding, and a head of all or some of the target's rows."""

from typing import Any

import jax
import numpy as np

from jaxspec.models.params import Params
from jaxspec.models.quantization import encode_blocks
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.sharding import place_array
from pallas_kernels.linear.blocks import Blocks, dequantise


def share_embedding(draft: Placement, target: Params) -> Params:
    """The parameters of `Placement.shared_params`: the target's own arrays where draft and target share their devices.

    Args:
      draft: of a model with `shares_embedding`.
      target: the target's parameters, placed.
    """
    shared = {}
    for leaf, shape in draft.shared_params().items():
        if leaf == "head" and draft.cfg.head_ids:
            shared[leaf] = _take_rows(target.get("head", target["embed"]), draft, shape)
        else:
            shared[leaf] = jax.tree.map(_move, target[leaf], shape)
    return shared


def _move(leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """The same array where it is placed as `shape` says, else a copy, padded for its devices."""
    if leaf.sharding == shape.sharding and leaf.shape == shape.shape:
        return leaf
    rows = min(leaf.shape[0], shape.shape[0])  # what differs is padding
    return place_array(np.asarray(leaf)[:rows], shape)


def _take_rows(table: Any, draft: Placement, shape: Any) -> Any:
    """The rows of `head_ids` in the draft's own type."""
    ids = np.array(draft.cfg.head_ids, np.int32)
    rows = jax.tree.map(lambda leaf: np.asarray(leaf)[ids], table)
    if not isinstance(shape, Blocks):
        numbers = np.asarray(dequantise(rows)) if isinstance(rows, Blocks) else rows
        return place_array(numbers.astype(shape.dtype), shape)
    if not (isinstance(rows, Blocks) and rows.format == shape.format):
        numbers = np.asarray(dequantise(rows) if isinstance(rows, Blocks) else rows, np.float32)
        data = encode_blocks(numbers, shape.format).reshape(len(ids), *shape.data.shape[1:])
        rows = Blocks(data, shape.format)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(place_array, rows, shape)
