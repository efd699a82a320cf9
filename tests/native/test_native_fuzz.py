"""The cores of the native kernels on random shapes and lengths, under AddressSanitizer and UBSan.

One instruction set, and the formats that between them take every path; `tools/fuzz_native.py` runs all of both, longer.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fuzz_native  # noqa: E402

CASES = 600


def test_random_shapes_find_nothing(tmp_path):
    try:
        level = fuzz_native.find_level("address")
    except fuzz_native.UnavailableError as error:
        pytest.skip(str(error))
    for program in fuzz_native.build(tmp_path, level, "address", fuzz_native.QUICK_PARTS).values():
        fuzz_native.run(program, 0, CASES)
