"""Calls of `move_rows`, `add_norm` and `linear_sum`, and what numpy makes of them (`kernel_check`)."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
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
    return module.supports(o["caches"], o["source"], o["start"])


def run_moves(module: ModuleType, call: Move, o: Arrays) -> dict[str, Any]:
    """Results of an implementation."""
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
    return module.supports(o["x"], o["parts"], o["scale"])


def run_addition(module: ModuleType, call: Addition, o: Arrays) -> dict[str, Any]:
    """Results of an implementation."""
    total, normed = module.add_norm(o["x"], o["parts"], o["scale"], EPSILON, DTYPES[call.dtype])
    return {"the result": total, "the norm": normed}


def expect_addition(call: Addition, o: Arrays) -> Arrays:
    """The same results by numpy."""
    total = o["x"] + o["parts"].sum(0)
    return {
        "the result": total,
        "the norm": total / np.sqrt(np.mean(total * total, axis=1, keepdims=True) + EPSILON) * o["scale"],
    }


class Sum(NamedTuple):
    """A product that two devices add up, by its rows, each one's inputs, and outputs."""

    name: str
    rows: int
    inputs: int
    outputs: int
    dtype: str = "bfloat16"
    required: bool = True


# Rows, inputs of a device and outputs.
SUMS = (Sum("a sum of two devices", 5, 192, 128), Sum("a sum of 64 rows", 64, 256, 64))


def make_sum(call: Sum) -> Arrays:
    """Operands of all devices."""
    rng = np.random.default_rng(0)
    shapes = {"x": (call.rows, 2 * call.inputs), "weight": (call.outputs, 2 * call.inputs)}
    return {name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def _over_two(function: Callable[..., Any], o: Arrays) -> Any:
    """A function of two devices' inputs, each of which has a half of them."""
    first = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    devices = np.array(first.client.local_devices()[:2])
    halves, whole = jax.P(None, "tensor"), jax.P()
    run = jax.shard_map(
        function, mesh=jax.sharding.Mesh(devices, ("tensor",)), in_specs=(halves, halves), out_specs=whole,
        check_vma=False,
    )  # fmt: skip
    return run(o["x"], o["weight"])


def take_sum(module: ModuleType, call: Sum, o: Arrays) -> bool:
    """Whether the kernel takes the call."""
    taken = []

    def ask(x: jax.Array, weight: jax.Array) -> jax.Array:
        taken.append(module.supports(x, weight, "tensor"))
        return x

    jax.eval_shape(functools.partial(_over_two, ask), o)
    return all(taken)


def run_sum(module: ModuleType, call: Sum, o: Arrays) -> dict[str, Any]:
    """The sum on the first device."""
    return {"sum": _over_two(lambda x, weight: module.linear_sum(x, weight, "tensor"), o)}


def expect_sum(call: Sum, o: Arrays) -> Arrays:
    """The same by numpy."""
    return {"sum": o["x"].astype(np.float32) @ o["weight"].astype(np.float32).T}
