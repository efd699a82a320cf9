"""A digest of everything that shapes a compiled program, without tracing it.

A program is what a function computes, and a function is its code and what it closes over. The code is known by the
files of both packages; closures are walked, value by value. Values that cannot be told apart for sure have no digest:
their program is traced as if there were no store.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

import pallas_kernels
from jaxspec import __version__
from jaxspec.files import digest_text

PACKAGES = Path(__file__).parents[2], Path(str(pallas_kernels.__file__)).parent
KNOWN = ("jaxspec", "pallas_kernels", "jax", "jaxlib", "numpy", "functools", "builtins", "ml_dtypes")
SOURCES = (".py", ".cc", ".h", ".so", ".json", ".toml")
# Words in the names of JAX's settings that change no program.
IRRELEVANT = ("cache", "log", "dump", "traceback", "pprint", "profil")
_LOADED = time.time()  # files that are younger may differ from the code that runs


class UnknownError(Exception):
    """A value that has no digest."""


def program_digest(name: str, function: Any, devices: tuple[Any, ...], rest: Any) -> str:
    """The digest of a program: its function, and whatever else shapes it; raises `UnknownError`."""
    kinds = [(device.device_kind, device.client.platform_version) for device in devices]
    return digest_text(repr((surroundings(), kinds, _settings(), describe((name, function, rest)))))


def lowered_digest(lowered: Any, devices: tuple[Any, ...], rest: Any) -> str:
    """The digest of a lowered program: its text, and what shapes its compilation; raises `UnknownError`."""
    try:
        # The text has no arguments that the program does not use: which ones it lacks is told here.
        used = sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError) as error:
        raise UnknownError(f"this JAX does not say which arguments a program uses: {error}") from error
    shapes = [(leaf.shape, str(leaf.dtype), leaf.donated) for leaf in jax.tree.leaves(lowered.args_info)]
    kinds = [(device.device_kind, device.client.platform_version, *_describe_device(device)) for device in devices]
    return digest_text(repr((_machine(), _values(), rest, used, shapes, kinds)) + lowered.as_text())


@functools.cache
def surroundings() -> str:
    """Versions, files, processor, environment: what does not change while a process runs."""
    files = []
    for package in PACKAGES:
        for folder, _, names in os.walk(package):
            for name in sorted(names):
                if name.endswith(SOURCES):
                    found = os.stat(os.path.join(folder, name))
                    if found.st_mtime > _LOADED:
                        raise UnknownError(f"{name} was changed after it was loaded")
                    files.append((folder, name, found.st_size, found.st_mtime_ns))
    return repr((__version__, _machine(), sorted(files)))


def _machine() -> str:
    """Versions of what compiles, processor, environment."""
    versions = [sys.version, np.__version__, jax.__version__, importlib.metadata.version("jaxlib")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = sorted(item for item in os.environ.items() if item[0].startswith(("XLA_", "JAX_", "OMP_", "NPROC")))
    return repr((versions, platform.uname()[4:], _processor(), cores, environment))


def _processor() -> list[str]:
    """The processor's features, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


def _values() -> list[tuple[str, Any]]:
    """JAX's settings by name; raises `UnknownError` where this JAX does not say."""
    try:
        from jax._src import config

        return sorted((k, v) for k, v in config.config.values.items() if not any(word in k for word in IRRELEVANT))
    except (ImportError, AttributeError) as error:
        raise UnknownError(str(error)) from error


def _settings() -> Any:
    """JAX's settings, and those of this thread alone; raises `UnknownError` where this JAX does not say."""
    values = _values()
    try:
        from jax._src import config

        return values, _show(config.trace_context())
    except (ImportError, AttributeError) as error:
        raise UnknownError(str(error)) from error


def _show(value: Any) -> Any:
    """A value in words; one that shows nothing but its address is described by its attributes."""
    if isinstance(value, tuple):
        return tuple(map(_show, value))
    if type(value).__repr__ is not object.__repr__:
        return repr(value)
    names = {*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())} - {"__weakref__", "__dict__"}
    if not names:
        raise UnknownError(type(value).__qualname__)
    return type(value).__qualname__, [(name, _show(getattr(value, name))) for name in sorted(names)]


def describe(value: Any) -> Any:
    """A value and all that it consists of, in words and tuples; raises `UnknownError` where words do not tell all."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return kind.__name__, value
    if isinstance(value, enum.Enum):
        return "enum", _name(kind), value.name
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise UnknownError("an array of objects")
        return "array", str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()
    if isinstance(value, np.dtype):
        return "dtype", str(value)
    if isinstance(value, jax.Device):
        return _describe_device(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return _describe_shape(value.shape, value.dtype, value.sharding)
    if isinstance(value, NamedSharding):
        return _describe_sharding(value)
    if isinstance(value, types.FunctionType):
        return _describe_function(value)
    if isinstance(value, types.MethodType):
        return "method", describe(value.__func__), describe(value.__self__)
    if isinstance(value, functools.partial):
        return "partial", describe((value.func, value.args, value.keywords))
    if isinstance(value, type):
        return "type", _name(value)
    if dataclasses.is_dataclass(value):
        fields = [(field.name, describe(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return "dataclass", _name(kind), fields
    if isinstance(value, tuple | list):
        return "sequence", _name(kind), [describe(one) for one in value]
    if isinstance(value, frozenset):
        return "frozenset", [describe(one) for one in sorted(value, key=repr)]
    if isinstance(value, dict):
        return "dict", [describe(item) for item in value.items()]
    raise UnknownError(_name(kind))


# A model has hundreds of arrays of few kinds, and each program takes them all.
@functools.lru_cache(maxsize=4096)
def _describe_shape(shape: tuple[int, ...], dtype: Any, sharding: Any) -> str:
    described = _describe_sharding(sharding) if isinstance(sharding, NamedSharding) else None
    if described is None and sharding is not None:
        raise UnknownError(type(sharding).__qualname__)
    return repr(("shape", shape, str(dtype), described))


@functools.lru_cache(maxsize=256)
def _describe_sharding(sharding: NamedSharding) -> str:
    devices = np.asarray(sharding.mesh.devices)
    words = sharding.mesh.axis_names, devices.shape, str(sharding.mesh.axis_types), str(sharding.spec)
    return repr(("sharding", *words, *map(_describe_device, devices.flat)))


def _describe_device(device: Any) -> tuple[Any, ...]:
    return "device", device.platform, device.id, device.process_index


def _describe_function(function: types.FunctionType) -> Any:
    """A function: where it is defined, its code, and what it closes over."""
    code, cells = function.__code__, function.__closure__ or ()
    own = code.co_filename.startswith(tuple(map(str, PACKAGES)))
    if not own and not _name(function).startswith(("jax.", "jax._src.")):
        raise UnknownError(f"{code.co_filename} is no part of the packages")
    try:
        closed = tuple((name, cell.cell_contents) for name, cell in zip(code.co_freevars, cells, strict=True))
    except ValueError as error:
        raise UnknownError(f"{_name(function)} closes over nothing yet") from error
    words = "function", _name(function), code.co_firstlineno, code.co_code, code.co_names
    return *words, describe((function.__defaults__, function.__kwdefaults__, closed))


def _name(value: Any) -> str:
    """Module and name of a type or function of a package whose files or version are known."""
    module = value.__module__ or ""
    if module.partition(".")[0] not in KNOWN:
        raise UnknownError(f"{module}.{value.__qualname__}")
    return f"{module}.{value.__qualname__}"
