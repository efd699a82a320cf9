"""Arrays from the host to devices, from one mesh to another, and to every process, without a detour through the host.

Meshes may lie in different processes. Every process then calls the same functions in the same order, and has an array
object for every array, also where it holds no part of it.
"""

import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspec.runtime import hosts
from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import MeshPlan

Tree = TypeVar("Tree")


def place(value: Any, sharding: Any) -> jax.Array:
    """A value that every process has, on devices."""
    if jax.process_count() == 1:
        return jax.device_put(value, sharding)
    # `jax.device_put` would compare the value between the processes, which waits for them.
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)


def place_like(tree: Any, shapes: Any) -> Any:
    """Values that every process has, on the devices of a like tree of arrays or shapes; one call costs half of many."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    return jax.device_put(tree, shardings) if jax.process_count() == 1 else jax.tree.map(place, tree, shardings)


def zeros_of(tree: Any) -> Any:
    """Zeros in the place of arrays, on the same devices."""
    return place_like(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree), tree)


def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of which this process holds nothing."""
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, [], dtype=shape.dtype)  # pyright: ignore[reportArgumentType]


def transfer(array: jax.Array, plan: MeshPlan) -> jax.Array:
    """Copy a replicated array to every device of another mesh; returns before it has arrived.

    `jax.device_put` is asynchronous only while the layout stays the same; otherwise it gathers on the host and waits,
    silently (JAX's `_array_shard_arg`). So whatever crosses meshes leaves its program replicated:
    an array that is split over its devices raises `ValueError`.
    """
    if not array.sharding.is_fully_replicated:
        raise ValueError(f"only replicated arrays cross meshes, got {array.sharding}")
    if recording.active is not None:
        return recording.active.transfer(lambda: _send(array, plan.devices, replicated(plan)), array, plan)
    return _send(array, plan.devices, replicated(plan))


def _send(array: jax.Array, devices: tuple[Any, ...], sharding: Any) -> jax.Array:
    sources, here = list(array.sharding.device_set), jax.process_index()
    if jax.process_count() == 1 or {device.process_index for device in (*sources, *devices)} == {here}:
        return jax.device_put(array, sharding)
    # JAX moves arrays between processes from device to device, where both sides have equally many. It numbers these
    # moves by counting them in each process, so that a process with neither side takes part in them, too.
    local = {shard.device: shard.data for shard in array.addressable_shards}
    arrived = []
    for index, device in enumerate(devices):
        source = _nearest(sources, device, index)
        if source.process_index == device.process_index != here:
            continue
        parts = [local[source]] if source in local else []
        single = jax.make_array_from_single_device_arrays(
            array.shape, SingleDeviceSharding(source), parts, dtype=array.dtype
        )
        moved = jax.device_put(single, SingleDeviceSharding(device))
        if device.process_index == here:
            arrived.append(moved)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, arrived, dtype=array.dtype)


def _nearest(sources: list[Any], device: Any, index: int) -> Any:
    """The device that sends to another one: of the same process if there is one, else in turn."""
    ordered = sorted(sources, key=lambda source: source.id)
    same = [source for source in ordered if source.process_index == device.process_index]
    return same[index % len(same)] if same else ordered[index % len(ordered)]


def read_scalar(array: Any) -> int:
    """A replicated integer, in every process, whichever of them hold it, or one of the host; waits for it."""
    held = {device.process_index for device in array.sharding.device_set} if isinstance(array, jax.Array) else ()
    if len(held) in (0, jax.process_count()):
        return int(array)
    known = [int(shard.data) for shard in array.addressable_shards[:1]]
    return next(values[0] for values in hosts.gather("a scalar", known) if values)


def read_whole(array: jax.Array) -> np.ndarray:
    """An array on the host of every process that holds a part of it; all of them must ask."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if not array.sharding.is_fully_replicated:
        whole = NamedSharding(array.sharding.mesh, PartitionSpec())  # pyright: ignore[reportAttributeAccessIssue]
        array = jax.jit(lambda x: x, out_shardings=whole)(array)
    return np.asarray(array.addressable_data(0))


def everywhere(tree: Tree) -> Tree:
    """The same replicated arrays, readable in every process; those that lack them get copies."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(_readable, tree)


def _readable(array: jax.Array) -> jax.Array:
    missing = sorted(set(range(jax.process_count())) - {d.process_index for d in array.sharding.device_set})
    mine = array
    for process in missing:
        device = _first_device(process)
        sent = _send(array, (device,), SingleDeviceSharding(device))
        if process == jax.process_index():
            mine = sent
    return mine


@functools.cache
def _first_device(process: int) -> Any:
    return next(device for device in jax.devices() if device.process_index == process)


@functools.cache
def replicated(plan: MeshPlan) -> Any:
    """The sharding of a whole copy on every device of a mesh."""
    return NamedSharding(plan.mesh, PartitionSpec())
