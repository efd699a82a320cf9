"""Where the weights of streamed layers are kept: in host memory, or in the files of a checkpoint."""

import abc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.errors import CheckpointError, JaxspecError
from jaxspec.models.params import ArrayInfo
from jaxspec.offload.layout import LeafLayout, TreeLayout
from jaxspec.offload.reader import DirectReader

ReadLeaf = Callable[[str, ArrayInfo], np.ndarray]


class WeightStore(abc.ABC):
    """The weights of layers, each of which is copied or read when its turn comes.

    Attributes:
      layouts: of each layer, by its number.
      bytes_given: bytes that the store has read or copied so far; `reads` counts in how many pieces, `busy_s` the
        seconds in which it was at work.
    """

    layouts: Mapping[int, TreeLayout]

    @property
    @abc.abstractmethod
    def counters(self) -> tuple[int, int, float]:
        """Bytes read or copied so far, in how many pieces, and the seconds in which it was at work."""

    @abc.abstractmethod
    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray]) -> None:
        """Write one array of a layer into a buffer for each device; called from several threads.

        Raises:
          CheckpointError: it cannot be read; the message names file and tensor.
        """

    def close(self) -> None:
        """Give up what the store holds."""
        return None


class DiskStore(WeightStore):
    """Layers in the files of a checkpoint, read and packed each time."""

    def __init__(self, layouts: Mapping[int, TreeLayout], reader: DirectReader, read: ReadLeaf, path: Path):
        """`read` gives a whole array as declared, read through `reader` from the checkpoint `path`."""
        self.layouts, self._reader, self._read, self._path = layouts, reader, read, path

    @property
    def counters(self) -> tuple[int, int, float]:
        return self._reader.bytes_read, self._reader.reads, self._reader.busy_s

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._reader.direct

    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray]) -> None:
        with self._reader.reusing():
            read_into(self._read, self.layouts[layer].leaves[leaf], buffers, self._path)

    def close(self) -> None:
        self._reader.close()


class HostStore(WeightStore):
    """Layers in host memory, as programs take them."""

    def __init__(self, layouts: Mapping[int, TreeLayout], source: WeightStore):
        """Copy the layers of another store, which is not needed afterwards."""
        self.layouts = layouts
        self._held: dict[int, list[list[np.ndarray]]] = {}
        for layer, layout in layouts.items():
            buffers = [[np.empty(leaf.shard_shape, leaf.placed.dtype) for _ in leaf.shards] for leaf in layout.leaves]
            for leaf, own in enumerate(buffers):
                source.fill(layer, leaf, own)
            self._held[layer] = buffers
        self._bytes = self._reads = 0
        self._busy_s, self._lock = 0.0, threading.Lock()

    @property
    def counters(self) -> tuple[int, int, float]:
        return self._bytes, self._reads, self._busy_s

    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray]) -> None:
        start = time.perf_counter()
        for held, buffer in zip(self._held[layer][leaf], buffers, strict=True):
            np.copyto(buffer, held)
        with self._lock:
            self._bytes += sum(buffer.nbytes for buffer in buffers)
            self._reads += 1
            self._busy_s += time.perf_counter() - start


class ThrottledStore(WeightStore):
    """Another store that gives no more than a fixed number of bytes per second: a slower disk or bus, for measuring."""

    def __init__(self, store: WeightStore, bytes_per_s: float):
        """Bytes are counted as programs take them."""
        self.layouts, self._store, self._rate = store.layouts, store, bytes_per_s
        self._free_at, self._lock = 0.0, threading.Lock()

    @property
    def counters(self) -> tuple[int, int, float]:
        return self._store.counters

    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray]) -> None:
        self._store.fill(layer, leaf, buffers)
        with self._lock:
            # Time in which nothing was asked for does not add up.
            self._free_at = max(time.perf_counter(), self._free_at)
            self._free_at += sum(buffer.nbytes for buffer in buffers) / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


def read_into(read: ReadLeaf, leaf: LeafLayout, buffers: list[np.ndarray], path: Path) -> None:
    """Read one array and write it as programs take it; CheckpointError and MemoryError name file and tensor."""
    try:
        leaf.write(read(leaf.name, leaf.info), buffers)
    except MemoryError as error:
        why = f": {error}" if str(error) else ""
        raise MemoryError(f"{path}: no memory while {leaf.name} was read{why}") from error
    except JaxspecError as error:
        raise CheckpointError(f"{error} (while {leaf.name} was read)") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror} ({leaf.name})") from error


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
