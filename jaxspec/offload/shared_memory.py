"""Arrays that lie in memory of ours: JAX keeps aligned memory without a copy on a CPU."""

from typing import Any

import jax
import numpy as np


def is_same_memory(placed: Any, parts: list[list[np.ndarray]]) -> bool:
    """Whether arrays lie where their parts were written."""
    leaves = jax.tree.leaves(placed)
    if any(device.platform != "cpu" for leaf in leaves for device in leaf.devices()):
        return False
    for leaf, own in zip(leaves, parts, strict=True):
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        places = [shard.data.unsafe_buffer_pointer() for shard in shards]
        if places != [part.ctypes.data for part in own]:
            return False
    return True
