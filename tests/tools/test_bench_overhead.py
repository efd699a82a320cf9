"""The stopwatch around native operations, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels.native.library as native

TOOL = Path(__file__).parents[2] / "tools" / "bench_overhead.py"


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(native.load().level is None, reason="no native library")
def test_operations_are_counted():
    command = [sys.executable, str(TOOL), "--methods", "ar", "--tokens", "64", "--repeats", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"\| ar: a (token|round) \| \S+ \| (\S+) \| (\S+) \|", printed)
    assert [unit for unit, *_ in rows] == ["token", "round"]
    for _, inside, count in rows:
        # Thirty layers, each of several operations.
        assert float(inside) > 0 and float(count) > 100
