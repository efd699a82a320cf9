"""A digest of everything that shapes a compiled program, without tracing it.

A program is what a function computes, and a function is its code and what it closes over. The code is known by the
files of both packages; closures are walked, value by value. What cannot be told apart for sure has no digest, and is
traced as if there were no store.
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
from jaxspec.version import __version__

PACKAGES = ("jaxspec", "pallas_kernels")
KNOWN = (*PACKAGES, "jax", "jaxlib", "numpy", "functools", "builtins", "ml_dtypes", "flax")
SOURCES = (".py", ".cc", ".h", ".so", ".json", ".toml")
# What JAX was told that changes no program.
IRRELEVANT = ("cache", "log", "dump", "traceback", "pprint", "profil")
_LOADED = time.time()  # files that are younger may differ from the code that runs


class UnknownError(Exception):
    """A value that has no digest."""


def program_digest(name: str, function: Any, devices: tuple[Any, ...], rest: Any) -> str:
    """The digest of a program: its function, and whatever else shapes it; raises `UnknownError`."""
    digest = hashlib.sha256(surroundings().encode())
    for device in devices:
        digest.update(f"{device.device_kind} {device.client.platform_version}".encode())
    digest.update(repr(_settings()).encode())
    _feed(digest, (name, function, rest))
    return digest.hexdigest()


def lowered_digest(lowered: Any, devices: tuple[Any, ...], rest: Any) -> str:
    """The digest of a lowered program: its text, and what shapes its compilation; raises `UnknownError`."""
    try:
        # The text has no arguments that the program does not use: which ones it lacks is told here.
        used = sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError) as error:
        raise UnknownError(f"this JAX does not say which arguments a program uses: {error}") from error
    shapes = [(leaf.shape, str(leaf.dtype), leaf.donated) for leaf in jax.tree.leaves(lowered.args_info)]
    digest = hashlib.sha256(repr((_machine(), _values(), rest, used, shapes)).encode())
    for device in devices:
        digest.update(repr((device.device_kind, device.client.platform_version, *_describe_device(device))).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()


@functools.cache
def surroundings() -> str:
    """Versions, files, processor, environment: what does not change while a process runs."""
    files = []
    for package in (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent):
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
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


def _values() -> Any:
    """JAX's settings by name; raises `UnknownError` where this JAX does not say."""
    try:
        from jax._src import config

        values = {name: value for name, value in config.config.values.items() if not _is_irrelevant(name)}
        return sorted(values.items(), key=lambda item: item[0])
    except (ImportError, AttributeError) as error:
        raise UnknownError(str(error)) from error


def _settings() -> Any:
    """JAX's settings, and those of this thread alone; raises `UnknownError` where this JAX does not say."""
    values = _values()
    try:
        from jax._src import config

        return values, _describe(config.trace_context())
    except (ImportError, AttributeError) as error:
        raise UnknownError(str(error)) from error


def _describe(value: Any) -> Any:
    """A value in words; one that shows nothing but its address is described by its attributes."""
    if isinstance(value, tuple):
        return tuple(map(_describe, value))
    if type(value).__repr__ is not object.__repr__:
        return repr(value)
    names = {*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())} - {"__weakref__", "__dict__"}
    if not names:
        raise UnknownError(type(value).__qualname__)
    return type(value).__qualname__, [(name, _describe(getattr(value, name))) for name in sorted(names)]


def _is_irrelevant(name: str) -> bool:
    return any(word in name for word in IRRELEVANT)


def _feed(digest: Any, value: Any) -> None:
    """Add a value and all that it consists of."""

    def add(*words: Any) -> None:
        digest.update(repr(words).encode())

    def add_all(values: Any) -> None:
        for one in values:
            _feed(digest, one)

    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        add(kind.__name__, value)
    elif isinstance(value, enum.Enum):
        add("enum", _name(kind), value.name)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise UnknownError("an array of objects")
        add("array", str(array.dtype), array.shape, array.tobytes())
    elif isinstance(value, np.dtype):
        add("dtype", str(value))
    elif isinstance(value, jax.Device):
        add(*_describe_device(value))
    elif isinstance(value, jax.ShapeDtypeStruct):
        digest.update(_describe_shape(value.shape, value.dtype, value.sharding))
    elif isinstance(value, NamedSharding):
        digest.update(_describe_sharding(value))
    elif isinstance(value, types.FunctionType):
        _feed_function(digest, value)
    elif isinstance(value, types.MethodType):
        add_all((value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        add_all(("partial", value.func, value.args, value.keywords))
    elif isinstance(value, type):
        add("type", _name(value))
    elif dataclasses.is_dataclass(value):
        add("dataclass", _name(kind))
        add_all((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, tuple | list):
        add("sequence", _name(kind), len(value))
        add_all(value)
    elif isinstance(value, frozenset):
        add("frozenset", len(value))
        add_all(sorted(value, key=repr))
    elif isinstance(value, dict):
        add("dict", len(value))
        add_all(item for item in value.items())
    else:
        raise UnknownError(_name(kind))


# A model has hundreds of arrays of few kinds, and each program takes them all.
@functools.lru_cache(maxsize=4096)
def _describe_shape(shape: tuple[int, ...], dtype: Any, sharding: Any) -> bytes:
    described = _describe_sharding(sharding) if isinstance(sharding, NamedSharding) else None
    if described is None and sharding is not None:
        raise UnknownError(type(sharding).__qualname__)
    return repr(("shape", shape, str(dtype), described)).encode()


@functools.lru_cache(maxsize=256)
def _describe_sharding(sharding: NamedSharding) -> bytes:
    devices = np.asarray(sharding.mesh.devices)
    words = sharding.mesh.axis_names, devices.shape, str(sharding.mesh.axis_types), str(sharding.spec)
    return repr(("sharding", *words, *map(_describe_device, devices.flat))).encode()


def _describe_device(device: Any) -> tuple[Any, ...]:
    return "device", device.platform, device.id, device.process_index


def _feed_function(digest: Any, function: types.FunctionType) -> None:
    """Add a function: where it is defined, and what it closes over."""
    code = function.__code__
    digest.update(repr(("function", _name(function), code.co_firstlineno, code.co_code, code.co_names)).encode())
    if not code.co_filename.startswith(_ROOTS) and not _name(function).startswith(("jax.", "jax._src.")):
        raise UnknownError(f"{code.co_filename} is no part of the packages")
    _feed(digest, function.__defaults__)
    _feed(digest, function.__kwdefaults__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        digest.update(name.encode())
        try:
            _feed(digest, cell.cell_contents)
        except ValueError as error:
            raise UnknownError(f"{name} is empty") from error


_ROOTS = tuple(str(Path(str(root)).parent) for root in (sys.modules["jaxspec"].__file__, pallas_kernels.__file__))


def _name(value: Any) -> str:
    """Module and name of a type or function of a package whose files or version are known."""
    module = value.__module__ or ""
    if module.partition(".")[0] not in KNOWN:
        raise UnknownError(f"{module}.{value.__qualname__}")
    return f"{module}.{value.__qualname__}"
