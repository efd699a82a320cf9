"""Draft and target in different processes run at the same time."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_pair import write_pair
from harness import on_request

TOOL = Path(__file__).parents[2] / "tools" / "bench_processes.py"


@on_request
@pytest.mark.slow
def test_a_tree_grows_in_one_process_while_the_other_verifies(tmp_path):
    models = [str(path) for path in write_pair(tmp_path / "pair")]
    words = [*models, "--tokens", "30", "--repeats", "1", "--pauses", "100,70"]
    command = [sys.executable, str(TOOL), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:  # fmt: skip
        try:
            out, err = running.communicate(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # the processes that it has started, too
    assert running.returncode == 0, err[-2000:]
    header, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines())
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["where"].split()[0] for row in rows] == ["one", "two", "two"]
    for row in rows:
        assert float(row["overlap"]) >= 0.85, row
        assert float(row["round"]) >= 100
