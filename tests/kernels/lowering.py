"""Lowering programs for a GPU that is not there."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

H100 = ("NVIDIA H100 80GB HBM3", 132)
# K of one shard, G, H.
MODELS = {
    "llama-3-8b": (8, 4, 128),
    "llama-3-70b on 4": (2, 8, 128),
    "llama-3-70b on 8": (1, 8, 128),
    "qwen2-72b": (8, 8, 128),
    "smollm2": (3, 3, 64),
}


def abstract_attention(T, K, G, H, slots, window=None, dtype=jnp.bfloat16):
    """Operands of attention of a tree, as far as programs are traced with them."""
    shapes = [((T, K, G + 2, H), jnp.float32), *[((T, H // 2), jnp.float32)] * 2, *[((K, slots, H), dtype)] * 2]
    shapes += [((), jnp.int32), ((T, window or T), bool), ((T,), jnp.int32)]
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@contextlib.contextmanager
def lowering_for(device_kind: str, num_cores: int) -> Iterator[None]:
    """Let `jit(f).trace(...).lower(lowering_platforms=("cuda",))` lower Triton kernels on any host.

    JAX 0.11 lowers them only where it knows the device, and takes it from the mesh in context.

    Args:
      device_kind: JAX's name of the GPU.
      num_cores: its streaming multiprocessors.
    """
    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def lower_for_cuda(function: Any, *operands: Any) -> str:
    """StableHLO text of a function lowered for an H100; operands are arrays or `jax.ShapeDtypeStruct`s."""
    with lowering_for(*H100):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
