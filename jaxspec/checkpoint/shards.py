"""The part of a weight that one of several processes needs, and how many bytes each process has read.

Tensor parallelism splits every large weight, so that a process reads its share of a checkpoint: rows or columns of each
tensor. What is the same on every device (norms) is read by all, and so are queries, keys and values where devices share
heads (`jaxspec/models/heads.py`).
"""

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.models.params import ArrayInfo
from jaxspec.runtime.sharding import split_layout

# Takes a leaf's name and declaration. A keyword asks for less than the whole: `part`, what one of several processes
# needs, is for `Weights.read`; `expert`, the number of an expert, is for `Weights.direct`. An expert's declaration is
# that of the whole, with one expert in place of all.
ReadLeaf = Callable[..., np.ndarray]

_lock = threading.Lock()
_bytes_read = 0

# Leaves whose second dimension in the checkpoint is split: their inputs lie on different devices.
_BY_COLUMNS = ("out", "down", "shared_down")


class Part(NamedTuple):
    """Entries `start` to `stop` of the split axis of a leaf, as it is declared."""

    axis: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the same part in the whole leaf."""
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
    """What the devices of this process hold of a leaf; None where that is all of it, or cannot be cut."""
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


def place_part(array: np.ndarray, part: Part, target: jax.ShapeDtypeStruct) -> jax.Array:
    """The shards of this process from its part of a leaf, padded with zeros."""

    def cut(index: Any) -> np.ndarray:
        return cut_shard(array, part, index, target)

    return jax.make_array_from_callback(target.shape, target.sharding, cut, dtype=target.dtype)


def cut_shard(array: np.ndarray, part: Part, index: tuple[slice, ...], target: jax.ShapeDtypeStruct) -> np.ndarray:
    """What lies at `index` of `target`, from a part of a leaf, padded with zeros."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, target.shape, strict=True)]
    shard = np.zeros([stop - start for start, stop in bounds], target.dtype)
    own = [(start, min(stop, n)) for (start, stop), n in zip(bounds, array.shape, strict=True)]
    start, stop = bounds[part.axis]
    own[part.axis] = max(start, part.start) - part.start, max(min(stop, part.stop), part.start) - part.start
    held = array[tuple(slice(a, max(a, b)) for a, b in own)]
    shard[tuple(slice(n) for n in held.shape)] = held
    return shard


def count_read(array: np.ndarray) -> None:
    """Note that an array was read from a checkpoint, as it is stored there."""
    global _bytes_read
    with _lock:
        _bytes_read += array.nbytes


def bytes_read() -> int:
    """Bytes of weights that this process has read from checkpoints so far."""
    return _bytes_read


def share_of(targets: Any) -> float:
    """Of all bytes of placed arrays, copies counted once, the part that this process holds."""
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
