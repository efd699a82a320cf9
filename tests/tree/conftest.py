"""Shared by all tests of trees."""

import pytest
from tiny_models import quick_compilation


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_compilation():
        yield
