"""Shared by the tests of the tools: where they are."""

import sys
from pathlib import Path

import pytest
from tiny_models import quick_compilation

# The tools are no part of the package.
TOOLS = str(Path(__file__).parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_compilation():
        yield
