"""Every test in this folder has the marker `tools`: `make test` leaves them out, `make test-tools` runs them alone."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.tools)
