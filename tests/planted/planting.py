"""A pytest plugin that plants the fault named by `JAXSPEC_PLANTED_FAULT`; see `faults.py`."""

import os


def pytest_sessionstart():
    from faults import FAULTS, plant

    if name := os.environ.get("JAXSPEC_PLANTED_FAULT"):
        plant(FAULTS[name])
