"""Each planted fault fails the test that the table names, and without a fault these tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_tests(tests, fault=""):
    """Run tests of the fast suite in another process, with a fault."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "planting", "-m", "not slow"]
    env = {**os.environ, "PYTHONPATH": path, "JAXSPEC_PLANTED_FAULT": fault}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=env,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_fast_suite_finds_it(name):
    done = run_tests([FAULTS[name].found_by], name)
    # Status 1: tests ran and failed. An error on the way to them would be another status, or no failure.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"^FAILED tests/", done.stdout, re.MULTILINE), done.stdout


def test_without_a_fault_the_same_tests_pass():
    done = run_tests(sorted({fault.found_by for fault in FAULTS.values()}))
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


def test_the_table_of_the_docs_is_this_one():
    rows = [f"| {fault.mistake} | `{fault.found_by}` |" for fault in FAULTS.values()]
    assert "\n".join(rows) in (ROOT / "docs" / "testing.md").read_text()
