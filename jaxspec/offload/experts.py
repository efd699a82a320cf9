"""Experts of streamed layers on the devices: a layer's router says which are needed, and only those are read."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.offload.layout import TreeLayout
from jaxspec.offload.reader import map_memory
from jaxspec.offload.stores import WeightStore


class Pool(Protocol):
    """Runs functions in other threads."""

    def submit(self, function: Callable[..., None], /, *args: Any) -> "Future[None]": ...


class ExpertSlots:
    """Room for experts on the devices, which layers of a kind share: arrays with an expert at each place."""

    def __init__(self, layout: TreeLayout):
        """Take the memory; `layout` is that of the arrays."""
        sizes = {device: layout.nbytes for device, _ in layout.leaves[0].shards}
        self._one, count = layout.of_experts(1), layout.leaves[0].shard_shape[0]
        self.free = list(range(count))
        self._parts = layout.carve(
            {device: np.frombuffer(map_memory(size), np.uint8) for device, size in sizes.items()}
        )
        self.arrays = layout.place(self._parts)
        # On a CPU the arrays show what is written to their memory.
        self._in_place = is_same_memory(self.arrays, self._parts)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.arrays)
        self._put = jax.jit(_put, donate_argnums=0, out_shardings=shardings)

    def parts(self, place: int, leaf: int) -> list[np.ndarray]:
        """Memory for one array of the expert at a place, for each device."""
        return [part[place : place + 1] for part in self._parts[leaf]]

    def put(self, place: int, expert: Any) -> None:
        """Let `arrays` hold an expert's arrays at a place, once programs that were dispatched before have read them."""
        self.arrays = self._put(self.arrays, expert, jnp.int32(place))

    def show(self, places: Sequence[int]) -> None:
        """Let `arrays` hold what was written to `parts` of some places."""
        for place in () if self._in_place else places:
            expert = self._one.place([self.parts(place, leaf) for leaf in range(len(self._parts))])
            self.put(place, jax.block_until_ready(expert))


class ExpertCache:
    """The experts of streamed layers. Of each layer those that were used last stay, the others make room.

    A layer's experts are wanted again only after all other layers', so that a common order of use would keep none.
    """

    def __init__(
        self, slots: Mapping[int, TreeLayout], kept: int, pool: Pool, wait: Callable[[Sequence["Future[None]"]], Any]
    ):  # fmt: skip
        """Nothing is read yet.

        Args:
          slots: of each layer, the layout of the arrays that it shares with others of its kind; see `slot_layouts`.
          kept: experts of a layer that stay.
          pool: runs what fills memory; `wait` waits for it.
        """
        self._kept, self._pool, self._wait = kept, pool, wait
        shared = {layout.kind: ExpertSlots(layout) for layout in {one.kind: one for one in slots.values()}.values()}
        self._slots = {layer: shared[layout.kind] for layer, layout in slots.items()}
        # Of each layer, where its experts are, those used last at the end.
        self._places: dict[int, dict[int, int]] = {layer: {} for layer in slots}
        # Of each layer, an array that is there when no program reads its experts any more.
        self._running: dict[int, Any] = {}
        self.needed = self.read = 0

    def fetch(self, store: WeightStore, layer: int, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """The arrays of experts, and where in them each expert of a layer is, int32 [E], -1 for those that are not.

        `rows` int [E] says how many rows each expert has to serve. Those that are needed and not there are read from
        the store.

        Raises:
          CheckpointError: an expert cannot be read.
        """
        slots, places = self._slots[layer], self._places[layer]
        needed = [int(expert) for expert in np.argsort(rows, kind="stable") if rows[expert]]
        missing = [expert for expert in needed if expert not in places]
        self.needed, self.read = self.needed + len(needed), self.read + len(missing)
        if missing:
            self._fill(store, layer, missing)
        for expert in needed:
            places[expert] = places.pop(expert)
        found = np.full(len(rows), -1, np.int32)
        found[[*places]] = [*places.values()]
        return slots.arrays, found

    def _fill(self, store: WeightStore, layer: int, missing: Sequence[int]) -> None:
        slots = self._slots[layer]
        if store.pinned:
            taken = [slots.free.pop() for _ in missing]
            for expert, place in zip(missing, taken, strict=True):
                slots.put(place, store.send(layer, expert))
            self._places[layer] |= dict(zip(missing, taken, strict=True))
            return
        jax.block_until_ready([*self._running.values()])
        self._running.clear()
        taken = [slots.free.pop() for _ in missing]
        futures = [
            self._pool.submit(store.fill, layer, leaf, slots.parts(place, leaf), expert)
            for expert, place in zip(missing, taken, strict=True)
            for leaf in range(len(store.experts[layer].layout.leaves))
        ]
        try:
            self._wait(futures)
            for future in futures:
                future.result()
            slots.show(taken)
        except BaseException:
            for future in futures:
                future.cancel()
            self._wait(futures)
            slots.free += taken
            raise
        self._places[layer] |= dict(zip(missing, taken, strict=True))

    def used(self, layer: int, result: Any) -> None:
        """The programs that take a layer's experts were dispatched, and `result` is what the last of them gives."""
        self._running[layer] = result
        self.trim(layer)

    def trim(self, layer: int) -> None:
        """Make room: of a layer, the experts that were used last stay."""
        places = self._places[layer]
        for expert in [*places][: max(0, len(places) - self._kept)]:
            self._slots[layer].free.append(places.pop(expert))

    def reset(self) -> None:
        """Make room after a pass that failed; what stays is still right."""
        for layer in self._places:
            self.trim(layer)


def _put(arrays: Any, expert: Any, place: jax.Array) -> Any:
    return jax.tree.map(lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, place, 0), arrays, expert)


def is_same_memory(placed: Any, parts: list[list[np.ndarray]]) -> bool:
    """Whether arrays lie where their parts were written: on a CPU JAX keeps aligned memory without a copy."""
    leaves = jax.tree.leaves(placed)
    if any(device.platform != "cpu" for leaf in leaves for device in leaf.devices()):
        return False
    for leaf, own in zip(leaves, parts, strict=True):
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        places = [shard.data.unsafe_buffer_pointer() for shard in shards]
        if places != [part.ctypes.data for part in own]:
            return False
    return True
