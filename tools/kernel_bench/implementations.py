"""The implementations of an operation that this device can run."""

import dataclasses

import jax

from kernel_bench.cases import Case
from pallas_kernels import selection
from pallas_kernels.registry import Kernels

# Sets of kernels, and what they call their own implementation of an operation.
SETS = {
    "tree_attention": {"pallas-triton": "triton", "mosaic": "mosaic"},
    "linear": {"pallas-triton": "triton"},
    "swiglu": {"jax-triton": "jax_triton"},
}


def find_implementations(operation: str, smoke: bool = False) -> tuple[dict[str, Kernels], dict[str, str]]:
    """Kernels by name, XLA's first, and for the names that cannot be used here the reason.

    Args:
      operation: name of its folder.
      smoke: Pallas' interpreter stands in for a GPU.
    """
    if smoke:
        if "pallas-triton" not in SETS[operation]:
            return {"xla": Kernels("xla", jax.default_backend())}, {}
        interpreted = Kernels("smoke", "gpu", implementations=((operation, "triton"),), interpret=True)
        return {"xla": Kernels("xla", jax.default_backend()), "pallas-triton": interpreted}, {}
    device = jax.devices()[0]
    usable, missing = {"xla": Kernels("xla", device.platform)}, {}
    for name, implementation in SETS[operation].items():
        try:
            kernels = selection.choose(name, device.platform, device=device)
        except ValueError as error:
            missing[name] = str(error)
            continue
        # The name alone: what it does not take should be seen, not left to another.
        if implementation in kernels.candidates(operation):
            usable[name] = dataclasses.replace(kernels, implementations=((operation, implementation),))
        else:
            missing[name] = f"{operation} by {implementation} fails its self-check; the log says how"
    return usable, missing


def list_preferred(case: Case, smoke: bool = False) -> list[str]:
    """The names in the order in which `auto` tries their implementations for a case here."""
    if smoke:
        return [name for name in SETS[case.operation] if name == "pallas-triton"]
    device = jax.devices()[0]
    names = {implementation: name for name, implementation in SETS[case.operation].items()}
    kernels = selection.choose("auto", device.platform, device=device)
    return [names[each] for each in kernels.order(case.operation, *case.operands[:3], *case.state)]
