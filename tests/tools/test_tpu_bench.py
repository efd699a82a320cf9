"""The script for the day of a TPU: it runs without one, and judges."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import tpu_bench


@pytest.mark.slow
def test_it_runs_anywhere(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, tpu_bench.__file__, "--smoke", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # nothing was measured at the shapes of the bounds
    parts = json.loads(file.read_text())["parts"]
    assert all(part["error"] is None for part in parts.values())
    assert parts["check"]["rows"][0]["difference"] is None
    assert [row["equal"] for row in parts["tokens"]["rows"]] == [True, True]
    assert parts["steps"]["rows"][0]["seconds"] > 0


def test_what_it_judges():
    def step(kernels, rows, prefix, seconds):
        return {"kernels": kernels, "rows": rows, "prefix": prefix, "seconds": seconds, "bytes": 8e9, "bandwidth": 8e11}

    steps = [step("xla", 1, 512, 0.0125), step("xla", 64, 512, 0.015), step("xla", 64, 8192, 0.03),
             step("mosaic-tpu", 64, 8192, 0.04), {"name": "one that failed", "error": "out of memory"}]  # fmt: skip
    parts = {"check": [{"difference": None}], "tokens": [{"name": "chain, xla", "equal": False}], "steps": steps}
    verdicts = tpu_bench.judge({name: {"rows": rows} for name, rows in parts.items()})
    assert [met for *_, met in verdicts] == [True, False, True, True, False]
    assert verdicts[1][1] == ["chain, xla"] and verdicts[2][1] == pytest.approx(0.8)
    assert [met for *_, met in tpu_bench.judge({name: {"rows": []} for name in parts})] == [None] * 5
