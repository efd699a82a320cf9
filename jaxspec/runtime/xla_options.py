"""What jaxspec asks of XLA; everything else stays as XLA has it.

`XLA_FLAGS` has the last word: an option that it names is not set here.
"""

import functools
import logging
import os
from typing import Any

import jax

from jaxspec.runtime.mesh import MeshPlan

# By option, its value and why. docs/kernels.md shows the same table.
GPU_OPTIONS = {
    # XLA's own list, and loops and branches: with them a draft's search is one CUDA graph, in which the device itself
    # decides whether to go on. Else the host waits for the device in every turn.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    ),
}
# On CPUs nothing; tests that need no fast programs compile quickly.
CPU_OPTIONS: dict[str, str | bool] = {}


def choose_options(plan: MeshPlan) -> dict[str, Any] | None:
    """Compiler options of programs on a mesh; None where there are none."""
    options: dict[str, Any] = {"gpu": GPU_OPTIONS, "cpu": CPU_OPTIONS}.get(plan.kernels.platform, {})
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}" not in given} or None


def compile_lowered(lowered: Any, plan: MeshPlan) -> Any:
    """Compile what was lowered for a mesh; where this JAX does not know the options, without them, said once."""
    options = choose_options(plan)
    if options is None:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # Options of another version; all other errors come again without them.
        warn_once(f"XLA does not take all options that jaxspec sets, programs may be slower: {str(error)[:200]}")
        return lowered.compile()


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, the same one once per process."""
    logging.getLogger(__name__).warning("%s", message)
