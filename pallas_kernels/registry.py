"""Which implementation of the operations a program is traced with.

The choice belongs to a mesh (`MeshPlan.kernels`) and is set while a program for it is traced; operations ask `current`.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator

import jax

from pallas_kernels import KERNEL_NAMES
from pallas_kernels.native import library


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A set of implementations.

    Attributes:
      name: "xla", or "cpu" for the native ones, whose rows do not depend on the rows beside them.
      platform: of the devices: "cpu", "gpu", ...; XLA's forms differ.
      threads: most threads that one native call uses.
    """

    name: str
    platform: str
    threads: int = 1

    @property
    def native(self) -> bool:
        """Whether operations go to the native CPU library, which takes the number of live rows as data."""
        return self.name == "cpu"


_current: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar("kernels", default=None)


def current() -> Kernels:
    """What is set, or XLA on the default backend."""
    return _current.get() or Kernels("xla", jax.default_backend())


@contextlib.contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Trace with `kernels`."""
    token = _current.set(kernels)
    try:
        yield
    finally:
        _current.reset(token)


def choose(name: str, platform: str, devices: int = 1) -> Kernels:
    """Resolve a name for a mesh of `devices` devices of one platform, which share the machine's cores.

    Args:
      name: "xla"; "cpu"; or "auto": the fastest that works here. Where the native library is missing, cannot be run, or
        fails its check against the reference, XLA takes its place, and one warning per process says why.

    Raises:
      ValueError: an unknown name, or kernels that cannot run here, and why.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"kernels {name!r} are not known; use {', '.join(KERNEL_NAMES)}")
    xla = Kernels("xla", platform)
    if name == "xla" or (name == "auto" and platform != "cpu"):
        return xla
    if platform != "cpu":
        raise ValueError(f"kernels 'cpu' run on CPU devices, not on {platform}; use auto or xla")
    problem = _find_problem()
    if problem is None:
        return Kernels("cpu", platform, max(1, _cores() // devices))
    if name == "cpu":
        raise ValueError(f"kernels 'cpu' cannot be used: {problem}")
    _warn(problem)
    return xla


@functools.cache
def _find_problem() -> str | None:
    """What is wrong with the native library, or None; found out once per process."""
    found = library.load()
    if found.problem is not None:
        return found.problem
    # The operations, which it runs, ask this module.
    from pallas_kernels.self_check import find_difference

    try:
        difference = find_difference()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # It was built from other sources: its operations take other operands or attributes.
        reason = str(error).partition("\n")[0]
        return f"the {found.level} library cannot be run ({reason}); {library.REINSTALL}"
    return None if difference is None else f"the {found.level} library fails its check: {difference}"


@functools.cache
def _warn(problem: str) -> None:
    """Tell once per process that XLA takes the place of the native library."""
    logging.getLogger(__name__).warning("no native CPU kernels, decoding goes through XLA: %s", problem)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
