"""The cores of the native kernels on random shapes and lengths, under AddressSanitizer and UBSan.

The best instruction set that runs here: products of float32 and Q4_1, which between them take every loop over weights,
rows of a weight in every format, RMS norm, attention, lanes and threads. `tools/fuzz_native.py` runs every instruction
set that the machine has and products of every format, longer.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fuzz_native  # noqa: E402

CASES = 600


@pytest.mark.slow
def test_random_shapes_find_nothing(tmp_path):
    try:
        level = fuzz_native.find_level("address")
    except fuzz_native.UnavailableError as error:
        pytest.skip(str(error))
    for program in fuzz_native.build(tmp_path, level, "address", fuzz_native.QUICK_PARTS).values():
        fuzz_native.run(program, 0, CASES)
