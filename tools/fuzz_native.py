"""Random shapes and lengths against the cores of the native kernels, under sanitizers.

    python tools/fuzz_native.py [--seconds 60] [--levels all] [--sanitizer address] [--first 0]

Builds tests/native/fuzz.cc for each instruction set and runs the same cases with each until the time is over. Ends with
1 at the first that fails; `build/fuzz/<level>-<sanitizer>/<part> NUMBER 1` repeats it. Levels whose products are fused
must give the same bits. A few minutes find what a change may have broken; CI runs a few seconds of it (tests/native).

  levels      best, all that this machine runs, or names: portable, avx2, avxvnni, avx512, vnni, amx
  sanitizer   address (and undefined behaviour), thread, or none, as the kernels are built for use
"""

import argparse
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pallas_kernels.native.build import LEVELS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests/native/fuzz.cc"

# Levels whose products are fused, on an x86 processor.
FUSED = {"avx2", "avxvnni", "avx512", "vnni", "amx"}
FLAGS = ["-std=c++17", "-ffp-contract=off", "-pthread", "-w"]
SANITIZERS = {
    # For short compilation: calls in place of inlined checks, and without two that AddressSanitizer makes superfluous.
    "address": [
        "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=null,object-size",
        "--param=asan-instrumentation-with-call-threshold=0", "-fno-sanitize-recover=all",
    ],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
    "none": ["-O3"],
}  # fmt: skip
# What is compiled together, so that cores share the work. Float32 is what the other formats are compared with.
PARTS = {
    "numbers": ["-DFUZZ_PRODUCTS=Float32,BFloat16,Float16"],
    "blocks": ["-DFUZZ_PRODUCTS=Float32,Q8_0,Q4_1,Q6_K"],
    "more-blocks": ["-DFUZZ_PRODUCTS=Float32,Q4_0,Q5_0,Q4_K"],
    "packed": ["-DFUZZ_PACKED=PackedQ8_0,PackedQ4_1,PackedQ4_K,PackedQ6_K"],
    "more-packed": ["-DFUZZ_PACKED=PackedQ4_0,PackedQ5_0,PackedQ5_K"],
    "attention": ["-DFUZZ_ATTENTION"],
}
# Every loop over weights, and (by rows of weights) every way to read a format, in a third of the time.
QUICK_PARTS = {
    "products": ["-DFUZZ_PRODUCTS=Float32,Q4_1"],
    "packed": ["-DFUZZ_PACKED=PackedQ4_1,PackedQ6_K"],
    "attention": PARTS["attention"],
}

ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",  # containers often forbid what it takes
    "TSAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
CASES_PER_RUN = 100
RUN_SECONDS = 900.0  # a run that takes longer hangs, even on a busy machine


class UnavailableError(Exception):
    """Nothing can be built here, and why."""


class FuzzError(Exception):
    """A case failed, or its program could not be built; what was said about it."""


def main() -> None:
    """Build, run until the time is over, and say how many cases passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--levels", default="all")
    parser.add_argument("--sanitizer", choices=SANITIZERS, default="address")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    try:
        levels = choose_levels(arguments.levels, find_levels(arguments.sanitizer))
        binaries = {}
        for level in levels:
            print(f"building {level}", flush=True)
            folder = ROOT / "build/fuzz" / f"{level}-{arguments.sanitizer}"
            binaries |= {(level, part): path for part, path in build(folder, level, arguments.sanitizer).items()}
        cases = fuzz(binaries, arguments.first, arguments.seconds)
    except (UnavailableError, FuzzError) as error:
        sys.exit(str(error))
    print(f"{cases} cases of {', '.join(PARTS)}: no findings at {', '.join(levels)} ({arguments.sanitizer})")


def find_levels(sanitizer: str) -> list[str]:
    """The levels that this machine runs, the best one first.

    Raises:
      UnavailableError: there is no compiler, or programs that it builds with this sanitizer do not run.
    """
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise UnavailableError(f"no C++ compiler: {compiler[0]} is not found")
    program = '#include "pallas_kernels/native/level.cc"\n#include <cstdio>\nint main() { puts(jaxspec_levels()); }\n'
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "level"
        command = [*compiler, *FLAGS, *SANITIZERS[sanitizer], f"-I{ROOT}", "-xc++", "-", "-o", str(binary)]
        found = subprocess.run(command, input=program, capture_output=True, text=True)
        if found.returncode == 0:
            found = subprocess.run([binary], capture_output=True, text=True, env=_environment())
    if found.returncode:
        reason = found.stderr.strip()[-500:]
        raise UnavailableError(f"{compiler[0]} cannot build and run with the {sanitizer} sanitizer: {reason}")
    return found.stdout.split()


def choose_levels(names: str, supported: list[str]) -> list[str]:
    """The levels that `names` stands for, of those that run.

    Raises:
      UnavailableError: this machine does not run one of them, or there is no such level.
    """
    chosen = {"all": supported, "best": supported[:1]}.get(names, names.split(","))
    for level in chosen:
        if level not in supported:
            raise UnavailableError(f"level {level!r}: this machine runs {', '.join(supported)}")
    return chosen


def build(folder: Path, level: str, sanitizer: str, parts: dict[str, list[str]] | None = None) -> dict[str, Path]:
    """Compile the parts (default: all), as many at a time as there are cores; the programs by part.

    Raises:
      FuzzError: one does not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def compile_part(item: tuple[str, list[str]]) -> tuple[str, Path]:
        name, defines = item
        command = [*_compiler(), *FLAGS, *SANITIZERS[sanitizer], *LEVELS[level], *defines, SOURCE, "-o", folder / name]
        built = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if built.returncode:
            raise FuzzError(f"{name} does not compile for {level}\n{built.stderr}")
        return name, folder / name

    with ThreadPoolExecutor(_cores()) as pool:
        return dict(pool.map(compile_part, (parts or PARTS).items()))


def run(binary: Path, first: int, cases: int) -> str:
    """Run the cases from `first` on; a digest of their results.

    Raises:
      FuzzError: one fails, or nothing comes of it.
    """
    try:
        command = [str(binary), str(first), str(cases)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise FuzzError(f"{binary} {first} {cases} takes more than {RUN_SECONDS:.0f} s") from error
    if done.returncode:
        raise FuzzError(f"{binary} {first} {cases} ends with {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def fuzz(binaries: dict[tuple[str, str], Path], first: int, seconds: float) -> int:
    """Run the same cases with every program until the time is over; how many cases passed.

    Raises:
      FuzzError: one failed, or levels that must agree do not.
    """
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(_cores()) as pool:
        for start in itertools.count(first, CASES_PER_RUN):
            if time.monotonic() > end:
                return start - first
            digests = pool.map(run, binaries.values(), itertools.repeat(start), itertools.repeat(CASES_PER_RUN))
            _check_digests(zip(binaries, digests, strict=True), start)
    raise AssertionError("unreachable")


def _check_digests(digests: Iterable[tuple[tuple[str, str], str]], start: int) -> None:
    expected: dict[str, str] = {}
    for (level, part), digest in digests:
        if level in FUSED and expected.setdefault(part, digest) != digest:
            raise FuzzError(f"{part}: results of cases {start} to {start + CASES_PER_RUN - 1} depend on the level")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _environment() -> dict[str, str]:
    return os.environ | ENVIRONMENT


def _cores() -> int:
    return os.cpu_count() or 1


if __name__ == "__main__":
    main()
