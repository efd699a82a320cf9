"""The choice of kernels for a mesh: by name, by what runs on its devices, and by what passes a numerical check.

`choose` checks every implementation once per process before it uses it: `self_check` runs the native CPU library, and
`kernel_check` runs one GPU kernel. An implementation that fails is replaced by the next one, in the end by XLA.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KERNEL_NAMES
from pallas_kernels.native import library
from pallas_kernels.registry import Capability, Kernels, using

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of an implementation of GPU kernels.

    Attributes:
      lowest: lowest compute capability.
      below: first compute capability that it does not run on, or None.
      packages: packages that must be installed beside JAX.
    """

    lowest: Capability
    below: Capability | None = None
    packages: tuple[str, ...] = ()


# Only Hopper has the matrix instructions (wgmma) that Mosaic's attention uses.
NEEDS = {
    "triton": Needs(AMPERE),
    "mosaic": Needs(HOPPER, below=BLACKWELL),
    "jax_triton": Needs(AMPERE, packages=("jax_triton", "triton")),
}

# The implementation that each set is named after. It must work where users ask for the set by name.
OWN = {"pallas-triton": "triton", "mosaic": "mosaic", "jax-triton": "jax_triton", "mosaic-tpu": "mosaic_tpu"}
# The implementations of each set by operation; "linear" is that of weights in planes. "auto" has those alone that were
# measured on a device (docs/results/gpu-h100.md), and takes for each call the one that is fastest there. No SwiGLU is:
# XLA's own fusion runs at the memory's speed. Kernels that no device has run are in "pallas-triton" alone.
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "auto": {"tree_attention": ("triton", "mosaic")},
    "pallas-triton": dict.fromkeys(("tree_attention", "linear", "move_rows", "add_norm"), ("triton",)),
    "mosaic": {"tree_attention": ("mosaic",), "linear_sum": ("mosaic",)},
    "jax-triton": {"tree_attention": ("triton",), "swiglu": ("jax_triton",)},
}
# Operations with tables of tuned block sizes.
TUNED = ("tree_attention", "linear")


def choose(name: str, platform: str, devices: int = 1, device: Any = None) -> Kernels:
    """Resolve a name for a mesh of `devices` devices of one platform, which share the machine's cores.

    Args:
      name: one of `KERNEL_NAMES`.
        "xla": no kernels. "cpu": the native library. "pallas-triton": all Pallas kernels for NVIDIA GPUs from Ampere
        on, also those that no device has run yet. "mosaic": for Hopper, attention, and products that are added up over
        several GPUs in one kernel. "jax-triton": SwiGLU through jax-triton, which is an extra, and the attention of
        "pallas-triton". "mosaic-tpu": attention for TPUs, which no TPU has run yet. Products of
        packed weights for TPUs are in "auto" too.
        "auto": the fastest that was measured and works here. An implementation is skipped where it is not installed,
        does not run on the device or fails its check. The next one takes its place, in the end XLA, which also runs the
        calls whose shapes an implementation does not take. One warning per process names what should have worked.
      platform: platform of the devices.
      devices: number of devices.
      device: one of them, for GPU kernels; None takes JAX's first GPU.

    Raises:
      ValueError: the name is unknown; the kernels cannot run here, and why; or a table of tuned block sizes cannot be
        read.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"kernels {name!r} are not known; use {', '.join(KERNEL_NAMES)}")
    if name == "auto" and platform not in ("cpu", "gpu", "tpu"):
        warn_once(f"there are no kernels for platform {platform!r}: XLA runs all operations")
    if name == "xla" or (name == "auto" and platform not in ("cpu", "gpu", "tpu")):
        return Kernels("xla", platform)
    if name == "cpu" or (name == "auto" and platform == "cpu"):
        return _choose_native(name, platform, devices)
    made_for = "tpu" if name == "mosaic-tpu" else "gpu"
    if name != "auto" and platform != made_for:
        kind = {"tpu": "TPUs", "gpu": "NVIDIA GPUs"}[made_for]
        raise ValueError(f"kernels {name!r} run on {kind}, not on {platform}; use auto or xla")
    if platform == "tpu":
        return _choose_tpu(name, device if device is not None else jax.local_devices(backend="tpu")[0])
    return _choose_gpu(name, device if device is not None else jax.local_devices(backend="gpu")[0], devices)


def make_exact(kernels: Kernels, device: Any) -> Kernels:
    """The same kernels with exact numerics (`exact_rows.py`); on a GPU with those for it that pass a check."""
    if kernels.native:
        return kernels  # exact as they are
    found = dict.fromkeys(kernels.implementations)
    if kernels.platform == "gpu":
        for one in (("linear", "triton"), ("tree_attention", "triton"), ("add_norm", "triton")):
            problem = find_obstacle("triton", kernels.capability) or find_failure(*one, describe_gpu(device), device)
            problem = problem or find_exact_failure(one, kernels, device)
            found.pop(one, None)
            if problem is None:
                found[one] = None
            elif kernels.capability is not None:
                warn_once(f"exact numerics are left to XLA: {problem}")
    return dataclasses.replace(kernels, exact=True, implementations=tuple(found))


def find_exact_failure(one: tuple[str, str], kernels: Kernels, device: Any) -> str | None:
    """The fault of the exact form of an operation's kernel, or None: it is compared with XLA's, for a small call."""
    from pallas_kernels.linear import exact as linear
    from pallas_kernels.tree_attention import exact as attention

    random, small = np.random.default_rng(0), jnp.bfloat16
    qkv, angles = random.standard_normal((9, 2, 4, 64), np.float32), np.full((9, 32), 0.5**0.5, np.float32)
    cache, position = np.zeros((2, 320, 64)).astype(small), np.arange(250, 259, dtype=np.int32)
    weight = random.standard_normal((96, 512)).astype(small)
    calls = {
        "linear": (linear.linear, (random.standard_normal((9, 512), np.float32), weight)),
        "tree_attention": (
            functools.partial(attention.tree_attention, offset=None, sliding_window=None),
            (qkv, angles, angles, cache, cache, np.int32(250), np.tril(np.ones((9, 9), bool)), position),
        ),
    }  # fmt: skip
    if one[0] not in calls:
        return None
    function, operands = calls[one[0]]
    results = []
    try:
        for implementations in ((), (one,)):
            exact = dataclasses.replace(kernels, exact=True, implementations=implementations)
            with using(exact), jax.default_device(device):
                results.append(jax.tree.leaves(jax.jit(lambda *given: function(*given))(*operands))[0])
    except Exception as error:  # as in `find_failure`
        return f"exact {one[0]} cannot be run ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    close = np.allclose(*(np.asarray(result, np.float32) for result in results), atol=2e-2, rtol=2e-2)
    return None if close else f"exact {one[0]} fails its check"


def _choose_native(name: str, platform: str, devices: int) -> Kernels:
    if platform != "cpu":
        raise ValueError(f"kernels 'cpu' run on CPU devices, not on {platform}; use auto or xla")
    problem = find_native_problem()
    if problem is None:
        return Kernels("cpu", platform, max(1, count_cores() // devices))
    if name == "cpu":
        raise ValueError(f"kernels 'cpu' cannot be used: {problem}")
    warn_once(f"no native CPU kernels, decoding goes through XLA: {problem}")
    return Kernels("xla", platform)


def _choose_gpu(name: str, device: Any, devices: int) -> Kernels:
    """The implementations of a set that run on a GPU and pass their check."""
    # A table that cannot be read gives its error now, not while a program is traced.
    for operation in TUNED:
        importlib.import_module(f"pallas_kernels.{operation}.config").load_table()
    base = describe_gpu(device)
    chosen, own = [], OWN.get(name)
    for operation, candidates in SETS[name].items():
        for candidate in candidates:
            # JAX gives kernels the memory of devices 0, 1, ... of a process in that order (0.10). So a draft on devices
            # after the target's has XLA's all-reduces.
            if operation == "linear_sum" and (devices == 1 or device.id != 0 or jax.process_count() > 1):
                continue
            obstacle = find_obstacle(candidate, base.capability)
            problem = obstacle or find_failure(operation, candidate, base, device)
            if problem is None:
                chosen.append((operation, candidate))
            elif candidate == own:
                raise ValueError(f"kernels {name!r} cannot be used: {problem}")
            elif obstacle is None:
                warn_once(f"a GPU kernel is not used: {problem}")
    if not chosen:
        return base
    if own is None:
        # By what most calls get.
        _, first = chosen[0]
        name = next(named for named, implementation in OWN.items() if implementation == first)
    return dataclasses.replace(base, name=name, implementations=tuple(chosen), automatic=own is None, own=own)


def _choose_tpu(name: str, device: Any) -> Kernels:
    """By itself the product of packed weights alone, which XLA cannot run without writing their numbers."""
    base, own = Kernels("xla", "tpu", device_kind=device.device_kind), OWN.get(name)
    wanted = [("linear", "mosaic_tpu"), *([] if own is None else [("tree_attention", own)])]
    problems = {one: find_failure(*one, base, device) for one in wanted}
    for problem in filter(None, problems.values()):
        if own is not None:
            raise ValueError(f"kernels {name!r} cannot be used: {problem}")
        warn_once(f"packed weights cannot be used: {problem}")
    passed = tuple(one for one, problem in problems.items() if problem is None)
    return dataclasses.replace(base, name=name if own else "xla", implementations=passed, own=own)


def describe_gpu(device: Any) -> Kernels:
    """A GPU without kernels."""
    base = Kernels("xla", "gpu", capability=_capability(device), device_kind=device.device_kind)
    cores = getattr(device, "core_count", None)
    return dataclasses.replace(base, multiprocessors=cores) if cores else base


def _capability(device: Any) -> Capability | None:
    """CUDA's compute capability. GPUs of other makers have names instead ("gfx942")."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def find_obstacle(implementation: str, capability: Capability | None) -> str | None:
    """Why an implementation is not made for a GPU, or is not installed; None where neither is the case."""
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
    """The fault of a GPU kernel, or None. A few tiny calls find it, once per process.

    Args:
      operation: name of its folder.
      implementation: name of its module.
      base: describes the GPU, or the interpreter.
      device: device that the calls run on.
    """
    # Imported where it is needed: the checks import numpy references that a program on XLA does without.
    from pallas_kernels.kernel_check import find_kernel_difference

    named = f"{operation} by {implementation}"
    try:
        difference = find_kernel_difference(operation, implementation, base, device)
    # A compiler for another GPU, driver or JAX may raise anything. Decoding goes on without the kernel.
    except Exception as error:
        return f"{named} cannot be run ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return None if difference is None else f"{named} fails its check: {difference}"


@functools.cache
def find_native_problem() -> str | None:
    """The fault of the native CPU library, or None. It is looked for once per process."""
    found = library.load()
    if found.problem is not None:
        return found.problem
    from pallas_kernels.self_check import find_difference

    try:
        difference = find_difference()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # The library was built from other sources: its operations take other operands or attributes.
        reason = str(error).partition("\n")[0]
        return f"the {found.level} library cannot be run ({reason}); {library.REINSTALL}"
    return None if difference is None else f"the {found.level} library fails its check: {difference}"


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, the same one once per process."""
    logging.getLogger(__name__).warning("%s", message)


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
