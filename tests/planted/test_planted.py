"""Each planted fault fails the test that the table names; without a fault it passes."""

import sys
from pathlib import Path

import jax
import pytest
from faults import FAULTS, planted

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Outcomes:
    """A plugin that notes what became of each test."""

    def __init__(self):
        self.failed, self.errors = [], []

    def pytest_runtest_logreport(self, report):
        if report.failed and report.when == "call":
            self.failed.append(report.nodeid)
        elif report.failed:
            self.errors.append((report.nodeid, report.longreprtext))


def forget():
    """Drop compiled programs and test modules: both hold on to functions as they were."""
    jax.clear_caches()
    tests = str(ROOT / "tests")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(tests) and Path(file).name != "conftest.py" and "planted" not in file:
            del sys.modules[name]


def run_tests(tests):
    """Run tests of `.ci/run` in this process."""
    outcomes = Outcomes()
    forget()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    status = pytest.main([*options, f"--rootdir={ROOT}", *(str(ROOT / test) for test in tests)], plugins=[outcomes])
    forget()
    return status, outcomes


@pytest.mark.parametrize("name", FAULTS)
def test_a_test_finds_it(name):
    with planted(FAULTS[name]):
        status, outcomes = run_tests([FAULTS[name].found_by])
    # The test ran and failed. An error on the way to it would be another status, or no failure.
    assert status == pytest.ExitCode.TESTS_FAILED, outcomes.errors
    assert outcomes.failed and not outcomes.errors


def test_the_table_of_the_docs_is_this_one():
    rows = [f"| {fault.mistake} | `{fault.found_by}` |" for fault in FAULTS.values()]
    assert "\n".join(rows) in (ROOT / "docs" / "testing.md").read_text()
