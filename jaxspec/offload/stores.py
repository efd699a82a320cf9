"""Stores of the weights of streamed layers: host memory, or the files of a checkpoint."""

import abc
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxspec.errors import CheckpointError, JaxspecError
from jaxspec.offload.layout import Experts, LeafLayout, TreeLayout
from jaxspec.offload.reader import DirectReader
from jaxspec.runtime.sharding import ReadLeaf

# Kind of the host memory that a device reads by itself, without a copy on the way.
PINNED = "pinned_host"


def can_pin(shards: Sequence[tuple[Any, Any]]) -> bool:
    """Whether the devices of shards have memory of their own, and JAX pins memory of the host for them.

    One process alone copies so: of several, JAX moves an array that lies in all of them by a program.
    """
    devices = [device for device, _ in shards]
    return (
        bool(devices)
        and jax.process_count() == 1
        and all(
            device.platform != "cpu" and any(memory.kind == PINNED for memory in device.addressable_memories())
            for device in devices
        )
    )


def measure_link(devices: Sequence[Any]) -> float:
    """Bytes per second from pinned host memory to all of some devices at once."""
    block = np.ones(64 << 20, np.uint8)
    held = [jax.device_put(block, SingleDeviceSharding(device, memory_kind=PINNED)) for device in devices]
    places = [SingleDeviceSharding(device, memory_kind=device.default_memory().kind) for device in devices]

    def copy() -> None:
        jax.block_until_ready([jax.device_put(*pair) for pair in zip(held, places, strict=True)])

    copy()  # the first one makes room
    start = time.perf_counter()
    for _ in range(4):
        copy()
    return 4 * block.nbytes * len(devices) / (time.perf_counter() - start)


class WeightStore(abc.ABC):
    """The weights of layers, each of which is copied or read when its turn comes.

    Attributes:
      layouts: of each layer, by its number; without its experts where those are read one by one.
      experts: of each layer whose experts are.
      pinned: arrays in pinned host memory by layer and expert (None for the rest of a layer), which devices copy by
        themselves; a store that has some has all, and fills nothing.
      bytes_given: bytes that the store has read or copied so far; `reads` counts in how many pieces, `busy_s` the
        seconds in which it was at work.
    """

    layouts: Mapping[int, TreeLayout]
    experts: Mapping[int, Experts] = types.MappingProxyType({})
    pinned: Mapping[tuple[int, int | None], Any] = types.MappingProxyType({})

    def send(self, layer: int, expert: int | None = None) -> Any:
        """Copy what is pinned to the devices: a copy runs beside programs, and what takes the arrays waits for it."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def counters(self) -> tuple[int, int, float]:
        """Bytes read or copied so far, in how many pieces, and the seconds in which it was at work."""

    @abc.abstractmethod
    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray], expert: int | None = None) -> None:
        """Write one array of a layer, or of one of its experts, into a buffer for each device.

        Called from several threads.

        Raises:
          CheckpointError: it cannot be read; the message names file and tensor.
        """

    def close(self) -> None:
        """Give up what the store holds."""
        return None


class DiskStore(WeightStore):
    """Layers in the files of a checkpoint, read and packed each time."""

    def __init__(
        self, layouts: Mapping[int, TreeLayout], reader: DirectReader, read: ReadLeaf, path: Path,
        experts: Mapping[int, Experts] | None = None,
    ):  # fmt: skip
        """`read` gives an array of the checkpoint `path` as declared, or that of one expert, read through `reader`."""
        self.layouts, self.experts, self._reader, self._read = layouts, experts or {}, reader, read
        self._path = path

    @property
    def counters(self) -> tuple[int, int, float]:
        return self._reader.bytes_read, self._reader.reads, self._reader.busy_s

    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray], expert: int | None = None) -> None:
        layout = self.layouts[layer] if expert is None else self.experts[layer].layout
        with self._reader.reusing():
            read_into(self._read, layout.leaves[leaf], buffers, self._path, expert)

    def close(self) -> None:
        self._reader.close()


class HostStore(WeightStore):
    """Layers in host memory, as programs take them; pinned, where devices have memory of their own."""

    def __init__(self, source: WeightStore):
        """Copy the layers of another store, which is not needed afterwards."""
        self.layouts, self.experts = source.layouts, source.experts
        self._held: dict[tuple[int, int | None], list[list[np.ndarray]]] = {}
        self.pinned: dict[tuple[int, int | None], Any] = {}
        every: dict[tuple[int, int | None], TreeLayout] = {(layer, None): one for layer, one in self.layouts.items()}
        for layer, experts in self.experts.items():
            every |= {(layer, expert): experts.layout for expert in range(experts.count)}
        for key, layout in every.items():
            held = _copy(source, key[0], layout, key[1])
            if can_pin(layout.leaves[0].shards):
                # Waits, so that memory holds one layer twice and no more.
                self.pinned[key] = jax.block_until_ready(layout.place(held, PINNED))
            else:
                self._held[key] = held
        self._bytes = self._reads = 0
        self._busy_s, self._lock = 0.0, threading.Lock()

    @property
    def counters(self) -> tuple[int, int, float]:
        return self._bytes, self._reads, self._busy_s

    def send(self, layer: int, expert: int | None = None) -> Any:
        layout = self.layouts[layer] if expert is None else self.experts[layer].layout
        with self._lock:
            self._bytes, self._reads = self._bytes + layout.all_bytes, self._reads + 1
        return jax.device_put(self.pinned[layer, expert], jax.tree.map(lambda leaf: leaf.sharding, layout.shapes))

    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray], expert: int | None = None) -> None:
        start = time.perf_counter()
        for held, buffer in zip(self._held[layer, expert][leaf], buffers, strict=True):
            np.copyto(buffer, held)
        with self._lock:
            self._bytes += sum(buffer.nbytes for buffer in buffers)
            self._reads += 1
            self._busy_s += time.perf_counter() - start


def read_into(
    read: ReadLeaf, leaf: LeafLayout, buffers: list[np.ndarray], path: Path, expert: int | None = None
) -> None:
    """Read one array, that of an expert, or this process's part of it, and write it as programs take it.

    CheckpointError and MemoryError name file and tensor.
    """
    if not leaf.shards:
        return  # all of it lies in other processes
    name = leaf.name if expert is None else f"{leaf.name} of expert {expert}"
    less: dict[str, Any] = {} if expert is None else {"expert": expert}
    if leaf.part is not None:
        less = {"part": leaf.part}
    try:
        leaf.write(read(leaf.name, leaf.info, **less), buffers)
    except MemoryError as error:
        why = f": {error}" if str(error) else ""
        raise MemoryError(f"{path}: no memory while {name} was read{why}") from error
    except JaxspecError as error:
        raise CheckpointError(f"{error} (while {name} was read)") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror} ({name})") from error


def _copy(source: WeightStore, layer: int, layout: TreeLayout, expert: int | None) -> list[list[np.ndarray]]:
    """The arrays of a layer, or of one expert, from a store."""
    buffers = [[np.empty(leaf.shard_shape, leaf.placed.dtype) for _ in leaf.shards] for leaf in layout.leaves]
    for leaf, own in enumerate(buffers):
        source.fill(layer, leaf, own, expert)
    return buffers


def read_tree(read: ReadLeaf, layout: TreeLayout, path: Path) -> Any:
    """Arrays of a layout that stay on the devices, read one after another from the checkpoint `path`."""
    placed: Sequence[Any] = []
    for leaf in layout.leaves:
        buffers = TreeLayout((leaf,), None).carve({device: _aligned(leaf.shard_bytes) for device, _ in leaf.shards})
        read_into(read, leaf, buffers[0], path)
        placed = [*placed, TreeLayout((leaf,), jax.tree.structure(0)).place(buffers)]
    return jax.tree.unflatten(layout.tree, placed)


def _aligned(nbytes: int) -> np.ndarray:
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes]
