"""Tests that need a GPU: skipped, all of them, where JAX finds none."""

import os
import sys
from pathlib import Path

import jax
import pytest

# Processes of one run share the GPU: none may take most of its memory at once, as JAX does unless told.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Calls of kernels and their exact results are those of the tests without a GPU.
KERNEL_TESTS = str(Path(__file__).parents[1] / "kernels")
if KERNEL_TESTS not in sys.path:
    sys.path.append(KERNEL_TESTS)


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
