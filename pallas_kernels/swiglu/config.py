"""Block sizes of the SwiGLU kernels: a tuned table for each kind of GPU, and a heuristic for all other calls."""

import dataclasses
import functools
from typing import Any

from pallas_kernels import tables

TABLE = tables.FOLDER / "swiglu.json"

# Calls of more rows are bound by arithmetic, and XLA's products are faster there.
MAX_ROWS = 64
# The fewest rows and columns of a matrix instruction's tile.
MIN_BLOCK = 16

# Fewest programs that a launch should have: two for each of an H100's 132 multiprocessors.
_PROGRAMS = 264
# Most bytes that one step of the pipeline holds, and that all steps hold. Ampere's smaller GPUs have 100 KB.
_STEP_BYTES = 32 << 10
_SHARED_BYTES = 96 << 10


def preferred(*operands: Any) -> tuple[str, ...]:
    """Implementations that are faster than XLA for a call: none.

    Measured on an H100 (docs/results/gpu-h100.md): XLA's fusion of norm and SwiGLU runs at the memory's speed.
    """
    del operands
    return ()


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut into programs.

    Attributes:
      block_f: output columns of a program, each of which reads a gate row and an up row.
      block_k: inputs of every row that one step of its loop reads.
      warps: warps of a program.
      stages: steps of the loop whose reads are in flight.
    """

    block_f: int
    block_k: int
    warps: int
    stages: int

    def __post_init__(self):
        """Raise ValueError for sizes that Triton does not take."""
        for name in ("block_f", "block_k"):
            value = getattr(self, name)
            if value < MIN_BLOCK or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {MIN_BLOCK} on, got {value}")
        if self.warps not in (1, 2, 4, 8, 16) or not 1 <= self.stages <= 8:
            raise ValueError(f"a program has 1 to 16 warps and 1 to 8 stages, got {self.warps} and {self.stages}")


def choose(device_kind: str, T: int, D: int, F: int, itemsize: int = 2) -> Config:
    """Block sizes for T rows of D inputs and F output columns.

    Args:
      device_kind: JAX's name of the device. The heuristic decides for a device without a table.
      T: rows, at most `MAX_ROWS`.
      D: inputs.
      F: output columns.
      itemsize: bytes of a weight.
    """
    found = load_table().get(device_kind, {}).get(bucket(T, D, F, itemsize))
    return found or _guess(block_rows(T), D, F, itemsize)


def bucket(T: int, D: int, F: int, itemsize: int = 2) -> str:
    """Name of the table's row for such a call. T counts as the rows of its tile."""
    return f"T{block_rows(T)} D{D} F{F} x{itemsize}"


def block_rows(T: int) -> int:
    """Rows of a program's tile: T, padded to a power of two."""
    return max(MIN_BLOCK, 1 << (T - 1).bit_length())


def step_bytes(rows: int, block_f: int, block_k: int, itemsize: int) -> int:
    """Bytes that one step of a program's loop reads: float32 rows, gate weights and up weights."""
    return block_k * (4 * rows + 2 * itemsize * block_f)


def _guess(rows: int, D: int, F: int, itemsize: int) -> Config:
    """Enough programs to fill the device, then the longest steps that fit, then as many of them in flight as fit."""
    # Every program reads all rows from the second-level cache. Narrower blocks would read more bytes of rows than of
    # weights.
    block_f = next((block for block in (128, 64, 32) if F >= block * _PROGRAMS or block == rows), MIN_BLOCK)
    # Exact float32 products run without the matrix unit and keep whole tiles in registers, so longer steps would spill.
    lengths = (128, 64, 32) if itemsize < 4 else (32,)
    fitting = [k for k in lengths if step_bytes(rows, block_f, k, itemsize) <= _STEP_BYTES] or [MIN_BLOCK]
    # A width that the block does not divide needs masks in every step.
    block_k = next((k for k in fitting if D % k == 0), fitting[-1])
    stages = min(4, max(1, _SHARED_BYTES // step_bytes(rows, block_f, block_k, itemsize)))
    return Config(block_f, block_k, 4, stages)


@functools.cache
def load_table() -> dict[str, dict[str, Config]]:
    """The tuned table.

    Raises:
      ValueError: the file is no table; see `tables.load_table`.
    """
    return tables.load_table(TABLE, Config)
