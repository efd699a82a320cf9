"""The cores of the native kernels on random shapes and lengths, under AddressSanitizer and UBSan.

The best instruction set that runs here: products of float32 and Q4_1, which between them take every loop over weights,
rows of a weight in every format, RMS norm, attention, lanes and threads. `tools/fuzz_native.py` runs every instruction
set that the machine has and products of every format, longer.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import fuzz_native  # noqa: E402

CASES = 600


def build_programs(folder, level):
    """The programs, from the session's cache if their sources are those of before; a minute of compiling else."""
    sources = [fuzz_native.SOURCE, Path(fuzz_native.__file__), *sorted((ROOT / "pallas_kernels").glob("*/*.[ch]*"))]
    digest = hashlib.sha256(level.encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    cached = [Path(os.environ["JAXSPEC_COMPILE_CACHE"]) / f"fuzz-{digest}-{part}" for part in fuzz_native.QUICK_PARTS]
    if not all(path.is_file() for path in cached):
        built = fuzz_native.build(folder, level, "address", fuzz_native.QUICK_PARTS)
        for path, program in zip(cached, built.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(program, f"{path}.part-{os.getpid()}")
            os.replace(f"{path}.part-{os.getpid()}", path)
    return cached


@pytest.mark.slow
def test_random_shapes_find_nothing(tmp_path):
    try:
        level = fuzz_native.find_levels("address")[0]
    except fuzz_native.UnavailableError as error:
        pytest.skip(str(error))
    for program in build_programs(tmp_path, level):
        fuzz_native.run(program, 0, CASES)
