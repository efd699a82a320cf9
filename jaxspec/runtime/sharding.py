"""How parameters lie on a mesh: which axis is split over which mesh axis, and the zero padding that makes it divide.

Padding lets every tensor-parallel degree divide every split dimension (SwiftSpec, section 4: TP padding). Padded heads
have zero query, key, value and output weights, padded MLP columns zero gate, up and down weights: they add exact zeros
to the residual stream (zero bytes are zeros in every block format). Padded vocabulary rows are masked where logits are
made. Attention is cut finer than by KV heads where that saves queries (`jaxspec/models/heads.py`).

Each of several processes reads its share of a checkpoint: rows or columns of each tensor. All processes read what is
the same on every device (norms), and queries, keys and values where devices share heads.
"""

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.heads import (
    KV_ROWS,
    QKV_ROWS,
    QUERY_ROWS,
    HeadLayout,
    arrange_heads,
    collect_heads,
    head_layout,
    placed_rows,
)
from jaxspec.models.params import ArrayInfo, is_info, leaf_name
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.transfer import empty, read_whole

# A dimension that holds all heads at once, where blocks cross from head to head: it fits on one device only.
UNCUT = "uncut"

# Megatron's split: heads and MLP columns are local, so a layer needs two all-reduces; the vocabulary is split too.
TENSOR_PARALLEL: Mapping[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "head_rows": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "recurrent_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "experts": None,
    "expert_mlp": TENSOR_AXIS,
    "embed": None,
    QUERY_ROWS: None,
    KV_ROWS: None,
    QKV_ROWS: None,
    UNCUT: None,
}

# The same with whole experts on the devices: each computes the rows of its own.
EXPERT_PARALLEL: Mapping[str, str | None] = {**TENSOR_PARALLEL, "experts": TENSOR_AXIS, "expert_mlp": None}


# Takes a leaf's name and declaration. A keyword asks for less than the whole: `part`, what one of several processes
# needs, is for `Weights.read`; `expert`, the number of an expert, is for `Weights.direct`. An expert's declaration is
# that of the whole, with one expert in place of all.
ReadLeaf = Callable[..., np.ndarray]

# Dequantising, casting and packing release the interpreter lock; each thread holds one leaf in memory.
NUM_THREADS = 2

_lock = threading.Lock()
_bytes_read = 0

# Leaves whose second dimension in the checkpoint is split: their inputs lie on different devices.
_BY_COLUMNS = ("out", "down", "shared_down")


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def partition_spec(info: ArrayInfo, rules: Mapping[str, str | None] = TENSOR_PARALLEL) -> PartitionSpec:
    """Partition spec of one declared array; `ValueError` where an axis has no rule, or claims a mesh axis twice."""
    for axis in info.axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {', '.join(rules)}")
    names = [None if axis is None else rules[axis] for axis in info.axes]
    if names.count(TENSOR_AXIS) > 1:
        raise ValueError(f"axes {info.axes} claim one mesh axis twice: {names}")
    return PartitionSpec(*names)


def placed_shapes(infos: Any, plan: MeshPlan, min_sizes: Mapping[str, int] | None = None) -> Any:
    """Padded, sharded `jax.ShapeDtypeStruct`s of a pytree of `ArrayInfo` on a mesh: what every restore must produce.

    Split dimensions are padded to a multiple of the mesh's degree and of the declared unit. `min_sizes` gives smallest
    sizes of logical axes; smaller ones are padded up to them first. Blocks that cross from head to head cannot be split
    over several devices: `ValueError`.
    """
    sizes = min_sizes or {}
    mesh = plan.mesh

    def place(info: ArrayInfo) -> jax.ShapeDtypeStruct:
        if UNCUT in info.axes and plan.tensor > 1:
            raise ValueError(
                f"heads of {info.format} blocks {info.shape} cannot be split over {plan.tensor} devices: "
                "their blocks cross from head to head; `fit_storage` keeps such a weight in float32"
            )
        spec = partition_spec(info, EXPERT_PARALLEL if plan.expert_parallel else TENSOR_PARALLEL)
        if (layout := split_layout(info, plan.tensor)) is not None:
            axis = info.axes.index("kv_heads")
            rows = placed_rows(layout, info.axes[axis + 1] or "", info.shape[axis + 1])
            placed = (*info.shape[:axis], plan.tensor, rows, *info.shape[axis + 2 :])
            return jax.ShapeDtypeStruct(placed, info.dtype, sharding=NamedSharding(mesh, spec))
        # Experts are whole: only the columns of a device are padded to whole blocks.
        multiple = plan.tensor * (1 if plan.expert_parallel and "experts" in info.axes else info.multiple)
        shape = (n if a is None else max(n, sizes.get(a, 0)) for n, a in zip(info.shape, info.axes, strict=True))
        padded = tuple(n if name is None else round_up(n, multiple) for n, name in zip(shape, spec, strict=True))
        return jax.ShapeDtypeStruct(padded, info.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, infos, is_leaf=is_info)


def split_layout(info: ArrayInfo, degree: int) -> HeadLayout | None:
    """The layout of an array's heads where devices share KV heads; None where the array is cut or padded as it is."""
    if "kv_heads" not in info.axes:
        return None
    layout = head_layout(info.shape[info.axes.index("kv_heads")], info.group, degree)
    return layout if layout.splits else None


def place_declared(array: np.ndarray, info: ArrayInfo, target: jax.ShapeDtypeStruct) -> jax.Array:
    """One whole array as it is declared, on its devices: heads arranged, then padded and sharded as `target` says."""
    return place_array(arrange_declared(array, info, len(target.sharding.device_set)), target)  # pyright: ignore[reportOptionalMemberAccess]


def arrange_declared(array: np.ndarray, info: ArrayInfo, degree: int) -> np.ndarray:
    """One whole array as it is declared, its heads in the order of `degree` devices."""
    if (layout := split_layout(info, degree)) is None:
        return array
    axis = info.axes.index("kv_heads")
    return arrange_heads(array, layout, axis, info.axes[axis + 1] or "")


def collect_declared(array: jax.Array, info: ArrayInfo) -> np.ndarray:
    """The reverse of `place_declared`, on the host."""
    if (layout := split_layout(info, len(array.sharding.device_set))) is not None:
        axis = info.axes.index("kv_heads")
        return collect_heads(read_whole(array), layout, axis, info.axes[axis + 1] or "", info.shape[axis + 1])
    # Padding comes last.
    return read_whole(array)[tuple(slice(n) for n in info.shape)]


class Part(NamedTuple):
    """Entries `start` to `stop` of the split axis of a leaf, as it is declared."""

    axis: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of this part in the whole leaf."""
        return (slice(None),) * self.axis + (slice(self.start, self.stop),)

    def is_of_experts(self, info: ArrayInfo) -> bool:
        """Whether the entries are experts, each of which has tensors of its own in a checkpoint."""
        return info.axes[self.axis] == "experts"

    def of_tensor(self, leaf: str, info: ArrayInfo, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Dimension, start and stop of the same part in a tensor of a checkpoint, in values."""
        dimension = 1 if leaf.rpartition(".")[2] in _BY_COLUMNS else 0
        per_entry = shape[dimension] // info.shape[self.axis]
        return dimension, self.start * per_entry, self.stop * per_entry


def local_part(info: ArrayInfo, target: jax.ShapeDtypeStruct) -> Part | None:
    """The part of a leaf that the devices of this process hold; None where that is all of it, or cannot be cut."""
    sharding: Any = target.sharding
    axis = next((i for i, name in enumerate(sharding.spec) if name is not None), None)
    if axis is None or split_layout(info, len(sharding.device_set)) is not None:
        return None
    held = [index[axis].indices(target.shape[axis])[:2] for index in _local_indices(target)]
    size = info.shape[axis]
    return Part(axis, min(size, min(start for start, _ in held)), min(size, max(stop for _, stop in held)))


def is_elsewhere(target: jax.ShapeDtypeStruct) -> bool:
    """Whether no device of this process holds anything of an array."""
    return not _local_indices(target)


def place_array(array: np.ndarray, target: jax.ShapeDtypeStruct, part: Part | None = None) -> jax.Array:
    """An unpadded array, or this process's part of it, on its devices: padded with zeros and sharded as `target`."""

    def cut(index: Any) -> np.ndarray:
        return cut_shard(array, index, target.shape, part)

    return jax.make_array_from_callback(target.shape, target.sharding, cut, dtype=target.dtype)


def cut_shard(
    array: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...], part: Part | None = None
) -> np.ndarray:
    """The shard at `index` of a padded `shape`, from an array or a part of it, padded with zeros."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    own = [(start, min(stop, n)) for (start, stop), n in zip(bounds, array.shape, strict=True)]
    if part is not None:
        start, stop = bounds[part.axis]
        own[part.axis] = max(start, part.start) - part.start, max(min(stop, part.stop), part.start) - part.start
    held = array[tuple(slice(a, max(a, b)) for a, b in own)]
    padding = [(0, stop - start - n) for (start, stop), n in zip(bounds, held.shape, strict=True)]
    return np.pad(held, padding) if any(after for _, after in padding) else held


def place_tree(read: ReadLeaf, declared: Any, shapes: Any, threads: int = NUM_THREADS) -> Any:
    """Read parameters as they are declared, and place them as `shapes` says; a leaf per thread is in host memory."""
    infos = jax.tree.leaves(declared, is_leaf=is_info)
    paths_shapes, treedef = jax.tree.flatten_with_path(shapes)
    with ThreadPoolExecutor(threads) as pool:
        futures = [
            pool.submit(_place_leaf, read, leaf_name(path), info, shape)
            for info, (path, shape) in zip(infos, paths_shapes, strict=True)
        ]
        try:
            leaves = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return jax.tree.unflatten(treedef, leaves)


def _place_leaf(read: ReadLeaf, name: str, info: ArrayInfo, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Read a leaf, or what this one of several processes needs of it, and place it on the devices."""
    if jax.process_count() > 1:
        if is_elsewhere(target):
            return empty(target)
        if (part := local_part(info, target)) is not None:
            return place_array(read(name, info, part=part), target, part)
    return place_declared(read(name, info), info, target)


def count_read(array: np.ndarray) -> None:
    """Note that an array was read from a checkpoint, as it is stored there."""
    global _bytes_read
    with _lock:
        _bytes_read += array.nbytes


def bytes_read() -> int:
    """Bytes of weights that this process has read from checkpoints so far."""
    return _bytes_read


def share_of(targets: Any) -> float:
    """The share of all bytes of placed arrays, copies counted once, that this process holds."""
    local = whole = 0.0
    for target in jax.tree.leaves(targets):
        size = math.prod(target.shape) * target.dtype.itemsize
        whole += size
        kept = {str(index) for index in _local_indices(target)}
        local += size * len(kept) / len({str(i) for i in target.sharding.devices_indices_map(target.shape).values()})
    return local / whole


def _local_indices(target: jax.ShapeDtypeStruct) -> list[tuple[slice, ...]]:
    sharding: Any = target.sharding
    return list(sharding.addressable_devices_indices_map(target.shape).values())
