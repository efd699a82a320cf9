"""How the parameters of a layer lie in memory as programs take them: each device's part of each array, packed."""

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxspec.models.params import EXPERT_WEIGHTS, ArrayInfo, declare_params, is_info, leaf_name
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.sharding import Part, arrange_declared, cut_shard, local_part
from pallas_kernels.linear.blocks import COLUMNS, FORMATS, PLANES, Blocks
from pallas_kernels.linear.columns import to_columns
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.linear.planes import to_planes

PACKED_OUTPUTS = 16  # of a group, see `pallas_kernels/linear/packed_formats.h`
ALIGNMENT = 64  # JAX keeps an array's memory without a copy where it begins at a multiple of so many bytes


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """One array of the parameters.

    Attributes:
      name: as in native checkpoints, such as `layers.3.qkv`.
      info: as it is declared, and as a checkpoint gives it.
      loaded: its padded, sharded shape before blocks are packed.
      placed: the same as programs take it.
      packed: format of the blocks that they take if it is not the checkpoint's; None else.
    """

    name: str
    info: ArrayInfo
    loaded: jax.ShapeDtypeStruct
    placed: jax.ShapeDtypeStruct
    packed: str | None

    @functools.cached_property
    def shards(self) -> list[tuple[Any, tuple[slice, ...]]]:
        """Devices of this process, with the part of the loaded array that each has."""
        sharding: Any = self.loaded.sharding
        found = sharding.addressable_devices_indices_map(self.loaded.shape)
        return [(device, found[device]) for device in sorted(found, key=lambda device: device.id)]

    @functools.cached_property
    def part(self) -> Part | None:
        """The part of the array that this one of several processes reads; None for all of it."""
        return local_part(self.info, self.loaded) if jax.process_count() > 1 and self.shards else None

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of each device's part, as programs take it."""
        sharding: Any = self.placed.sharding
        return sharding.shard_shape(self.placed.shape)

    @property
    def shard_bytes(self) -> int:
        return math.prod(self.shard_shape) * np.dtype(self.placed.dtype).itemsize

    def write(self, array: np.ndarray, buffers: list[np.ndarray]) -> None:
        """Arrange, pad, cut and pack an array as it is declared, or its `part`, into a buffer for each of `shards`."""
        part = self.part
        if part is None:
            array = arrange_declared(array, self.info, len(self.loaded.sharding.device_set))  # pyright: ignore[reportOptionalMemberAccess]
        for (_, index), buffer in zip(self.shards, buffers, strict=True):
            shard = cut_shard(array, index, self.loaded.shape, part)
            if self.packed is None:
                np.copyto(buffer, shard.reshape(buffer.shape), casting="no")
            else:
                name = self.info.format
                assert name is not None
                # Of an output projection all dimensions after the first are inputs, of any other weight the last one.
                outputs = shard.shape[0] if self.name.endswith(".out") else math.prod(shard.shape[:-2])
                if self.packed in PLANES | COLUMNS:
                    lay_out = to_planes if self.packed in PLANES else to_columns
                    np.copyto(buffer, lay_out(shard, name, outputs))
                else:
                    pack_blocks(shard, name, outputs, buffer)

    def of_experts(self, count: int) -> "LeafLayout":
        """The same array with so many experts in place of all of them."""

        def cut(whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((count, *whole.shape[1:]), whole.dtype, sharding=whole.sharding)

        info = dataclasses.replace(self.info, shape=(count, *self.info.shape[1:]))
        return LeafLayout(self.name, info, cut(self.loaded), cut(self.placed), self.packed)

    @property
    def has_separate_experts(self) -> bool:
        """Whether the bytes of each expert follow those of the one before."""
        # Packed blocks lie in groups of sixteen outputs, which may cross from expert to expert.
        outputs = math.prod(self.shard_shape[1:-2])
        return self.packed is None or self.packed in PLANES or outputs % PACKED_OUTPUTS == 0


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """A tree of parameters, such as those of one layer."""

    leaves: tuple[LeafLayout, ...]
    tree: Any  # of the placed arrays

    @property
    def nbytes(self) -> int:
        """Bytes on one device, each array at an aligned place."""
        return sum(-(-leaf.shard_bytes // ALIGNMENT) * ALIGNMENT for leaf in self.leaves)

    @property
    def all_bytes(self) -> int:
        """Bytes on all devices of this process."""
        return sum(leaf.shard_bytes * len(leaf.shards) for leaf in self.leaves)

    @property
    def kind(self) -> Any:
        """Key of layers that can use the same buffers in the same way."""
        return self.tree, tuple(
            (leaf.placed.shape, str(leaf.placed.dtype), leaf.placed.sharding) for leaf in self.leaves
        )

    def of_experts(self, count: int) -> "TreeLayout":
        """The same arrays with so many experts in place of all of them."""
        return TreeLayout(tuple(leaf.of_experts(count) for leaf in self.leaves), self.tree)

    @property
    def shapes(self) -> Any:
        """The tree of the placed arrays' shapes."""
        return jax.tree.unflatten(self.tree, [leaf.placed for leaf in self.leaves])

    def carve(self, arenas: dict[Any, np.ndarray]) -> list[list[np.ndarray]]:
        """Buffers of each leaf, one for each of its shards, in one array of bytes for each device."""
        starts, buffers = dict.fromkeys(arenas, 0), []
        for leaf in self.leaves:
            own = []
            for device, _ in leaf.shards:
                start = starts[device]
                raw = arenas[device][start : start + leaf.shard_bytes]
                own.append(raw.view(leaf.placed.dtype).reshape(leaf.shard_shape))
                starts[device] = start + -(-leaf.shard_bytes // ALIGNMENT) * ALIGNMENT
            buffers.append(own)
        return buffers

    def place(self, buffers: list[list[np.ndarray]], kind: str | None = None) -> Any:
        """The arrays on the devices, or in their memory of a `kind`; on a CPU they are the buffers themselves."""
        placed = []
        for leaf, own in zip(self.leaves, buffers, strict=True):
            shape, sharding, dtype = leaf.placed.shape, leaf.placed.sharding, leaf.placed.dtype
            places: list[Any] = [device for device, _ in leaf.shards]
            if kind is not None:
                places = [SingleDeviceSharding(device, memory_kind=kind) for device in places]
                sharding = sharding.with_memory_kind(kind)  # pyright: ignore[reportOptionalMemberAccess]
            parts = [jax.device_put(buffer, place) for buffer, place in zip(own, places, strict=True)]
            placed.append(jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype))  # pyright: ignore[reportArgumentType]
        return jax.tree.unflatten(self.tree, placed)


class Experts(NamedTuple):
    """The experts of a layer: how one of them lies in memory, and how many there are."""

    layout: TreeLayout
    count: int


class LayerLayout(NamedTuple):
    """A layer: norms and biases, which always stay on the devices, and its weights, which may pass by.

    Of a mixture whose experts pass one by one, `shared` are the weights that every pass takes; None else.
    """

    small: TreeLayout
    weights: TreeLayout
    shared: TreeLayout | None = None
    experts: Experts | None = None

    @property
    def passing(self) -> TreeLayout:
        """The arrays that every pass takes of the layer, if it is streamed."""
        return self.weights if self.shared is None else self.shared


def layer_layouts(placement: Placement) -> list[LayerLayout]:
    """Layouts of each layer of a model."""
    trees = [declare_params(placement.cfg, placement.weights), placement.own_params(), placement.params()]
    made = []
    for index, layer in enumerate(zip(*(tree["layers"] for tree in trees), strict=True)):

        def lay_out(names: list[str], index: int = index, layer: Any = layer) -> TreeLayout:
            return _make_layout(index, *({name: tree[name] for name in names if name in tree} for tree in layer))

        small = [name for name in layer[0] if name.endswith(("norm", "bias"))]
        weights = [name for name in layer[0] if name not in small]
        made.append(LayerLayout(lay_out(small), lay_out(weights)))
        experts = placement.cfg.layer_experts(index)
        if experts is None or placement.plan.expert_parallel or not all(placement.cfg.layer_units(index)):
            continue
        if jax.process_count() > 1:
            continue  # what each process reads of an array is a part of all experts
        every = lay_out([*EXPERT_WEIGHTS])
        if all(leaf.has_separate_experts for leaf in every.leaves):
            shared = lay_out([name for name in weights if name not in EXPERT_WEIGHTS])
            made[-1] = made[-1]._replace(shared=shared, experts=Experts(every.of_experts(1), experts.count))
    return made


def slot_layouts(placement: Placement) -> dict[int, TreeLayout]:
    """Arrays of experts on the devices, by streamed layer whose experts pass one by one.

    Layers of a kind share it. It has room for all experts of a layer, and for those that each layer keeps.
    """
    layouts = layer_layouts(placement)
    found = {i: experts for i in placement.streamed if (experts := layouts[i].experts) is not None}
    users = collections.Counter(experts.layout.kind for experts in found.values())
    return {
        i: experts.layout.of_experts(experts.count + placement.kept_experts * users[experts.layout.kind])
        for i, experts in found.items()
    }


def _make_layout(index: int, declared: Any, loaded: Any, placed: Any) -> TreeLayout:
    infos, _ = jax.tree.flatten_with_path(declared, is_leaf=is_info)
    shapes, tree = jax.tree.flatten(placed)
    wholes = jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, Blocks))
    packed = [leaf.format if isinstance(leaf, Blocks) and leaf.format not in FORMATS else None for leaf in wholes]
    parts = zip(infos, jax.tree.leaves(loaded), shapes, packed, strict=True)
    leaves = tuple(
        LeafLayout(f"layers.{index}.{leaf_name(path)}", info, before, after, name)
        for (path, info), before, after, name in parts
    )
    return TreeLayout(leaves, tree)
