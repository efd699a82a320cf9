"""A numerical check of a GPU kernel on a few tiny calls, before any program uses it.

The calls are few, because each one is compiled while a model is loaded. Together they run what decoding runs: older
window slots, inactive rows, two words of mask bits, parts of a prefix and their merge, a sliding window, tile edges.
Windows have as much weight as prefixes, so that a wrong mask shows. All that a kernel must not read is NaN.

The expected results come from numpy, as in `self_check`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import registry, row_checks
from pallas_kernels.linear.blocks import COLUMNS, FORMATS, GROUP_FORMATS, Blocks, dequantise
from pallas_kernels.linear.columns import columns_name, to_columns
from pallas_kernels.linear.planes import planes_name, to_planes
from pallas_kernels.row_checks import ADDITIONS, DTYPES, MOVES, SUMS, Arrays
from pallas_kernels.self_check import as_in_programs, compare, rotate

# Where the float16 scales of a block of a GGUF file lie.
FLOAT16_SCALES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2), "q6_k": (208,)}

# Relative to the largest number of a result, by the dtype that is multiplied. The weights of a softmax are rounded to
# that dtype too. Wrong code is off by far more.
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-3}

HEADS, SLOTS = 2, 256
EPSILON = 1e-5


class Attention(NamedTuple):
    """A call of attention, in the terms of `tree_attention.api`. Every kernel must take it if it is `required`."""

    name: str
    rows: int
    group: int
    width: int
    length: int
    dtype: str
    active_rows: int
    offset: int | None = None
    sliding: int | None = None
    causal: bool = False
    required: bool = True

    @property
    def first(self) -> int:
        """Slot of row 0."""
        return self.length + (self.offset or 0)

    @property
    def new(self) -> slice:
        """Slots of the active rows."""
        return slice(self.first, self.first + self.active_rows)


class Swiglu(NamedTuple):
    """A call of SwiGLU by its rows, inputs and output columns. Every kernel must take it if it is `required`."""

    name: str
    rows: int
    inputs: int
    columns: int
    dtype: str
    required: bool = True


class Packed(NamedTuple):
    """A product by a weight in planes, or SwiGLU of it, by format, rows, inputs and outputs."""

    name: str
    format: str
    rows: int
    inputs: int
    outputs: int
    gated: bool = False
    dtype: str = "bfloat16"
    required: bool = True


ATTENTION = (
    Attention("a tree", 40, 4, 64, 5, "bfloat16", active_rows=37, offset=3),
    Attention("a chunk", 20, 3, 128, 150, "bfloat16", active_rows=20, sliding=100, causal=True),
    # Mosaic takes no float32 cache.
    Attention("a float32 step", 1, 3, 64, 200, "float32", active_rows=1, required=False),
)
# Every layout of codes and scales; parts of the inputs, edges of tiles, and tiles of 8 and 16 rows.
LINEAR = (
    Packed("a weight of q4_0", "q4_0", 3, 2048, 72),
    Packed("a gate and up of q4_0", "q4_0", 3, 160, 96, gated=True),
    Packed("a weight of q4_k", "q4_k", 3, 512, 72),
    Packed("a weight of q6_k", "q6_k", 3, 512, 72),
    Packed("a weight of q8_0", "q8_0", 11, 256, 64),
    Packed("a weight of q4_1", "q4_1", 3, 160, 64),
    Packed("a weight of int4_g32", "int4_g32", 3, 160, 64),
    Packed("a weight of int4_g128", "int4_g128", 11, 384, 64),
    Packed("a weight of int8_g128", "int8_g128", 3, 384, 64),
    Packed("a weight of fp8_g128", "fp8_g128", 3, 384, 64),
)
SWIGLU = (
    Swiglu("a few rows", 3, 256, 256, "bfloat16"),
    Swiglu("ragged float32 rows", 40, 100, 83, "float32"),
)


def find_kernel_difference(operation: str, implementation: str, kernels: registry.Kernels, device: Any) -> str | None:
    """Run one operation through a GPU kernel. Return what is wrong, and by how much, or None.

    Args:
      operation: name of its folder.
      implementation: name of its module. The module is called directly, since the operation's api would leave to XLA
        what the kernel refuses.
      kernels: describes the GPU, or the interpreter.
      device: device that the calls run on.

    Raises:
      Exception: any kind, where the kernel cannot be compiled or run.
    """
    check = CHECKS[operation]
    with as_in_programs(kernels, device):
        module = registry.import_implementation(operation, implementation)
        calls = check.calls
        if implementation == "mosaic_tpu" and operation == "tree_attention":
            calls = tuple(call._replace(width=128) for call in calls)  # it takes no narrower heads
        elif implementation == "mosaic_tpu":
            calls = tuple(call for call in calls if f"{call.format}_columns" in COLUMNS)
        operands = [check.make(call) for call in calls]
        taken = [check.takes(module, *pair) for pair in zip(calls, operands, strict=True)]
        refused = [call.name for call, yes in zip(calls, taken, strict=True) if call.required and not yes]
        if refused:
            return f"it does not take {refused[0]} of ordinary operands"
        pairs = [(call, each) for call, each, yes in zip(calls, operands, taken, strict=True) if yes]

        def run(operands: list[Arrays]) -> list[Any]:
            return [check.run(module, call, each) for (call, _), each in zip(pairs, operands, strict=True)]

        results = jax.tree.map(np.asarray, jax.jit(run)([each for _, each in pairs]))
    for (call, each), result in zip(pairs, results, strict=True):
        difference = compare(result, check.expect(call, each), TOLERANCE[call.dtype])
        if difference is not None:
            return f"of {call.name} {difference}"
    return None


def _make_attention(call: Attention) -> Arrays:
    """Operands as models give them, with NaN in every place that no active row may read."""
    rng = np.random.default_rng(0)
    T, H = call.rows, call.width
    mask, depth = np.tril(np.ones((T, T), bool)), np.arange(T)
    if not call.causal:
        mask, depth = _grow_forest(rng, T)
    if call.offset is not None:
        older = rng.random((T, call.offset)) < 0.5
        older[:, 1] = False  # on no row's path
        mask = np.concatenate([older, mask], axis=1)
    position = (call.length + depth).astype(np.int32)
    angle = position[:, None] * 1e4 ** -np.linspace(0, 1, H // 2)
    operands = {
        "qkv": rng.normal(size=(T, HEADS, call.group + 2, H)).astype(np.float32),
        "cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32),
        "key": rng.normal(size=(HEADS, SLOTS, H)), "value": rng.normal(size=(HEADS, SLOTS, H)),
        "mask": mask, "position": position,
        # Arrays, as they are in programs.
        "length": np.int32(call.length), "offset": np.int32(call.offset or 0),
        "active_rows": np.int32(call.active_rows),
    }  # fmt: skip
    hidden = np.logical_not(_visible(call, operands).any(axis=0, keepdims=True))[0]
    hidden[call.first :] = True
    for name in ("key", "value"):
        operands[name] = operands[name].astype(DTYPES[call.dtype])
        operands[name][:, hidden] = np.nan
    operands["qkv"][call.active_rows :] = np.nan
    return operands


def _grow_forest(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's ancestors, itself included, and its depth: bool [rows, rows], int [rows]."""
    mask, depth = np.eye(rows, dtype=bool), np.zeros(rows, np.int32)
    for row in range(1, rows):
        parent = int(rng.integers(-1, row))
        if parent >= 0:
            mask[row] |= mask[parent]
            depth[row] = depth[parent] + 1
    return mask, depth


def _visible(call: Attention, o: Arrays) -> np.ndarray:  # bool [active_rows, SLOTS]
    reach = call.sliding or SLOTS
    slot, position = np.arange(SLOTS), o["position"][: call.active_rows, None]
    seen = (slot < call.length) & (slot > position - reach)
    window = o["mask"][: call.active_rows]
    if call.causal:
        row = np.arange(call.rows)
        window = window & (row[: call.active_rows, None] - row < reach)
    seen[:, call.length : call.length + window.shape[1]] = window
    return seen


def _attention_call(call: Attention, o: Arrays) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tree = (None, None) if call.causal else (o["mask"], o["position"])
    operands = (o["qkv"], o["cos"], o["sin"], o["key"], o["value"], o["length"], *tree)
    options = {
        "offset": None if call.offset is None else o["offset"], "sliding_window": call.sliding,
        "active_rows": None if call.active_rows == call.rows else o["active_rows"], "write_only": False,
    }  # fmt: skip
    return operands, options


def _take_attention(module: ModuleType, call: Attention, o: Arrays) -> bool:
    operands, options = _attention_call(call, o)
    return module.supports(*operands, **options)


def _run_attention(module: ModuleType, call: Attention, o: Arrays) -> dict[str, Any]:
    operands, options = _attention_call(call, o)
    heads, key, value = module.tree_attention(*operands, **options)
    return {
        "the result": heads[: call.active_rows],
        "the inactive rows": 0 * heads[call.active_rows :],
        "the cache's keys": key[:, call.new],
        "the cache's values": value[:, call.new],
    }


def _expect_attention(call: Attention, o: Arrays) -> Arrays:
    """Keys, values, and the queries in products are rounded to the cache's dtype, as the contract says."""
    qkv, cos, sin = (o[name][: call.active_rows] for name in ("qkv", "cos", "sin"))

    def stored(x: np.ndarray) -> np.ndarray:
        return x.astype(DTYPES[call.dtype]).astype(np.float32)

    key, value = (o[name].astype(np.float32) for name in ("key", "value"))
    key[:, call.new] = stored(rotate(qkv[:, :, -2], cos, sin)).swapaxes(0, 1)
    value[:, call.new] = stored(qkv[:, :, -1]).swapaxes(0, 1)
    seen = _visible(call, o)
    used = seen.any(axis=0)
    query = stored(rotate(qkv[:, :, :-2], cos, sin))
    scores = np.einsum("tkgh,ksh->tkgs", query, key[:, used]) / np.sqrt(call.width)
    weights = np.where(seen[:, None, None, used], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    heads = np.einsum("tkgs,ksh->tkgh", weights / weights.sum(-1, keepdims=True), value[:, used])
    return {
        "the result": heads,
        "the inactive rows": np.zeros((call.rows - call.active_rows, *heads.shape[1:]), np.float32),
        "the cache's keys": key[:, call.new],
        "the cache's values": value[:, call.new],
    }


def _make_swiglu(call: Swiglu) -> Arrays:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2 * call.columns, call.inputs)) / np.sqrt(call.inputs)
    return {
        "x": rng.normal(size=(call.rows, call.inputs)).astype(np.float32),
        "scale": rng.normal(size=call.inputs).astype(np.float32),
        "gate_up": weight.astype(DTYPES[call.dtype]),
    }


def _take_swiglu(module: ModuleType, call: Swiglu, o: Arrays) -> bool:
    return module.supports(o["x"], o["gate_up"], o["scale"], EPSILON)


def _run_swiglu(module: ModuleType, call: Swiglu, o: Arrays) -> dict[str, Any]:
    return {
        "the result": module.swiglu(o["x"], o["gate_up"]),
        "the result with the norm": module.swiglu(o["x"], o["gate_up"], o["scale"], EPSILON),
    }


def _expect_swiglu(call: Swiglu, o: Arrays) -> Arrays:
    def combine(x: np.ndarray) -> np.ndarray:
        gate, up = np.split(x @ o["gate_up"].astype(np.float32).T, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up

    normed = o["x"] / np.sqrt(np.mean(o["x"] ** 2, axis=1, keepdims=True) + EPSILON) * o["scale"]
    return {"the result": combine(o["x"]), "the result with the norm": combine(normed)}


def _make_linear(call: Packed) -> Arrays:
    rng, block_format = np.random.default_rng(0), FORMATS[call.format]
    data = rng.integers(0, 256, (call.outputs, call.inputs // block_format.values, block_format.nbytes), np.uint8)
    for at in FLOAT16_SCALES.get(call.format, ()):
        scale = rng.uniform(0.01, 0.02, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
    if call.format in GROUP_FORMATS:
        scale = rng.uniform(0.01, 0.02, data.shape[:2]).astype(np.float16).astype(np.float32)
        head = scale[..., None].view(np.uint8)
        # The last four bits of a short one are the zero point's.
        data[..., :3] = (scale.view(np.uint32)[..., None] >> 8 | 7).view(np.uint8)[..., :3]
        if call.format != "int4_g32":
            data[..., :4] = head
        if call.format.startswith("fp8"):
            data[..., 4:] &= 0xBF  # no codes of infinity
    if registry.current().platform == "tpu":
        columns: Any = to_columns(data, call.format, call.outputs)
        weight = Blocks(columns, str(columns_name(call.format)), (None,))
    else:
        weight = Blocks(to_planes(data, call.format, call.outputs), str(planes_name(call.format)))
    return {
        "x": rng.normal(size=(call.rows, call.inputs)).astype(np.float32),
        "weight": weight,
        "blocks": data,
    }


def _take_linear(module: ModuleType, call: Packed, o: Arrays) -> bool:
    return module.supports(o["x"], o["weight"])


def _run_linear(module: ModuleType, call: Packed, o: Arrays) -> dict[str, Any]:
    run = module.swiglu if call.gated else module.linear
    return {"the result": run(o["x"], o["weight"])}


def _expect_linear(call: Packed, o: Arrays) -> Arrays:
    # Operation by operation, each rounded by itself.
    with jax.disable_jit():
        numbers = np.asarray(dequantise(Blocks(jnp.asarray(o["blocks"]), call.format)))
    rounded = [array.astype(DTYPES[call.dtype]).astype(np.float32) for array in (o["x"], numbers)]
    product = rounded[0] @ rounded[1].T
    if not call.gated:
        return {"the result": product}
    gate, up = np.split(product, 2, axis=1)
    return {"the result": gate / (1 + np.exp(-gate)) * up}


class Check(NamedTuple):
    """How an operation is checked.

    Attributes:
      calls: calls to run.
      make: makes the operands of a call.
      takes: says whether an implementation takes a call.
      run: named results of an implementation.
      expect: the same results by numpy.
    """

    calls: tuple[Any, ...]
    make: Callable[[Any], Arrays]
    takes: Callable[[ModuleType, Any, Arrays], bool]
    run: Callable[[ModuleType, Any, Any], dict[str, Any]]
    expect: Callable[[Any, Arrays], Arrays]


CHECKS = {
    "tree_attention": Check(ATTENTION, _make_attention, _take_attention, _run_attention, _expect_attention),
    "linear": Check(LINEAR, _make_linear, _take_linear, _run_linear, _expect_linear),
    "move_rows": Check(
        MOVES, row_checks.make_moves, row_checks.take_moves, row_checks.run_moves, row_checks.expect_moves
    ),
    "add_norm": Check(
        ADDITIONS,
        row_checks.make_addition,
        row_checks.take_addition,
        row_checks.run_addition,
        row_checks.expect_addition,
    ),
    "linear_sum": Check(SUMS, row_checks.make_sum, row_checks.take_sum, row_checks.run_sum, row_checks.expect_sum),
    "swiglu": Check(SWIGLU, _make_swiglu, _take_swiglu, _run_swiglu, _expect_swiglu),
}
