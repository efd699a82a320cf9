"""Which implementation of the operations a program is traced with.

The choice belongs to a mesh (`MeshPlan.kernels`) and is set while a program for it is traced; operations ask `current`.

GPU kernels plug in by name. The implementation `mosaic` of the operation `tree_attention` is the module
`pallas_kernels/tree_attention/mosaic.py`, with two functions:

* `tree_attention(...)`: the operation, with the contract that its `api.py` states;
* `supports(...) -> bool`: whether it takes a call, by shapes and dtypes of the operands (they may be abstract) and by
  `current()`. The next implementation that does takes the others, in the end XLA's.

`current().interpret` tells both to run in Pallas' interpreter: tests, on machines without a GPU. Every implementation
is run once on a few tiny calls before it is used (`kernel_check`).
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

from pallas_kernels import KERNEL_NAMES
from pallas_kernels.native import library

Capability = tuple[int, int]

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


@dataclasses.dataclass(frozen=True)
class Needs:
    """What an implementation of GPU kernels runs on.

    Attributes:
      lowest: compute capability.
      below: first compute capability that it does not run on, or None.
      packages: that must be installed beside JAX.
    """

    lowest: Capability
    below: Capability | None = None
    packages: tuple[str, ...] = ()


# Hopper's matrix instructions (wgmma) exist on Hopper alone.
NEEDS = {
    "triton": Needs(AMPERE),
    "mosaic": Needs(HOPPER, below=BLACKWELL),
    "jax_triton": Needs(AMPERE, packages=("jax_triton", "triton")),
}

# Of each set: the implementation that it is named after, and of each operation the implementations in the order they
# are tried. What the set is named after must work where the set is asked for by name. Pallas' SwiGLU goes first: CI
# compares it with the reference, and does not install jax-triton.
OWN = {"pallas-triton": "triton", "mosaic": "mosaic", "jax-triton": "jax_triton"}
SETS = {
    "auto": {"tree_attention": ("mosaic", "triton"), "swiglu": ("triton", "jax_triton")},
    "pallas-triton": {"tree_attention": ("triton",), "swiglu": ("triton",)},
    "mosaic": {"tree_attention": ("mosaic",), "swiglu": ("triton", "jax_triton")},
    "jax-triton": {"tree_attention": ("triton",), "swiglu": ("jax_triton",)},
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A set of implementations.

    Attributes:
      name: "xla"; "cpu" for the native ones, whose rows do not depend on the rows beside them; or a set of GPU kernels.
      platform: of the devices: "cpu", "gpu", ...; XLA's forms differ.
      threads: most threads that one native call uses.
      implementations: of GPU kernels, (operation, implementation), those of an operation in the order they are tried;
        XLA carries out the other operations, and what none of them takes.
      own: the implementation that users asked for by name, or None: they are told if it does not take a call.
      capability: compute capability of the GPU, or None.
      device_kind: JAX's name of the GPU, by which tuned block sizes are found.
      multiprocessors: of the GPU; a small one's where JAX does not say.
      interpret: run Pallas kernels in their interpreter, which is for tests.
    """

    name: str
    platform: str
    threads: int = 1
    implementations: tuple[tuple[str, str], ...] = ()
    own: str | None = None
    capability: Capability | None = None
    device_kind: str = ""
    multiprocessors: int = 64
    interpret: bool = False

    @property
    def native(self) -> bool:
        """Whether operations go to the native CPU library, which takes the number of live rows as data."""
        return self.name == "cpu"

    def candidates(self, operation: str) -> tuple[str, ...]:
        """Implementations of an operation, in the order they are tried."""
        return tuple(implementation for named, implementation in self.implementations if named == operation)

    def find(self, operation: str, *operands: Any, **options: Any) -> ModuleType | None:
        """The module of the first implementation of an operation that takes a call, or None for XLA."""
        for name in self.candidates(operation):
            module = import_implementation(operation, name)
            taken = module.supports(*operands, **options)
            if name == self.own:
                _record_call(self.name, operation, None if taken else f"{operation} of {_describe(operands)}")
            if taken:
                return module
        return None

    def own_calls(self) -> dict[str, "OwnCalls"]:
        """What became of the calls to the implementation that was asked for by name, by operation, so far."""
        return {operation: calls for (name, operation), calls in _own_calls.items() if self.own and name == self.name}


def import_implementation(operation: str, implementation: str) -> ModuleType:
    """The module of an implementation; Pallas takes a second to import, which CPU users would pay for nothing."""
    return importlib.import_module(f"pallas_kernels.{operation}.{implementation}")


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


def choose(name: str, platform: str, devices: int = 1, device: Any = None) -> Kernels:
    """Resolve a name for a mesh of `devices` devices of one platform, which share the machine's cores.

    Args:
      name: one of `KERNEL_NAMES`. "xla": no kernels. "cpu": the native library. "pallas-triton": Pallas kernels for
        NVIDIA GPUs from Ampere on. "mosaic": attention for Hopper. "jax-triton": SwiGLU through jax-triton, which is an
        extra, and the attention of "pallas-triton". "auto": the fastest that works here: what is missing, does not run
        here, fails its check against the reference, or does not take a call's shapes is replaced by the next best, in
        the end by XLA; one warning per process tells of what should have worked.
      platform: of the devices.
      devices: their number.
      device: one of them, of which GPU kernels depend; None is JAX's first of the platform.

    Raises:
      ValueError: an unknown name, or kernels that cannot run here, and why; or a table of tuned block sizes that cannot
        be read.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"kernels {name!r} are not known; use {', '.join(KERNEL_NAMES)}")
    if name == "xla" or (name == "auto" and platform not in ("cpu", "gpu")):
        return Kernels("xla", platform)
    if name == "cpu" or (name == "auto" and platform == "cpu"):
        return _choose_native(name, platform, devices)
    if platform != "gpu":
        raise ValueError(f"kernels {name!r} run on NVIDIA GPUs, not on {platform}; use auto or xla")
    return _choose_gpu(name, device if device is not None else jax.local_devices(backend="gpu")[0])


def _choose_native(name: str, platform: str, devices: int) -> Kernels:
    if platform != "cpu":
        raise ValueError(f"kernels 'cpu' run on CPU devices, not on {platform}; use auto or xla")
    problem = _find_problem()
    if problem is None:
        return Kernels("cpu", platform, max(1, _cores() // devices))
    if name == "cpu":
        raise ValueError(f"kernels 'cpu' cannot be used: {problem}")
    _warn(problem)
    return Kernels("xla", platform)


def _choose_gpu(name: str, device: Any) -> Kernels:
    """Of each operation the implementations of the set that run here and pass their check."""
    # A table that cannot be read should say so now, not where a program is traced.
    for operation in SETS[name]:
        importlib.import_module(f"pallas_kernels.{operation}.config").load_table()
    base = Kernels("xla", "gpu", capability=_capability(device), device_kind=device.device_kind)
    if cores := getattr(device, "core_count", None):
        base = dataclasses.replace(base, multiprocessors=cores)
    chosen, own = [], OWN.get(name)
    for operation, candidates in SETS[name].items():
        for candidate in candidates:
            obstacle = find_obstacle(candidate, base.capability)
            problem = obstacle or find_failure(operation, candidate, base, device)
            if problem is None:
                chosen.append((operation, candidate))
            elif candidate == own:
                raise ValueError(f"kernels {name!r} cannot be used: {problem}")
            elif obstacle is None:
                _warn_of_failure(operation, candidate, problem)
    if not chosen:
        return base
    if own is None:
        _, first = chosen[0]
        name = next(named for named, implementation in OWN.items() if implementation == first)
    return dataclasses.replace(base, name=name, implementations=tuple(chosen), own=own)


def _capability(device: Any) -> Capability | None:
    """CUDA's compute capability; other makers' GPUs have names instead ("gfx942")."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def find_obstacle(implementation: str, capability: Capability | None) -> str | None:
    """Why an implementation is none for a GPU or for this installation, or None."""
    needs = NEEDS[implementation]
    if capability is None:
        return "they are for NVIDIA GPUs, and this is none"
    if capability < needs.lowest or (needs.below is not None and capability >= needs.below):
        reach = f"of compute capability {_dotted(needs.lowest)}"
        reach += f" to below {_dotted(needs.below)}" if needs.below else " or newer"
        return f"they are for NVIDIA GPUs {reach}, not {_dotted(capability)}"
    missing = [package for package in needs.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; pip install 'jaxspec-decode[jax-triton]'"
    return None


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


@functools.cache
def find_failure(operation: str, implementation: str, base: Kernels, device: Any) -> str | None:
    """What is wrong with a GPU kernel, or None; found out once per process by running a few tiny calls.

    Args:
      operation: name of its folder.
      implementation: name of its module.
      base: the GPU, or the interpreter.
      device: that it runs on.
    """
    from pallas_kernels.kernel_check import find_kernel_difference

    named = f"{operation} by {implementation}"
    try:
        difference = find_kernel_difference(operation, implementation, base, device)
    # A compiler for another GPU, driver or JAX fails in ways of its own: none of them is a reason not to decode.
    except Exception as error:
        return f"{named} cannot be run ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return None if difference is None else f"{named} fails its check: {difference}"


@functools.cache
def _warn_of_failure(operation: str, implementation: str, problem: str) -> None:
    """Tell once per process that a GPU kernel is not used."""
    logging.getLogger(__name__).warning("a GPU kernel is not used: %s", problem)


@dataclasses.dataclass
class OwnCalls:
    """Whether an implementation that was asked for by name took any call, and the first one that it did not take."""

    taken: bool = False
    refused: str | None = None


# Of this process, by set and operation.
_own_calls: dict[tuple[str, str], OwnCalls] = {}


def _record_call(name: str, operation: str, refused: str | None) -> None:
    """Remember a call; tell once per process that what was asked for by name leaves some to others."""
    calls = _own_calls.setdefault((name, operation), OwnCalls())
    if refused is None:
        calls.taken = True
    elif calls.refused is None:
        calls.refused = refused
        logging.getLogger(__name__).warning(
            "kernels %r were asked for, but do not take %s, and maybe other calls like it", name, refused
        )


def _describe(operands: Sequence[Any]) -> str:
    """Dtypes and shapes of operands that have some; weights in blocks have a format in the dtype's place."""
    kinds = [(getattr(each, "dtype", getattr(each, "format", None)), getattr(each, "shape", None)) for each in operands]
    return ", ".join(f"{kind}{list(shape)}" for kind, shape in kinds if kind is not None and shape)


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
