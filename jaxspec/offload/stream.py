"""The ring of buffers through which streamed layers pass, filled ahead of the pass that uses them."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config import Offload
from jaxspec.models.params import Params
from jaxspec.offload.experts import ExpertCache, is_same_memory
from jaxspec.offload.layout import TreeLayout, layer_layouts, slot_layouts
from jaxspec.offload.reader import DirectReader, map_memory, start_threads
from jaxspec.offload.stores import DiskStore, HostStore, WeightStore, read_tree
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.sharding import ReadLeaf

# Buffers of a layer each: one in use, one that is full, one that is being filled. From pinned memory a copy needs no
# thread, and goes on while the next one is asked for: one in use, one that comes.
NUM_BUFFERS, NUM_PINNED_BUFFERS = 3, 2
# Threads that fill buffers: while two pack what they read, the next one reads.
NUM_FILLERS = 3

Progress = Callable[[int, int, int, float], None]


@dataclasses.dataclass(frozen=True)
class StreamCounts:
    """Counts of what has passed so far.

    Attributes:
      passes: passes over the weights that ended.
      bytes: bytes that were read or copied, those for the next pass included; `reads` in how many pieces.
      read_s: seconds in which something was being read or copied.
      stalls: layers that a pass had to wait for, and `stall_s` the seconds of it.
      pass_s: seconds of all passes.
      experts: experts that rows of a pass were sent to, each layer's counted; `experts_read` of them were not there.
    """

    passes: int = 0
    bytes: int = 0
    reads: int = 0
    read_s: float = 0.0
    stalls: int = 0
    stall_s: float = 0.0
    pass_s: float = 0.0
    experts: int = 0
    experts_read: int = 0

    def since(self, before: "StreamCounts") -> "OffloadStats":
        """Counts that were added to `before`, for the statistics of a generation."""
        now, then = dataclasses.asdict(self), dataclasses.asdict(before)
        added = {name: now[name] - then[name] for name in now}
        read_s = added["read_s"]
        return OffloadStats(**added, overlap=max(0.0, 1 - added["stall_s"] / read_s) if read_s else None)


@dataclasses.dataclass(frozen=True)
class OffloadStats(StreamCounts):
    """Counts of one generation; `overlap` is the share of `read_s` that no pass waited for, None without reading."""

    overlap: float | None = None


class Buffer:
    """Memory for one streamed layer on each device, and the arrays that lie in it."""

    def __init__(self, sizes: Mapping[Any, int]):
        """So many bytes on each device."""
        # Pages of anonymous maps are aligned, and come when they are first written.
        self._arenas = {
            device: np.frombuffer(map_memory(size), np.uint8) for device, size in sizes.items()
        }  # fmt: skip
        self._known: dict[Any, tuple[list[list[np.ndarray]], Any]] = {}
        self._sent: Any = None  # arrays that devices still copy, from this memory or from pinned memory

    def send(self, store: WeightStore, layer: int) -> None:
        """Have the devices copy a layer from pinned memory; nothing waits for it here."""
        self._sent = store.send(layer)

    def fill(self, store: WeightStore, layer: int, leaf: int, part: list[np.ndarray]) -> None:
        """Write an array of a layer; waits for devices that copy what was there before. Called in other threads."""
        jax.block_until_ready(self._sent)
        self._sent = None
        store.fill(layer, leaf, part)

    def parts(self, layout: TreeLayout) -> list[list[np.ndarray]]:
        """The place of each array of a layer."""
        if layout.kind not in self._known:
            self._known[layout.kind] = layout.carve(self._arenas), None
        return self._known[layout.kind][0]

    def place(self, layout: TreeLayout) -> Any:
        """The arrays of a layer that was sent, or whose parts are filled; devices may still copy them."""
        if not self._known:
            sent, self._sent = self._sent, None
            return sent
        parts, placed = self._known[layout.kind]
        if placed is not None:
            return placed
        placed = layout.place(parts)
        if is_same_memory(placed, parts):
            # On a CPU the arrays are the buffer: they show what is written there later.
            self._known[layout.kind] = parts, placed
        else:
            self._sent = placed
        return placed


class LayerStream:
    """Layers of a model, one after another and again from the first: `params["layers"]` of a streamed target.

    A buffer is used again once the program that took its layer has run. What a pass leaves free is filled for the next
    one. Calls come from one thread; other threads fill.
    """

    def __init__(
        self, store: WeightStore, small: Sequence[Params], resident: Mapping[int, Params], *,
        slots: Mapping[int, TreeLayout] | None = None, kept: int = 0, buffers: int = NUM_BUFFERS, pool: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        """Nothing is read yet.

        Args:
          small: of each layer, what always stays on the devices.
          resident: the rest of the layers that stay.
          slots: of each layer whose experts are read one by one, the layout of the arrays that they lie in.
          kept: experts of such a layer that stay from pass to pass.
          buffers: most layers that are in memory at once.
          pool: runs what fills buffers.
          clock: tells seconds.
        """
        self.store, self._small, self._resident, self.num_layers = store, small, resident, len(small)
        self._order = [layer for layer in range(self.num_layers) if layer not in resident]
        self.progress: Progress | None = None  # told layers, all layers, bytes and seconds of a pass as it goes
        self._clock = clock
        self._pool = pool or start_threads(NUM_FILLERS, "jaxspec-fill")
        self._wait = getattr(pool, "wait", wait)
        sizes: dict[Any, int] = {}
        for layer in self._order:
            layout = store.layouts[layer]
            for device, _ in layout.leaves[0].shards:
                sizes[device] = max(sizes.get(device, 0), layout.nbytes)
        if store.pinned:
            buffers, sizes = min(buffers, NUM_PINNED_BUFFERS), {}
        self.num_buffers = min(buffers, len(self._order))
        self._free = [Buffer(sizes) for _ in range(self.num_buffers)]
        self._next = 0  # place in the order of the layer that is filled next
        self._coming: collections.deque[tuple[int, Buffer, list[Future[None]]]] = collections.deque()
        self._passes, self._stalls, self._stall_s, self._pass_s = 0, 0, 0.0, 0.0
        self._experts = ExpertCache(slots or {}, kept, self._pool, self._wait)

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that pass by on all devices, as programs take them, with all of their experts."""
        whole = sum(layout.all_bytes for layout in self.store.layouts.values())
        return whole + sum(experts.layout.all_bytes * experts.count for experts in self.store.experts.values())

    @property
    def counts(self) -> StreamCounts:
        """Counts of what has passed so far."""
        nbytes, reads, busy_s = self.store.counters
        found = StreamCounts(self._passes, nbytes, reads, busy_s, self._stalls, self._stall_s, self._pass_s)
        return dataclasses.replace(found, experts=self._experts.needed, experts_read=self._experts.read)

    @contextlib.contextmanager
    def weights(self) -> "Iterator[Pass]":
        """One pass over all layers, in order; an error within gives all buffers up and begins anew the next time."""
        start, one = self._clock(), Pass(self)
        try:
            if any(future.done() and future.exception() for _, _, parts in self._coming for future in parts):
                self.reset()  # what failed while it was read ahead is read again
            self._fill_ahead()
            yield one
            one.finish()
        except BaseException:
            one.abandon()
            self.reset()
            raise
        self._passes += 1
        self._pass_s += self._clock() - start

    def reset(self) -> None:
        """Wait for what is being filled, forget it, and begin with the first layer the next time."""
        coming, self._coming = list(self._coming), collections.deque()
        futures = [future for _, _, parts in coming for future in parts]
        for future in futures:
            future.cancel()
        self._wait(futures)
        self._free += [buffer for _, buffer, _ in coming]
        self._next = 0
        self._experts.reset()

    def close(self) -> None:
        """End the threads and give up the store."""
        self.reset()
        self._pool.shutdown()
        self.store.close()

    def _fill_ahead(self) -> None:
        while self._free and self._order:
            layer = self._order[self._next]
            buffer, layout = self._free.pop(), self.store.layouts[layer]
            self._next = (self._next + 1) % len(self._order)
            futures: list[Future[None]] = []
            self._coming.append((layer, buffer, futures))  # first: what is raised below loses no buffer
            if self.store.pinned:
                buffer.send(self.store, layer)
                continue
            for leaf, part in enumerate(buffer.parts(layout)):
                futures.append(self._pool.submit(buffer.fill, self.store, layer, leaf, part))

    def _has_come(self, layer: int) -> bool:
        return layer in self._resident or all(future.done() for future in self._coming[0][2])

    def _receive(self, layer: int) -> tuple[Buffer | None, Any]:
        if layer in self._resident:
            return None, self._small[layer] | self._resident[layer]
        coming, buffer, futures = self._coming[0]
        assert coming == layer, f"layer {layer} is wanted, {coming} is coming"
        if not self._has_come(layer):
            start = self._clock()
            self._wait(futures)
            self._stalls += 1
            self._stall_s += self._clock() - start
        for future in futures:
            future.result()
        self._coming.popleft()
        try:
            return buffer, self._small[layer] | buffer.place(self.store.layouts[layer])
        except BaseException:
            self._free.append(buffer)
            raise

    def _give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)
        self._fill_ahead()

    def _used(self, layer: int, result: Any) -> None:
        if layer in self.store.experts:
            self._experts.used(layer, result)

    def _fetch(self, layer: int, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        read, start = self._experts.read, self._clock()
        found = self._experts.fetch(self.store, layer, rows)
        if self._experts.read > read:
            self._stalls += 1
            self._stall_s += self._clock() - start
        return found


class Pass:
    """One pass over the layers; see `LayerStream.weights`."""

    def __init__(self, stream: LayerStream):
        """Begin; nothing was taken yet."""
        self._stream, self._started, self._before = stream, stream._clock(), stream.counts.bytes
        self._taken: Buffer | None = None
        # Buffers whose programs may still run, each with an array that is there when they have.
        self._running: collections.deque[tuple[Buffer, Any]] = collections.deque()

    def take(self, layer: int) -> Any:
        """The parameters of a layer on the devices; waits for them.

        Raises:
          CheckpointError: the layer cannot be read.
        """
        if not self._stream._has_come(layer):
            # What ran before ends long before the read does: its buffer is filled meanwhile.
            self.finish()
        self._taken, params = self._stream._receive(layer)
        return params

    def experts(self, layer: int, choices: Sequence[np.ndarray]) -> tuple[Any, np.ndarray]:
        """The experts of a layer that rows were sent to, int32 [T, k] each, -1 for none; waits for them.

        Returns the arrays that hold them, and where each expert is in those; see `ExpertCache.fetch`.

        Raises:
          CheckpointError: an expert cannot be read.
        """
        # What ran before has ended: its buffers are filled while experts are read.
        self.finish()
        chosen = np.concatenate([choice[choice >= 0] for choice in choices])
        return self._stream._fetch(layer, np.bincount(chosen, minlength=self._stream.store.experts[layer].count))

    def used(self, layer: int, result: Any) -> None:
        """The program that takes the layer was dispatched, and `result` is what it gives."""
        self._stream._used(layer, result)
        if self._taken is not None:
            self._running.append((self._taken, result))
            self._taken = None
        while len(self._running) > 1:
            self._release()
        stream = self._stream
        if stream.progress is not None:
            nbytes = stream.counts.bytes - self._before
            stream.progress(layer + 1, stream.num_layers, nbytes, stream._clock() - self._started)

    def finish(self) -> None:
        """Wait for what runs, and give all buffers back."""
        while self._running:
            self._release()

    def abandon(self) -> None:
        """Give back what an error left; what runs has to end first."""
        buffers = [buffer for buffer, _ in self._running] + ([self._taken] if self._taken is not None else [])
        for _, result in self._running:
            # What failed on the devices has ended, too.
            with contextlib.suppress(RuntimeError):
                jax.block_until_ready(result)
        self._running.clear()
        self._taken = None
        self._stream._free += buffers

    def _release(self) -> None:
        buffer, result = self._running[0]
        result.block_until_ready()
        self._running.popleft()
        self._stream._give_back(buffer)


def open_stream(read: ReadLeaf, reader: DirectReader, target: Placement, offload: Offload, path: Path) -> LayerStream:
    """Read the layers of the checkpoint `path` that stay, and begin a stream of the others from memory or disk.

    `read` reads through `reader`, which is closed once nothing more is read from disk.
    """
    layouts, streamed = layer_layouts(target), target.streamed
    small = [read_tree(read, layout.small, path) for layout in layouts]
    resident = {i: read_tree(read, layout.weights, path) for i, layout in enumerate(layouts) if i not in streamed}
    passing = {i: layouts[i].passing for i in streamed}
    experts = {i: one for i in streamed if (one := layouts[i].experts) is not None}
    store: WeightStore = DiskStore(passing, reader, read, path, experts)
    if offload == "host":
        store = HostStore(store)
        reader.close()
    return LayerStream(store, small, resident, slots=slot_layouts(target), kept=target.kept_experts)
