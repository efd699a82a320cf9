"""Loading the native CPU operations, and calling them from JAX.

`build.py` compiles one library for each instruction set, all from the same sources.
"""

import ctypes
import dataclasses
import functools
import importlib.machinery
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TARGET_PREFIX = "jaxspec_"
TARGETS = (
    "linear", "swiglu", "take_rows", "rms_norm", "add_norm", "rope_tables", "tree_attention", "experts",
    "choose_experts", "chosen_experts", "row_top", "delta_rule", "delta_fold", "short_conv",
)  # fmt: skip

# From the best to the one that every machine can run.
LEVELS = ("amx", "vnni", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "portable")

REINSTALL = "reinstall jaxspec"
BUILD = f"install a C++17 compiler (such as g++) and {REINSTALL}"


@dataclasses.dataclass(frozen=True)
class Library:
    """The result of `load`.

    Attributes:
      level: instruction set of the library in use, or None.
      problem: why there is none, or None.
      functions: the library itself, or None.
    """

    level: str | None
    problem: str | None
    functions: ctypes.CDLL | None = None


@functools.cache
def load() -> Library:
    """Load the best library that this machine can run, and register its operations with XLA, once per process."""
    paths = find()
    if not paths:
        return Library(None, f"they were not built when jaxspec was installed; {BUILD}")
    try:
        if levels := supported_levels(paths):
            return _register(levels[0], paths[levels[0]])
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        return Library(None, f"the library cannot be loaded ({error}); {REINSTALL}")
    return Library(None, f"none was built for this machine; {BUILD}")


def find() -> dict[str, Path]:
    """The libraries beside this file, by level."""
    folder = Path(__file__).parent
    found = {}
    for level in LEVELS:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = folder / f"cpu_{level}{suffix}"
            if path.is_file():
                found.setdefault(level, path)
    return found


def call(target: str, out: Any, *operands: Any, aliases: dict[int, int] | None = None, **attributes: Any) -> Any:
    """Call an operation of the native library.

    Args:
      target: name of the operation, without the prefix.
      out: `jax.ShapeDtypeStruct`s of the results.
      operands: arrays.
      aliases: number of an operand -> number of the result that replaces it in place.
      attributes: numpy scalars, booleans and strings.
    """
    function = jax.ffi.ffi_call(TARGET_PREFIX + target, out, vmap_method="sequential", input_output_aliases=aliases)
    return function(*operands, **attributes)


def pack(packed: str, rows: np.ndarray, outputs: int, blocks: int, out: np.ndarray) -> int:
    """Pack `outputs` rows of `blocks` blocks each into `out`; 1, or 0 if `packed` is no packed format."""
    functions = load().functions
    if functions is None:
        return 0
    count = functions.jaxspec_pack
    count.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    return count(packed.encode(), rows.ctypes.data, outputs, blocks, out.ctypes.data)


def row_count(active_rows: jax.Array | None, x: jax.Array) -> jax.Array:
    """The int32 operand that tells an operation how many rows of `x` to compute; None stands for all."""
    return jnp.int32(x.shape[0]) if active_rows is None else active_rows.astype(jnp.int32)


def supported_levels(paths: dict[str, Path]) -> list[str]:
    """Those of `paths`, as `find` gives them, whose level this machine runs, the best one first."""
    # Every library has this function, which uses no special instruction.
    levels = ctypes.CDLL(str(paths.get("portable", next(iter(paths.values()))))).jaxspec_levels
    levels.restype = ctypes.c_char_p
    return [level for level in levels().decode().split() if level in paths]


def _register(level: str, path: Path) -> Library:
    library = ctypes.CDLL(str(path))
    # The backend starts first. Else JAX registers the operations when it starts one, and an operation that it refuses
    # then takes the CPU backend away for good.
    jax.local_devices(backend="cpu")
    for target in TARGETS:
        handler = getattr(library, TARGET_PREFIX + target)
        jax.ffi.register_ffi_target(TARGET_PREFIX + target, jax.ffi.pycapsule(handler), platform="cpu")
    return Library(level, None, library)
