"""Compiling the native CPU operations: one library for each instruction set, all from the same sources.

    python pallas_kernels/native/build.py [folder]     compile what is not up to date, beside this file by default

`setup.py` calls it too. It needs nothing but the standard library, a C++17 compiler and JAX's headers. Objects are kept
in the user's cache under a digest of all that makes them: sources, headers, options and compiler. So nothing is
compiled twice on a machine, whichever clone asks.

  JAXSPEC_BUILD_LEVELS   all, or names with commas; default: portable and the best that this machine runs
  JAXSPEC_NATIVE_CACHE   folder of the objects; empty: none are kept
  CXX                    compiler; default: c++, g++ or clang++, the first that is there
"""

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2]
# Options of the instruction sets, by kind of machine. `level.cc` knows those that a machine runs.
ALL_LEVELS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "portable": [],
        "avx2": _AVX2,
        "avxvnni": [*_AVX2, "-mavxvnni"],
        "avx512": _AVX512,
        "vnni": [*_AVX512, "-mavx512vnni"],
        "amx": [*_AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
    },
    "aarch64": {
        "portable": [],
        "dotprod": ["-march=armv8.2-a+dotprod"],
        "i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    },
}
_MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
LEVELS = ALL_LEVELS.get(_MACHINE, {"portable": []})
# Levels of which only packed products have code of their own; their other objects are those of the level named.
PRODUCTS_ONLY = {"amx": "vnni"}
# Products and sums are fused where the sources say so and nowhere else: results must not depend on the compiler.
FLAGS = ["-std=c++17", "-g0", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
CACHE_BYTES = 256 << 20


class BuildError(Exception):
    """The libraries cannot be built, and why, in one line."""


def build(folder: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Compile the libraries into `folder`; their paths. Files are compiled side by side.

    Raises:
      BuildError: there is no compiler, no headers, a source does not compile, or JAXSPEC_BUILD_LEVELS is wrong.
    """
    requested = os.environ.get("JAXSPEC_BUILD_LEVELS", "")
    unknown = [name for name in requested.split(",") if requested not in ("", "all") and name not in LEVELS]
    if unknown:
        raise BuildError(f"JAXSPEC_BUILD_LEVELS: {unknown[0]!r} is not one of all, {', '.join(LEVELS)}")
    compiler, include = _find_compiler(), _find_headers()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as scratch:
        levels = _choose_levels(requested, compiler, Path(scratch))
        units = _units(levels)
        objects = {unit: _object_path(unit, [*compiler, version], include, Path(scratch)) for unit in units}
        libraries = [folder / f"cpu_{level}{SUFFIX}" for level in levels]
        parts = {level: [objects[unit] for unit in _units([level])] for level in levels}
        pairs = list(zip(levels, libraries, strict=True))
        stale = [level for level, library in pairs if not _is_current(library, parts[level])]
        needed = {path for level in stale for path in parts[level]}
        missing = [unit for unit in units if objects[unit] in needed and not objects[unit].is_file()]
        done = 0

        def compile_unit(unit: tuple[Path, str]) -> None:
            nonlocal done
            source, level = unit
            command = [*compiler, *_flags(level), "-isystem", str(include), "-c", str(source)]
            _write_atomically(objects[unit], lambda path: _run([*command, "-o", str(path)], source))
            done += 1
            say(f"compile {done} of {len(missing)}: {source.relative_to(ROOT)} ({level or 'all levels'})")

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            # Large files first, so that the last ones are short.
            list(pool.map(compile_unit, sorted(missing, key=lambda unit: -_weight(unit))))
        for level, library in pairs:
            if level in stale:
                shared = ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
                command = [*compiler, *shared, "-pthread", *map(str, parts[level]), "-o"]
                _write_atomically(library, lambda path, command=command: _run([*command, str(path)], path))
                _stamp_of(library).write_text(_stamp(parts[level]))
        _keep_bounded(objects.values())
    return libraries


def _units(levels: list[str]) -> list[tuple[Path, str]]:
    """Sources and the level that each is compiled for; "" stands for objects that all libraries share."""
    shared = sorted((ROOT / "native").glob("*.cc"))
    kernels = sorted(path for path in ROOT.glob("*/*.cc") if path.name != "cpu.cc" and path not in shared)
    units = [(path, _object_level(path, level)) for level in levels for path in kernels]
    return [(path, "") for path in shared] + list(dict.fromkeys(units))


def _object_level(source: Path, level: str) -> str:
    """The level that a library's object is compiled for: its own, or one whose code is the same."""
    has_products = any(path.name == "packed_product.h" for path in _includes(source, {source}))
    return level if has_products else PRODUCTS_ONLY.get(level, level)


def _flags(level: str) -> list[str]:
    # Shared objects hold no loop over numbers.
    return [*FLAGS, *(["-O3", *LEVELS[level]] if level else ["-O1"])]


def _weight(unit: tuple[Path, str]) -> int:
    """Order of compiling, the longest first: the handlers with XLA's headers, then the products."""
    source, level = unit
    return 3 if source.name == "handlers.cc" else 2 if source.name.startswith("packed") else 1 if level else 0


def _find_compiler() -> list[str]:
    own = shlex.split(os.environ.get("CXX", ""))
    for command in [own] if own else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"there is no C++ compiler{f' {own[0]}' if own else ''} (install one, such as g++)")


def _find_headers() -> Path:
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        raise BuildError("jaxlib, which has XLA's headers, is not installed")
    return Path(jaxlib.origin).parent / "include"


def _choose_levels(requested: str, compiler: list[str], scratch: Path) -> list[str]:
    if requested:
        if requested != "all":
            return [name for name in LEVELS if name in requested.split(",")]
        return [name for name in LEVELS if _knows(compiler, LEVELS[name])]
    # The library's own rule (`level.cc`) says what this machine runs.
    program = scratch / "level"
    main = '#include "level.cc"\n#include <cstdio>\nint main() { std::puts(jaxspec_levels()); }\n'
    (scratch / "level_main.cc").write_text(main)
    _run([*compiler, f"-I{ROOT / 'native'}", str(scratch / "level_main.cc"), "-o", str(program)], program)
    try:
        best = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        best = "portable"  # compiled for another machine
    return list(dict.fromkeys(["portable", best]))


def _knows(compiler: list[str], options: list[str]) -> bool:
    command = [*compiler, *options, "-fsyntax-only", "-xc++", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True).returncode == 0


def _run(command: list[str], target: Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if "error" in line] or ended.stderr.splitlines() or ["?"]
        raise BuildError(f"{target.name} does not compile: {errors[0]}")


def _object_path(unit: tuple[Path, str], compiler: list[str], include: Path, scratch: Path) -> Path:
    source, level = unit
    digest = hashlib.sha256("\0".join([*compiler, *_flags(level), source.name]).encode())
    for path in sorted(_includes(source, {source})):
        digest.update(path.name.encode() + path.read_bytes())
    if source.name == "handlers.cc":  # the one source that includes XLA's headers
        for path in sorted((include / "xla/ffi/api").glob("*.h")):
            digest.update(path.read_bytes())
    return (_cache() or scratch) / f"{source.stem}-{level or 'all'}-{digest.hexdigest()[:32]}.o"


def _includes(source: Path, found: set[Path]) -> set[Path]:
    for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
        path = (source.parent / name).resolve()
        if path.is_file() and path not in found:
            _includes(path, found | {path})
            found |= _includes(path, found | {path})
    return found


def _cache() -> Path | None:
    own = os.environ.get("JAXSPEC_NATIVE_CACHE")
    if own is not None:
        return Path(own).absolute() if own else None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / (
        "Library/Caches" if sys.platform == "darwin" else ".cache"
    )
    return Path(home) / "jaxspec/native"


def _stamp_of(library: Path) -> Path:
    return library.with_name(f".{library.name}.objects")


def _stamp(parts: list[Path]) -> str:
    # Names hold the digests of what the objects are made of.
    return hashlib.sha256("\n".join(path.name for path in parts).encode()).hexdigest()


def _is_current(library: Path, parts: list[Path]) -> bool:
    stamp = _stamp_of(library)
    return library.is_file() and stamp.is_file() and stamp.read_text() == _stamp(parts)


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        write(Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)


def _keep_bounded(used: Iterable[Path]) -> None:
    """Drop the objects of the cache that were used longest ago, beyond `CACHE_BYTES`."""
    cache = _cache()
    if cache is None:
        return
    for path in used:
        if path.is_file():
            os.utime(path)
    room = CACHE_BYTES
    for path in sorted(cache.glob("*.o"), key=lambda path: -path.stat().st_mtime):
        room -= path.stat().st_size
        if room < 0:
            path.unlink(missing_ok=True)


def main() -> None:
    """Compile beside this file, or into the folder that is named; one line says why where that is impossible."""
    start = time.monotonic()
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    try:
        libraries = build(folder, lambda line: print(line, flush=True))
    except BuildError as error:
        sys.exit(f"the native kernels are left out, XLA computes the same: {error}")
    print(f"native kernels: {len(libraries)} libraries after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
