"""MeshPlan: which devices a model runs on, and how many of them share each weight."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxspec.errors import ConfigError
from jaxspec.models.config import TENSOR_AXIS
from pallas_kernels import registry
from pallas_kernels.registry import Kernels


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Tensor parallelism over `devices`, in order; one device means no parallelism.

    Hashable and comparable by device, so that it can key compiled functions.

    Attributes:
      devices: of one platform.
      kernels: implementations that programs on them are traced with.
    """

    devices: tuple[Any, ...]
    kernels: Kernels

    def __post_init__(self):
        """Refuse empty or repeated device lists."""
        if not self.devices:
            raise ConfigError("a mesh needs at least one device, got none")
        if len(set(self.devices)) != len(self.devices):
            raise ConfigError(f"a device appears twice in the mesh: {[d.id for d in self.devices]}")

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The one-axis device mesh.

        Its axis is Auto: every computation of jaxspec runs inside `jax.shard_map`, which states its own collectives,
        and outside of it a caller may use the parameters like any other arrays.
        """
        return Mesh(np.array(self.devices), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def plan_mesh(
    count: int = 1, offset: int = 0, kernels: str = "auto", platform: str | None = None, beside: int = 0
) -> MeshPlan:
    """Take `count` devices after the first `offset`, so that two models can have disjoint ones.

    Args:
      count: devices.
      offset: devices to leave out.
      kernels: one of `KERNEL_NAMES`; see `pallas_kernels.registry.choose`.
      platform: of the devices, "cpu" for instance; None for the default one.
      beside: devices of another mesh that compute at the same time and share a CPU's cores.

    Raises:
      ConfigError: fewer devices exist than asked for (both numbers are named), there are none of this platform, or
        the kernels cannot run on them.
    """
    if count < 1:
        raise ConfigError(f"a mesh needs at least one device, got {count}")
    try:
        available = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(f"there are no devices of platform {platform!r} here: {error}") from error
    if offset + count > len(available):
        after = f" after the first {offset}" if offset else ""
        raise ConfigError(
            f"{count} devices asked for{after}, but only {len(available)} exist; "
            "on CPU, JAX_NUM_CPU_DEVICES=N makes N of them"
        )
    devices = tuple(available[offset : offset + count])
    try:
        return MeshPlan(devices, registry.choose(kernels, devices[0].platform, count + beside, devices[0]))
    except ValueError as error:
        raise ConfigError(str(error)) from error
