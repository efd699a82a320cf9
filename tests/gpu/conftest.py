"""Tests that need a GPU: skipped, all of them, where JAX finds none."""

import jax
import pytest


def find_gpu():
    """The first GPU, and why there is none."""
    try:
        return jax.devices("gpu")[0], None
    except RuntimeError as error:
        return None, str(error).partition("\n")[0]


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    if not here:
        return
    _, problem = find_gpu()
    for item in here if problem else ():
        item.add_marker(pytest.mark.skip(reason=f"no GPU: {problem}"))


@pytest.fixture(scope="session")
def gpu():
    """The device under test."""
    device, _ = find_gpu()
    assert device is not None  # else every test is skipped
    return device
