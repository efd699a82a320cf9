"""Tests of several processes use the writers of checkpoints."""

import sys
from pathlib import Path

WRITERS = str(Path(__file__).parents[1] / "checkpoint")
if WRITERS not in sys.path:
    sys.path.append(WRITERS)
