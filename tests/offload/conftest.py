"""Checkpoints that the tests of streaming share are made as those of the readers are."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
