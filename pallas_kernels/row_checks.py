"""Calls of the small operations on rows, `move_rows` and `add_norm`, and what numpy makes of them (`kernel_check`)."""

from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Arrays = dict[str, Any]

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
EPSILON = 1e-5


class Move(NamedTuple):
    """A path of so many rows through the windows of caches of one shape."""

    name: str
    rows: int
    shape: tuple[int, int, int]
    dtypes: tuple[str, ...]
    required: bool = True

    @property
    def dtype(self) -> str:
        return self.dtypes[0]


class Addition(NamedTuple):
    """So many parts added to rows, and a norm rounded to `dtype`."""

    name: str
    rows: int
    width: int
    parts: int
    dtype: str
    required: bool = True


MOVES = (
    Move("a path", 5, (2, 64, 64), ("bfloat16", "bfloat16")),
    Move("a path of wide heads", 33, (3, 80, 96), ("float32",)),
)
# A width that is no power of two, and one that is.
ADDITIONS = (
    Addition("a few parts", 5, 600, 3, "bfloat16"),
    Addition("a sum in one part", 3, 256, 1, "float32"),
)


def make_moves(call: Move) -> Arrays:
    """Operands of a call."""
    rng = np.random.default_rng(0)
    caches = tuple(rng.normal(size=call.shape).astype(DTYPES[dtype]) for dtype in call.dtypes)
    # Ancestors come before their descendants; places that are read and written overlap.
    source = 20 + np.sort(rng.permutation(call.rows + 6)[: call.rows]).astype(np.int32)
    return {"caches": caches, "source": source, "start": np.int32(20)}


def take_moves(module: ModuleType, call: Move, o: Arrays) -> bool:
    """Whether an implementation takes a call."""
    del call
    return module.supports(o["caches"], o["source"], o["start"])


def run_moves(module: ModuleType, call: Move, o: Arrays) -> dict[str, Any]:
    """Results of an implementation."""
    del call
    return {f"cache {i}": moved for i, moved in enumerate(module.move_rows(o["caches"], o["source"], o["start"]))}


def expect_moves(call: Move, o: Arrays) -> Arrays:
    """The same results by numpy."""
    expected = {}
    for index, cache in enumerate(o["caches"]):
        moved = cache.astype(np.float32)
        moved[:, 20 : 20 + call.rows] = moved[:, o["source"]]
        expected[f"cache {index}"] = moved
    return expected


def make_addition(call: Addition) -> Arrays:
    """Operands of a call."""
    rng = np.random.default_rng(0)
    shapes = {"x": (call.rows, call.width), "parts": (call.parts, call.rows, call.width), "scale": (call.width,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def take_addition(module: ModuleType, call: Addition, o: Arrays) -> bool:
    """Whether an implementation takes a call."""
    del call
    return module.supports(o["x"], o["parts"], o["scale"])


def run_addition(module: ModuleType, call: Addition, o: Arrays) -> dict[str, Any]:
    """Results of an implementation."""
    total, normed = module.add_norm(o["x"], o["parts"], o["scale"], EPSILON, DTYPES[call.dtype])
    return {"the result": total, "the norm": normed}


def expect_addition(call: Addition, o: Arrays) -> Arrays:
    """The same results by numpy."""
    del call
    total = o["x"] + o["parts"].sum(0)
    return {
        "the result": total,
        "the norm": total / np.sqrt(np.mean(total * total, axis=1, keepdims=True) + EPSILON) * o["scale"],
    }
