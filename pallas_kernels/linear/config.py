"""Block sizes of the GPU product of rows and packed weights."""

import dataclasses
import functools

from pallas_kernels import tables

TABLE = tables.FOLDER / "linear.json"

# Calls of more rows are bound by arithmetic: XLA multiplies a tile of numbers at a time.
MAX_ROWS = 64
# The fewest rows of a matrix instruction's tile, and the fewest outputs.
MIN_ROWS, MIN_OUTPUTS = 8, 16

# Bytes of codes of each output that one step of a program's loop reads.
_STEP_BYTES = 128
# Fewest programs that a launch should have: two for each of an H100's 132 multiprocessors.
_PROGRAMS = 264
# A part of fewer steps costs more to add up than it saves.
_LEAST_STEPS = 4
# The same of a product by numbers, in inputs.
_PART_INPUTS = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut into programs.

    Attributes:
      block_o: outputs of a program.
      step: bytes of codes of every output that one step of its loop reads; at least one group is read.
      splits: parts of the inputs that run at the same time.
      warps: warps of a program.
      stages: steps of the loop whose reads are in flight.
    """

    block_o: int
    step: int
    splits: int
    warps: int
    stages: int

    def __post_init__(self):
        """Raise ValueError for sizes that Triton does not take."""
        for name, smallest in (("block_o", MIN_OUTPUTS), ("step", 16), ("splits", 1)):
            value = getattr(self, name)
            if value < smallest or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {smallest} on, got {value}")
        if self.warps not in (1, 2, 4, 8, 16) or not 1 <= self.stages <= 8:
            raise ValueError(f"a program has 1 to 16 warps and 1 to 8 stages, got {self.warps} and {self.stages}")


def choose(device_kind: str, name: str, T: int, outputs: int, code_bytes: int) -> Config:
    """Block sizes for T rows times a weight.

    The heuristic takes the same sizes for every T of a tile, so that a row's sum has the same order in all of them.

    Args:
      device_kind: JAX's name of the device.
      name: a name in `PLANES`.
      T: rows, at most `MAX_ROWS`.
      outputs: of the weight.
      code_bytes: bytes of the codes of one output.
    """
    found = load_table().get(device_kind, {}).get(bucket(name, T, outputs, code_bytes))
    return found or _guess(block_rows(T), outputs, code_bytes)


def bucket(name: str, T: int, outputs: int, code_bytes: int) -> str:
    """Name of the table's row for such a call. T counts as the rows of its tile."""
    return f"{name} T{block_rows(T)} O{outputs} B{code_bytes}"


def block_rows(T: int) -> int:
    """Rows of a program's tile: T, padded to a power of two."""
    return max(MIN_ROWS, 1 << (T - 1).bit_length())


def _guess(rows: int, outputs: int, code_bytes: int) -> Config:
    block_o = 64 if outputs >= 64 else MIN_OUTPUTS
    programs, steps = -(-outputs // block_o), -(-code_bytes // _STEP_BYTES)
    splits = 1
    while programs * splits < _PROGRAMS and steps // (2 * splits) >= _LEAST_STEPS:
        splits *= 2
    return Config(block_o, _STEP_BYTES if rows <= 16 else _STEP_BYTES // 2, splits, 4, 3)


def count_parts(outputs: int, inputs: int, multiprocessors: int) -> int:
    """Parts of the inputs of a product by numbers that XLA is given at the same time.

    As many as XLA takes by itself (0.10.2, for Llama-3-8B's products on an H100): tiles of 64 outputs, two for each
    multiprocessor. XLA then splits no further, and launches nothing to add the parts up.
    """
    parts, tiles = 1, -(-outputs // 64)
    while tiles * parts < 2 * multiprocessors and inputs % (2 * parts) == 0 and inputs // (2 * parts) >= _PART_INPUTS:
        parts *= 2
    return parts


@functools.cache
def load_table() -> dict[str, dict[str, Config]]:
    """The tuned table.

    Raises:
      ValueError: the file is no table; see `tables.load_table`.
    """
    return tables.load_table(TABLE, Config)
