"""Block sizes of the fused kernels: a tuned table for each kind of GPU, and a heuristic for everything else."""

import dataclasses
import functools

from pallas_kernels import tables

TABLE = tables.FOLDER / "swiglu.json"

# More rows are bound by arithmetic, for which XLA's products are made.
MAX_ROWS = 64
# The least rows and columns of a matrix instruction's tile.
MIN_BLOCK = 16

# Programs that should exist at least: two for each of an H100's 132 multiprocessors.
_PROGRAMS = 264
# Most bytes that one step of the pipeline holds, and all steps together: what Ampere's smaller GPUs have is 100 KB.
_STEP_BYTES = 32 << 10
_SHARED_BYTES = 96 << 10


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut into programs.

    Attributes:
      block_f: output columns of a program, each of which reads a gate row and an up row.
      block_k: inputs that one step of its loop reads of every row.
      warps: of a program.
      stages: steps of the loop whose reads are in flight.
    """

    block_f: int
    block_k: int
    warps: int
    stages: int

    def __post_init__(self):
        """Triton's blocks are powers of two, of which its matrix products need at least 16 by 16."""
        for name in ("block_f", "block_k"):
            value = getattr(self, name)
            if value < MIN_BLOCK or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {MIN_BLOCK} on, got {value}")
        if self.warps not in (1, 2, 4, 8, 16) or not 1 <= self.stages <= 8:
            raise ValueError(f"a program has 1 to 16 warps and 1 to 8 stages, got {self.warps} and {self.stages}")


def choose(device_kind: str, T: int, D: int, F: int, itemsize: int = 2) -> Config:
    """Block sizes for T rows of D inputs and F output columns.

    Args:
      device_kind: JAX's name of the device; of one without a table the heuristic decides.
      T: rows, at most `MAX_ROWS`.
      D: inputs.
      F: output columns.
      itemsize: bytes of a weight.
    """
    found = load_table().get(device_kind, {}).get(bucket(T, D, F, itemsize))
    return found or _guess(block_rows(T), D, F, itemsize)


def bucket(T: int, D: int, F: int, itemsize: int = 2) -> str:
    """Name of the table's row for calls like this one; rows count as those of the tile."""
    return f"T{block_rows(T)} D{D} F{F} x{itemsize}"


def block_rows(T: int) -> int:
    """Rows of a program's tile: all T of them, padded."""
    return max(MIN_BLOCK, 1 << (T - 1).bit_length())


def step_bytes(rows: int, block_f: int, block_k: int, itemsize: int) -> int:
    """Bytes that one step of a program's loop reads: float32 rows, and gate and up weights."""
    return block_k * (4 * rows + 2 * itemsize * block_f)


def _guess(rows: int, D: int, F: int, itemsize: int) -> Config:
    """Enough programs to fill the device, steps as long as fit, and as many of them in flight as fit."""
    # Every program reads all rows, from the second-level cache: narrower blocks would read more rows than weights.
    block_f = next((block for block in (128, 64, 32) if F >= block * _PROGRAMS or block == rows), MIN_BLOCK)
    # Longer steps spill registers: float32 products, which no matrix unit computes exactly, keep whole tiles in them.
    lengths = (128, 64, 32) if itemsize < 4 else (32,)
    fitting = [k for k in lengths if step_bytes(rows, block_f, k, itemsize) <= _STEP_BYTES] or [MIN_BLOCK]
    # A width that no block divides needs masks in every step.
    block_k = next((k for k in fitting if D % k == 0), fitting[-1])
    stages = min(4, max(1, _SHARED_BYTES // step_bytes(rows, block_f, block_k, itemsize)))
    return Config(block_f, block_k, 4, stages)


@functools.cache
def load_table() -> dict[str, dict[str, Config]]:
    """The tuned table.

    Raises:
      ValueError: see `tables.load_table`.
    """
    return tables.load_table(TABLE, Config)
