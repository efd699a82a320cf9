"""Where JAX 0.10.2 and 0.11.2 differ: one named function for each difference."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh


def mosaic_interpreter(**options: Any) -> Any:
    """The `interpret` argument that makes `plgpu.kernel` run on the host, as `InterpretGPUParams(**options)`."""
    try:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # public since 0.11
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    return InterpretGPUParams(**options)


@contextlib.contextmanager
def lowering_for(device_kind: str, num_cores: int) -> Iterator[None]:
    """Lower programs for a GPU that is not there: `jit(f).trace(...).lower(lowering_platforms=("cuda",))`.

    JAX 0.11 lowers Triton kernels only where it knows the device, and takes it from the mesh in context.

    Args:
      device_kind: JAX's name of the GPU.
      num_cores: its streaming multiprocessors.
    """
    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def lower_for_cuda(function: Any, *operands: Any, device_kind: str = "NVIDIA H100 80GB HBM3", num_cores: int = 132):
    """StableHLO text of a function lowered for CUDA, on any host.

    Args:
      function: of `operands`.
      operands: arrays or `jax.ShapeDtypeStruct`s.
      device_kind: see `lowering_for`.
      num_cores: see `lowering_for`.
    """
    with lowering_for(device_kind, num_cores):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
