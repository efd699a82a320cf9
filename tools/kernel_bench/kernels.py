"""Times of each implementation of an operation beside XLA's, against the memory roofline."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from kernel_bench.cases import Case, list_cases
from kernel_bench.device import name_device
from kernel_bench.parts import describe_error
from kernel_bench.timing import Function, time_calls
from pallas_kernels import registry, selection
from pallas_kernels.registry import Kernels

# What a program says where it calls a kernel: in Pallas' Triton dialect, in Mosaic, through jax-triton.
KERNEL_CALLS = ("pallas_call", "mpmd_map", "triton_kernel_call")
# Sets of kernels, and what they call their own implementation of an operation.
SETS = {
    "tree_attention": {"pallas-triton": "triton", "mosaic": "mosaic"},
    "linear": {"pallas-triton": "triton"},
    "swiglu": {"jax-triton": "jax_triton"},
}


def measure_operation(operation: str, smoke: bool = False) -> Iterator[dict[str, Any]]:
    """The cases to be measured, then one row per case: times by implementation, or the error of one that failed."""
    usable, missing = find_implementations(operation, smoke)
    cases = list_cases(operation, smoke)
    yield {
        "name": f"{operation}: implementations", "device": name_device(), "usable": list(usable), "missing": missing,
        "planned": [case.name for case in cases],
    }  # fmt: skip
    for case in cases:
        yield measure_case(case, usable, smoke, list_preferred(case, smoke))


def measure_case(
    case: Case, usable: dict[str, Kernels], smoke: bool = False, preferred: Sequence[str] = ()
) -> dict[str, Any]:
    """A row: sizes, bytes, and by implementation time and launches; what fails is named and leaves the others alone.

    Args:
      case: operation and shape.
      usable: kernels by name.
      smoke: see `measure_operation`.
      preferred: names in the order in which `auto` tries them: the row's "auto" is the first that takes the shape.
    """
    times, errors, refused = {}, {}, set()
    for name, kernels in usable.items():
        try:
            # Fresh copies: the states of those before are used up.
            copies = case.copies(1 if smoke else None)
            function = bind(case.function, kernels)
            if name != "xla" and not calls_kernel(function, *copies[0]):
                errors[name] = "does not take this shape: XLA would be measured"
                refused.add(name)
                continue
            times[name] = time_calls(function, copies, calls=2 if smoke else 20)._asdict()
        except Exception as error:
            errors[name] = describe_error(error)
    return {
        "name": case.name, "operation": case.operation, "model": case.model, "sizes": case.sizes,
        "bytes": case.nbytes, "times": times, "errors": errors,
        "auto": next((name for name in preferred if name not in refused), "xla"),
    }  # fmt: skip


def bind(function: Function, kernels: Kernels) -> Function:
    """The function, traced with `kernels`: a function of its own, so that no trace is shared."""

    def run(operands: Any, state: Any) -> tuple[jax.Array, Any]:
        with registry.using(kernels):
            return function(operands, state)

    return run


def calls_kernel(function: Function, operands: Any, state: Any) -> bool:
    """Whether a function comes to a kernel of ours for these operands."""
    program = str(jax.make_jaxpr(function)(operands, state))
    return any(word in program for word in KERNEL_CALLS)


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
