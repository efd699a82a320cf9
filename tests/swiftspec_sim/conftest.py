"""Shared by the tests of the simulator: where it is, and where the tiny pairs are."""

import sys
from pathlib import Path

import pytest
from tiny_models import quick_compilation

# The tool is no part of the package, and the tiny pairs belong to the tests of the methods.
for folder in (Path(__file__).parents[2] / "tools", Path(__file__).parents[1] / "methods"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_compilation():
        yield
