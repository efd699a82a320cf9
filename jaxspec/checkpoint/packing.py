"""Packing of loaded weights in blocks, as integer products and GPU kernels take them."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxspec.models.params import Params, leaf_name
from jaxspec.runtime.placement import Placement
from pallas_kernels.linear.blocks import PLANES, Blocks
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.linear.planes import to_planes

# Packing releases the interpreter lock; each thread holds one leaf twice.
_NUM_THREADS = 2


def pack_pair(
    params: Params, draft_params: Params | None, target: Placement, draft: Placement | None
) -> tuple[Params, Params | None]:
    """Pack the blocks of both models whose placement says so (`Placement.params`).

    An array that both models have is packed once. Each array that was packed is given up before the next one of its
    thread, so that the models are never in memory twice.
    """
    packed = pack_trees(
        [params] if draft is None else [params, draft_params or {}],
        [target.params()] if draft is None else [target.params(), draft.params()],
    )
    return packed[0], None if draft is None else packed[1]


def pack_trees(trees: list[Params], shapes: list[Params]) -> list[Params]:
    """Pack the blocks of several trees of parameters where `shapes` has them packed; see `pack_pair`."""
    given = [*trees]
    paths_leaves, treedef = jax.tree.flatten_with_path(trees, is_leaf=_is_blocks)
    # Of an output projection all dimensions after the first are inputs, of any other weight the last one alone.
    is_out = [leaf_name(path).endswith(".out") for path, _ in paths_leaves]
    leaves = [leaf for _, leaf in paths_leaves]
    del paths_leaves
    wanted = jax.tree.leaves(shapes, is_leaf=_is_blocks)
    places: dict[int, list[int]] = {}
    for index, (leaf, shape) in enumerate(zip(leaves, wanted, strict=True)):
        if _is_blocks(leaf) and leaf.format != shape.format:
            places.setdefault(id(leaf.data), []).append(index)
    # The caller's trees hold the arrays too.
    for tree in given:
        tree.clear()
    trees.clear()
    del given

    def pack(indices: list[int]) -> None:
        leaf, shape = leaves[indices[0]], wanted[indices[0]]
        for index in indices:
            leaves[index] = None
        packed = Blocks(_pack_array(leaf, shape, is_out[indices[0]]), shape.format)
        for index in indices:
            leaves[index] = packed

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(pack, places.values()))
    return jax.tree.unflatten(treedef, leaves)


def _pack_array(leaf: Blocks, packed: Blocks, is_out: bool) -> jax.Array:
    """Each device's shard of the bytes, packed by itself: planes by the device, for the others by the host."""
    shards, shape = [], packed.data
    for shard in leaf.data.addressable_shards:
        outputs = shard.data.shape[0] if is_out else math.prod(shard.data.shape[:-2])
        if packed.format in PLANES:
            shards.append(_lay_planes(shard.data, leaf.format, outputs))
        else:
            shards.append(jax.device_put(pack_blocks(np.asarray(shard.data), leaf.format, outputs), shard.device))
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, shards, dtype=shape.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _lay_planes(blocks: jax.Array, name: str, outputs: int) -> jax.Array:
    return to_planes(blocks, name, outputs)


def _is_blocks(leaf: Any) -> bool:
    return isinstance(leaf, Blocks)
