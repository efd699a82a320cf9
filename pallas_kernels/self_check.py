"""A numerical check of native operations and GPU kernels on one tiny input, before anything relies on them.

The expected results come from numpy and from the `gguf` package: compiling XLA's references would take a second.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pallas_kernels import registry
from pallas_kernels.linear import Blocks, linear, take_rows
from pallas_kernels.linear.blocks import FORMATS
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables
from pallas_kernels.swiglu import swiglu
from pallas_kernels.tree_attention import tree_attention

# Relative to the largest number of a result; wrong code is off by far more. GPU kernels multiply in bfloat16.
TOLERANCE = 1e-4
KERNEL_TOLERANCE = 2e-2

ROWS, HEADS, GROUP, WIDTH, SLOTS, LENGTH = 3, 2, 2, 24, 160, 140
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
POSITION = np.array([LENGTH, LENGTH + 1, LENGTH + 1], np.int32)
TAKEN = np.array([4, 0], np.int32)
EPSILON = 1e-5


def find_difference() -> str | None:
    """Run every operation; the name of one whose result is off, and by how much, or None.

    As with programs, what the caller set for code of their own (64-bit types, guards, no jit) changes nothing.

    Raises:
      JaxRuntimeError: the library refuses a call.
      ValueError: the same, found out where a result is read.
    """
    operands = _make_operands()
    with _as_in_programs(registry.Kernels("cpu", "cpu", 2), jax.local_devices(backend="cpu")[0]):
        results = jax.tree.map(np.asarray, jax.jit(_run)(operands))
    return _compare(results, _expect(operands), TOLERANCE)


def find_kernel_difference(operation: str, kernels: registry.Kernels, device: Any) -> str | None:
    """Run one operation through a GPU kernel, in the interpreter if `kernels` say so; as `find_difference`.

    Args:
      operation: name of its folder.
      kernels: with an implementation of it.
      device: that it runs on.

    Raises:
      Exception: of any kind, where the kernel cannot be compiled or run.
    """
    run, expect = KERNEL_CHECKS[operation]
    operands = _make_kernel_operands()
    with _as_in_programs(kernels, device):
        module = kernels.implementation(operation)
        results = jax.jit(lambda operands: run(module, operands))(operands)
        if results is None:
            return "it does not take ordinary operands"
        results = jax.tree.map(np.asarray, results)
    return _compare(results, expect(operands), KERNEL_TOLERANCE)


@contextlib.contextmanager
def _as_in_programs(kernels: registry.Kernels, device: Any) -> Iterator[None]:
    with (
        registry.using(kernels),
        jax.default_device(device),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


def _compare(results: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> str | None:
    for name, exact in expected.items():
        error = float(np.max(np.abs(results[name].astype(np.float32) - exact)))
        if not error <= tolerance * float(np.max(np.abs(exact), initial=1.0)):
            return f"{name} is off by {error:.2g}"
    return None


def _make_operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "x": (ROWS, 256),
        "dense": (6, 256),
        "scale": (256,),
        "qkv": (ROWS, HEADS, GROUP + 2, WIDTH),
        "key": (HEADS, SLOTS, WIDTH),
        "value": (HEADS, SLOTS, WIDTH),
        "frequency": (WIDTH // 2,),
    }
    operands = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, block_format in FORMATS.items():
        data = rng.integers(0, 256, (6, 256 // block_format.values, block_format.nbytes), np.uint8)
        # Scales are float16 numbers at the start or the end of a block: such high bytes make them finite and small.
        data[..., [1, 3, -1]] &= 0x3B
        operands[name] = data
    return operands


def _make_kernel_operands() -> dict[str, np.ndarray]:
    """As models on GPUs have them: head width 64, weights and cache in bfloat16, garbage behind the rows."""
    rng = np.random.default_rng(0)
    half, f32 = ml_dtypes.bfloat16, np.float32
    operands = {
        "x": rng.normal(size=(ROWS, 256)).astype(f32),
        "scale": rng.normal(size=256).astype(f32),
        "gate_up": (rng.normal(size=(512, 256)) / 16).astype(half),
        "qkv": rng.normal(size=(ROWS, HEADS, GROUP + 2, 64)).astype(f32),
        "key": rng.normal(size=(HEADS, SLOTS, 64)).astype(half),
        "value": rng.normal(size=(HEADS, SLOTS, 64)).astype(half),
        "frequency": rng.normal(size=32).astype(f32),
    }
    for name in ("key", "value"):
        operands[name][:, LENGTH + ROWS :] = np.nan
    return operands


# The checks call an implementation itself: the operation would quietly leave to XLA what it does not take.


def _run_attention(module, o):
    angle = jnp.asarray(POSITION)[:, None] * o["frequency"]
    operands = (
        o["qkv"], jnp.cos(angle), jnp.sin(angle), o["key"], o["value"],
        jnp.int32(LENGTH), jnp.asarray(TREE), jnp.asarray(POSITION),
    )  # fmt: skip
    options = {"offset": None, "sliding_window": None, "live": None, "write_only": False}
    if not module.supports(*operands, **options):
        return None
    heads, key, value = module.tree_attention(*operands, **options)
    used = LENGTH + ROWS
    return {"the result": heads, "the cache's keys": key[:, :used], "the cache's values": value[:, :used]}


def _expect_attention(o: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    angle, used = POSITION[:, None] * o["frequency"], LENGTH + ROWS
    key, value = (o[name][:, :used].astype(np.float32) for name in ("key", "value"))
    key[:, LENGTH:] = _rotate(o["qkv"][:, :, -2], angle).swapaxes(0, 1)
    value[:, LENGTH:] = o["qkv"][:, :, -1].swapaxes(0, 1)
    heads = _attend(_rotate(o["qkv"][:, :, :-2], angle), key, value)
    return {"the result": heads, "the cache's keys": key, "the cache's values": value}


def _run_swiglu(module, o):
    norm = (o["scale"], EPSILON)
    if not module.supports(o["x"], o["gate_up"], *norm):
        return None
    return {
        "the result": module.swiglu(o["x"], o["gate_up"]),
        "the result with the norm": module.swiglu(o["x"], o["gate_up"], *norm),
    }


def _expect_swiglu(o: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def combine(x):
        gate, up = np.split(x @ o["gate_up"].astype(np.float32).T, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up

    normed = o["x"] / np.sqrt(np.mean(o["x"] ** 2, axis=1, keepdims=True) + EPSILON) * o["scale"]
    return {"the result": combine(o["x"]), "the result with the norm": combine(normed)}


# Of each operation that has GPU kernels: its results by an implementation, or None if that does not take the operands;
# and by numpy.
KERNEL_CHECKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tree_attention": (_run_attention, _expect_attention),
    "swiglu": (_run_swiglu, _expect_swiglu),
}


def _run(o):
    cos, sin = rope_tables(jnp.asarray(POSITION), o["frequency"])
    heads, key, value = tree_attention(
        o["qkv"], cos, sin, o["key"], o["value"], jnp.int32(LENGTH), jnp.asarray(TREE), jnp.asarray(POSITION)
    )
    out = {
        "linear": linear(o["x"], o["dense"]),
        "swiglu": swiglu(o["x"], o["dense"]),
        "rms_norm": rms_norm(o["x"], o["scale"], EPSILON),
        "rope_tables": jnp.concatenate([cos, sin]),
        "tree_attention": heads,
        "the cache's keys": key,
        "the cache's values": value,
    }
    for name in FORMATS:
        out[f"linear of {name}"] = linear(o["x"], Blocks(o[name], name))
        out[f"take_rows of {name}"] = take_rows(Blocks(o[name], name), jnp.asarray(TAKEN))
    return out


def _expect(o: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x, hidden = o["x"], o["x"] @ o["dense"].T
    angle = POSITION[:, None] * o["frequency"]
    key, value = o["key"].copy(), o["value"].copy()
    key[:, LENGTH : LENGTH + ROWS] = _rotate(o["qkv"][:, :, -2], angle).swapaxes(0, 1)
    value[:, LENGTH : LENGTH + ROWS] = o["qkv"][:, :, -1].swapaxes(0, 1)
    out = {
        "linear": hidden,
        "swiglu": hidden[:, :3] / (1 + np.exp(-hidden[:, :3])) * hidden[:, 3:],
        "rms_norm": x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPSILON) * o["scale"],
        "rope_tables": np.concatenate([np.cos(angle), np.sin(angle)]),
        "tree_attention": _attend(_rotate(o["qkv"][:, :, :-2], angle), key, value),
        "the cache's keys": key,
        "the cache's values": value,
    }
    for name in FORMATS:
        raw = o[name].reshape(6, -1)
        weight = dequantize(raw, GGMLQuantizationType[name.upper()])
        out[f"linear of {name}"] = x @ weight.T
        out[f"take_rows of {name}"] = weight[TAKEN]
    return out


def _rotate(x: np.ndarray, angle: np.ndarray) -> np.ndarray:  # [ROWS, ..., WIDTH], [ROWS, WIDTH / 2]
    angle = angle.reshape(ROWS, *[1] * (x.ndim - 2), -1)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def _attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    slots, width = key.shape[1:]
    scores = np.einsum("tkgh,ksh->tkgs", query, key) / np.sqrt(width)
    seen = np.concatenate([np.ones((ROWS, LENGTH), bool), TREE, np.zeros((ROWS, slots - LENGTH - ROWS), bool)], axis=1)
    weights = np.where(seen[:, None, None], np.exp(scores), 0)
    return np.einsum("tkgs,ksh->tkgh", weights / weights.sum(-1, keepdims=True), value)
