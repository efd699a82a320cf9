"""Shared by the tests of the simulator: where the tiny pairs of the methods' tests are."""

import sys
from pathlib import Path

METHODS = str(Path(__file__).parents[1] / "methods")
if METHODS not in sys.path:
    sys.path.append(METHODS)
