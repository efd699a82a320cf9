"""Arrays from one mesh to another, without a detour through the host."""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import MeshPlan


def transfer(array: jax.Array, plan: MeshPlan) -> jax.Array:
    """Copy a replicated array to every device of another mesh; returns before it has arrived.

    `jax.device_put` is asynchronous only while the layout stays the same; otherwise it gathers on the host and waits,
    silently (JAX's `_array_shard_arg`). So whatever crosses meshes leaves its program replicated:
    an array that is split over its devices raises `ValueError`.
    """
    if not array.sharding.is_fully_replicated:
        raise ValueError(f"only replicated arrays cross meshes, got {array.sharding}")
    if recording.active is not None:
        return recording.active.transfer(lambda: jax.device_put(array, replicated(plan)), array, plan)
    return jax.device_put(array, replicated(plan))


@functools.cache
def replicated(plan: MeshPlan) -> Any:
    """The sharding of a whole copy on every device of a mesh."""
    return NamedSharding(plan.mesh, PartitionSpec())
