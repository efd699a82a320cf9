"""Streamed layers of a large geometry: what the link gives, and what of it a pass over the layers takes."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.presets import load_preset
from jaxspec.offload.executor import stream_layers
from jaxspec.offload.layout import TreeLayout, layer_layouts
from jaxspec.offload.stores import HostStore, WeightStore, can_pin, measure_link
from jaxspec.offload.stream import LayerStream
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from kernel_bench.device import name_device
from kernel_bench.steps import PRESET, TINY

PASSES = 3


class Zeros(WeightStore):
    """Layers of zeros."""

    def __init__(self, layouts: dict[int, TreeLayout]):
        """Nothing is filled yet."""
        self.layouts = layouts

    @property
    def counters(self) -> tuple[int, int, float]:
        return 0, 0, 0.0

    def fill(self, layer: int, leaf: int, buffers: Any, expert: int | None = None) -> None:
        for buffer in buffers:
            buffer[...] = 0


def measure_offload(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """The work, then the link's bytes per second and those of passes that take each layer and use it for one sum."""
    yield {"name": "offload", "planned": ["link", "streamed pass"], "device": name_device()}
    cfg, dtype = (TINY, jnp.float32) if smoke else (load_preset(PRESET), jnp.bfloat16)
    target = stream_layers(Placement(cfg, plan_mesh(kernels="xla"), jnp.dtype(dtype)), 0)
    devices = [device for device, _ in layer_layouts(target)[0].weights.leaves[0].shards]
    yield {"name": "link", "bytes_per_s": measure_link(devices)}
    store = HostStore(Zeros({index: layout.weights for index, layout in enumerate(layer_layouts(target))}))
    stream = LayerStream(store, [{}] * cfg.num_layers, {})
    use = jax.jit(lambda layer: sum(leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(layer)))
    seconds = []
    for _ in range(1 + PASSES):  # the first one compiles
        start = time.perf_counter()
        with stream.weights() as weights:
            for index in range(cfg.num_layers):
                weights.used(index, use(weights.take(index)))
        seconds.append(time.perf_counter() - start)
    pinned = can_pin(store.layouts[0].leaves[0].shards)
    rate = PASSES * stream.nbytes / sum(seconds[1:])
    stream.close()
    yield {"name": "streamed pass", "seconds": sum(seconds[1:]) / PASSES, "bytes_per_s": rate, "pinned": pinned}
