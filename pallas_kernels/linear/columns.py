"""Weights in columns, as TPUs read them: byte by byte of all blocks, with the outputs side by side.

Data is uint8 `[nbytes, n, O]`: byte b of block j of output o of a group format (`groups.py`). A TPU keeps that without
padding, and whole vectors of outputs meet their scales without being moved. The n blocks of a device's rows are padded
with zeros to a multiple of eight. Two of GGUF's formats become groups with the same numbers.
"""

import numpy as np

from pallas_kernels.linear.blocks import COLUMNS

MULTIPLE = 8
# Formats of GGUF's blocks, and the groups that hold the same numbers.
SAME = {"q8_0": "int8_g32", "q4_0": "int4_g32"}


def columns_name(name: str) -> str | None:
    """The format of `COLUMNS` for one of `FORMATS`, or None."""
    columns = f"{SAME.get(name, name)}_columns"
    return columns if columns in COLUMNS else None


def head_bytes(name: str) -> int:
    """Bytes of a block before its codes."""
    return 3 if name.startswith("int4_g32") else 5


def to_columns(blocks: np.ndarray, name: str, outputs: int) -> np.ndarray:
    """Blocks uint8 `[...outputs, ...inputs / values, nbytes]` as uint8 `[nbytes, n, O]`.

    On the host: not every device keeps the smallest float16 scales.
    """
    blocks = blocks.reshape(outputs, -1, blocks.shape[-1])
    if name in SAME:
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32).view(np.uint8)
        if name == "q4_0":  # the upper three bytes, with the zero point of all its codes
            head = scale[..., 1:] | np.array([8, 0, 0], np.uint8)
        else:
            head = np.pad(scale, [(0, 0), (0, 0), (0, 1)])
        blocks = np.concatenate([head, blocks[..., 2:]], axis=-1)
    padding = -blocks.shape[1] % MULTIPLE
    return np.ascontiguousarray(np.pad(blocks, [(0, 0), (0, padding), (0, 0)]).transpose(2, 1, 0))
