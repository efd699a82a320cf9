"""Shared by the tests of several processes."""

import pytest
from distributed_pair import write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a target and a draft."""
    return [str(path) for path in write_pair(tmp_path_factory.mktemp("pair"))]
