"""Shared by the tests of the native kernels: programs traced with them, random weights, and equality of bits.

Operands are numpy arrays, cut to size before they reach JAX: a program of nothing but native calls compiles in
milliseconds, one slice among them takes 30.
"""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from pallas_kernels import registry
from pallas_kernels.linear.blocks import FORMATS, GROUP_FORMATS, Blocks
from pallas_kernels.native import library

PROBLEM = library.load().problem
needs_native = pytest.mark.skipif(PROBLEM is not None, reason=f"no native CPU kernels: {PROBLEM}")

DENSE = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ALL_FORMATS = (*DENSE, *FORMATS)
XLA = registry.Kernels("xla", "cpu")

# Half a unit in the last place of 1: what one rounding is off by at most, relative to the result.
ROUNDING = 2.0**-24

# Where the float16 scales of a block lie, in bytes; every other byte may hold anything.
SCALES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


@functools.cache
def _traced(function, kernels, options):
    def run(operands):
        with registry.using(kernels):
            return function(*operands, **dict(options))

    return jax.jit(run)


def run(function, *operands, kernels: registry.Kernels, **options):
    """A function of pytrees of arrays under `kernels`, as numpy; one program for each set of shapes and options."""
    # As a single operand: a tuple of operands of another length is another program.
    return jax.tree.map(np.asarray, _traced(function, kernels, tuple(sorted(options.items())))(operands))


def run_native(function, *operands, threads: int = 1, **options):
    """`run` with native kernels."""
    return run(function, *operands, kernels=registry.Kernels("cpu", "cpu", threads), **options)


def block_values(weight_format: str) -> int:
    """Values that one block of a format holds; 1 for plain numbers."""
    return FORMATS[weight_format].values if weight_format in FORMATS else 1


def random_weight(rng: np.random.Generator, weight_format: str, outputs: int, inputs: int, extreme: bool = False):
    """A weight `[outputs, inputs]` with some zeros and tiny numbers; with `extreme`, huge ones as well.

    The bytes of blocks are random; their scales are of both signs, some zero and some denormal float16 numbers.
    """
    if weight_format in DENSE:
        values = rng.normal(size=(outputs, inputs)) * np.where(rng.random((outputs, inputs)) < 0.05, 0, 1)
        values = np.where(rng.random(values.shape) < 0.05, values * 2.0**-20, values)
        if extreme:
            values = np.where(rng.random(values.shape) < 0.05, values * 2.0**13, values)
        return values.astype(DENSE[weight_format])
    block_format = FORMATS[weight_format]
    blocks = (outputs, inputs // block_format.values)
    assert inputs % block_format.values == 0
    data = rng.integers(0, 256, (*blocks, block_format.nbytes), np.uint8)
    kinds = np.stack(
        [
            rng.normal(size=blocks) * 0.02,
            np.zeros(blocks),
            -np.zeros(blocks),
            rng.integers(-1023, 1024, blocks) * 2.0**-24,  # denormal
            rng.normal(size=blocks) * 1e4,
        ]
    )
    if weight_format == "mxfp4":
        data[..., 0] = rng.integers(110, 125, blocks)
        return Blocks(data, weight_format)
    if weight_format in GROUP_FORMATS:
        kind = rng.choice(5, blocks, p=[0.6, 0.1, 0.05, 0.15, 0.1] if extreme else [0.7, 0.1, 0.05, 0.15, 0])
        scale = np.take_along_axis(kinds, kind[None], axis=0)[0]
        fill_groups(rng, data, weight_format, scale)
        return Blocks(data, weight_format)
    for at in SCALES[weight_format]:
        kind = rng.choice(5, blocks, p=[0.6, 0.1, 0.05, 0.15, 0.1] if extreme else [0.7, 0.1, 0.05, 0.15, 0])
        scale = np.take_along_axis(kinds, kind[None], axis=0)[0].astype(np.float16)
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
    return Blocks(data, weight_format)


def fill_groups(rng: np.random.Generator, data: np.ndarray, weight_format: str, scale: np.ndarray) -> None:
    """Write scales and valid zero points into random bytes of a group format; float8 codes become numbers."""
    if weight_format == "int4_g32":
        bits = scale.astype(np.float16).astype(np.float32).view(np.uint32) >> 12
        word = bits << 4 | rng.integers(0, 16, scale.shape, np.uint32)
        data[..., :3] = word[..., None].view(np.uint8)[..., :3]
        return
    data[..., :4] = scale.astype(np.float32)[..., None].view(np.uint8)
    if weight_format.startswith("int4"):
        data[..., 4] = rng.integers(-8, 8, scale.shape, np.int8).view(np.uint8)
    if weight_format.startswith("fp8"):
        codes = data[..., 4:]
        codes[codes & 0x7F == 0x7F] = 0x81


def group_numbers(data: np.ndarray, weight_format: str) -> np.ndarray:
    """The float32 numbers of blocks `[O, n, nbytes]` of a group format, from its definition; `[O, I]`."""
    head = 3 if weight_format == "int4_g32" else 4 if weight_format.startswith("fp8") else 5
    first, codes = data[..., :head].astype(np.uint32), np.ascontiguousarray(data[..., head:])
    if head == 3:
        word = first[..., 0] | first[..., 1] << 8 | first[..., 2] << 16
        scale, zero = (word >> 4 << 12).view(np.float32), (word & 15).astype(np.float32)
    else:
        scale = np.ascontiguousarray(data[..., :4]).view(np.float32)[..., 0]
        zero = data[..., 4].view(np.int8).astype(np.float32) if head == 5 else np.float32(0)
        zero = zero + np.float32(8 if weight_format.startswith("int4") else 0)
    if weight_format.startswith("int4"):
        halves = codes.reshape(*codes.shape[:2], -1, 16)
        codes = np.concatenate([halves % 16, halves // 16], axis=-1).reshape(*codes.shape[:2], -1)
    else:
        codes = codes.view(ml_dtypes.float8_e4m3fn if head == 4 else np.int8)
    values = (codes.astype(np.float32) - np.atleast_1d(zero)[..., None]) * scale[..., None]
    return values.reshape(len(data), -1)


def numbers(weight) -> np.ndarray:
    """The float32 numbers that a weight stands for; of GGUF's blocks, those of the `gguf` package."""
    if not isinstance(weight, Blocks):
        return weight.astype(np.float32)
    data = np.asarray(weight.data)
    if weight.format in GROUP_FORMATS:
        return group_numbers(data, weight.format)
    values = quants.dequantize(data.reshape(len(data), -1), GGMLQuantizationType[weight.format.upper()])
    assert np.isfinite(values).all()
    return values


def random_rows(rng: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Activations `[rows, inputs]`: float32, their sizes differ from row to row."""
    return (rng.normal(size=(rows, inputs)) * np.exp(rng.normal(size=(rows, 1)))).astype(np.float32)


def product_and_bound(x: np.ndarray, weight) -> tuple[np.ndarray, np.ndarray]:
    """The float64 product with a weight, and how far a good float32 sum may be off.

    A sum over n numbers in 16 interleaved parts rounds each number n / 16 times within its part and at most 16 times
    where the parts come together; the product adds a rounding. Each is off by at most `ROUNDING` of the sum of
    magnitudes: a rigorous bound whatever the order within the parts is, and a sixteenth of that of a plain loop.
    """
    x, weight = x.astype(np.float64), numbers(weight).astype(np.float64)
    magnitude = np.abs(x) @ np.abs(weight).T
    return x @ weight.T, (x.shape[1] / 16 + 17) * ROUNDING * magnitude + 1e-37


def assert_close(got: np.ndarray, expected: np.ndarray, bound: np.ndarray, label: str = "") -> None:
    """Every number within its own bound."""
    assert got.dtype == np.float32 and got.shape == expected.shape, label
    error = np.abs(got - expected)
    within = error <= bound
    assert within.all(), f"{label}: off by {error[~within].max()} where {bound[~within].min()} is allowed"


def bits(array) -> np.ndarray:
    """A floating-point array as integers; every NaN counts as the same."""
    array = np.asarray(array)
    integers = array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
    return np.where(np.isnan(array.astype(np.float32)), integers.dtype.type(-1 & 0xFFFF), integers)


def assert_same_bits(got, expected, label: str = "") -> None:
    """Equal dtype, shape and bits, or NaN at the same places."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(bits(got), bits(expected), err_msg=label)
