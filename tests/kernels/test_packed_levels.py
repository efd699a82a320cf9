"""Packed weights with the library of every instruction set: sums as large as they can be, every number of rows."""

import ctypes
import functools

import numpy as np
import pytest
from kernel_cases import assert_same_bits, needs_native, numbers, random_rows, random_weight, run_native
from test_levels import LEVELS, use_level  # noqa: F401  (a fixture)
from test_packed import BITS, FORMAT_NAMES, INPUTS, round_rows

from pallas_kernels.linear import Blocks, linear
from pallas_kernels.linear.blocks import packed_name
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.native import library

pytestmark = needs_native

ROWS, OUTPUTS = 35, 23
# Bytes of a block before its codes and after them, where those are not all.
HEADS = {"q8_0": 2, "q4_0": 2, "q4_1": 4, "q5_0": 2, "q4_k": 16, "q5_k": 16, "q6_k": 0, "mxfp4": 1, "int4_g32": 3}
TAILS = {"q6_k": 18}


@functools.cache
def operands():
    """Rows `[ROWS, INPUTS]`, and a weight of each format with the largest and the smallest codes."""
    rng = np.random.default_rng(5)
    x = random_rows(rng, ROWS, INPUTS)
    x[0], x[1], x[2] = 1, -1, np.where(np.arange(INPUTS) % 2, 1, -1)
    weights = {}
    for name in FORMAT_NAMES:
        weight = random_weight(rng, name, OUTPUTS, INPUTS)
        data = np.asarray(weight.data)
        end = data.shape[-1] - TAILS.get(name, 0)
        for output, byte in enumerate((0xFF, 0x00, 0x7F, 0x80)):
            data[output, :, HEADS.get(name, 5) : end] = byte
        weights[name] = weight
    return x, weights


@functools.cache
def product_of(level):
    return lambda x, packed, count: [linear(x, weight, count) for weight in packed]


@pytest.mark.parametrize("activations", BITS)
@pytest.mark.parametrize("level", library.LEVELS)
def test_products_of_any_number_of_rows(level, activations, use_level, anew):  # noqa: F811
    if level not in LEVELS:
        pytest.skip(f"this machine does not run {level}, or it was not built")
    x, weights = operands()
    packed = [
        Blocks(pack_blocks(np.asarray(weight.data), name, OUTPUTS), packed_name(name, activations))  # pyright: ignore[reportArgumentType]
        for name, weight in weights.items()
    ]
    use_level(level)
    run = functools.partial(run_native, product_of(level), x, packed, threads=2)
    whole = run(np.int32(ROWS))
    rounded = round_rows(x, activations)
    for (name, weight), got in zip(weights.items(), whole, strict=True):
        exact = numbers(weight).astype(np.float64)
        bound = np.abs(rounded) @ np.abs(exact).T
        # Minima are added apart from what they cancel.
        bound += 4 * np.abs(rounded).sum(-1, keepdims=True) * np.abs(exact).max(-1)
        assert (np.abs(got - rounded @ exact.T) <= 3e-6 * bound + 1e-30).all(), name
    for count in range(1, 18):
        for name, got, expected in zip(weights, run(np.int32(count)), whole, strict=True):
            assert_same_bits(got[:count], expected[:count], f"{name}, {count} rows")
    if level not in ("portable", LEVELS[0]):
        use_level(LEVELS[0])
        best = run_native(product_of(LEVELS[0]), x, packed, np.int32(ROWS), threads=2)
        for name, got, expected in zip(weights, whole, best, strict=True):
            assert_same_bits(got, expected, name)


def test_a_machine_runs_the_levels_below_its_own():
    built = ctypes.CDLL(str(next(iter(library.find().values()))))
    levels = ctypes.CFUNCTYPE(ctypes.c_char_p)(("jaxspec_levels", built))().decode().split()
    assert levels == [level for level in library.LEVELS if level in levels] and levels[-1] == "portable"
    for chain in (("amx", "vnni", "avx512", "avx2"), ("avxvnni", "avx2"), ("i8mm", "dotprod")):
        assert [level in levels for level in chain] == sorted(level in levels for level in chain)


@pytest.mark.parametrize("activations", BITS)
@pytest.mark.parametrize("units", [0, 1, 2, 3, 5, 6, 33])  # AMX begins sums three units before it scales them
def test_products_of_few_units(units, activations, anew):
    rng = np.random.default_rng(units)
    x, weight = random_rows(rng, 17, 32 * units), random_weight(rng, "q4_1", 17, 32 * units)
    packed = Blocks(pack_blocks(np.asarray(weight.data), "q4_1", 17), packed_name("q4_1", activations))  # pyright: ignore[reportArgumentType]
    few, *more = (run_native(linear, x, packed, np.int32(count))[:12] for count in (12, 13, 16, 17))
    assert all(np.array_equal(few, many) for many in more)


@pytest.mark.parametrize("activations", BITS)
@pytest.mark.parametrize("level", LEVELS)
def test_products_of_more_units_than_are_kept_and_of_a_part_of_a_tile(level, activations, use_level, anew):  # noqa: F811
    """AMX keeps the codes of 32 units of 32 inputs, and tiles have eight or sixteen rows; here both end with fewer."""
    rng = np.random.default_rng(6)
    x, outputs = random_rows(rng, 50, 1152), 151
    packed = []
    for name in ("q4_1", "q5_0", "q8_0", "mxfp4", "int4_g128", "int8_g32"):
        weight = random_weight(rng, name, outputs, 1152)
        data = pack_blocks(np.asarray(weight.data), name, outputs)
        packed.append(Blocks(data, packed_name(name, activations)))  # pyright: ignore[reportArgumentType]
    use_level(level)
    for threads in (1, 2):
        run = functools.partial(run_native, product_of(level), x, packed, threads=threads)
        whole = run(np.int32(50))
        for count in (12, 13, 16, 17, 31, 32, 49):
            for weight, got, expected in zip(packed, run(np.int32(count)), whole, strict=True):
                assert_same_bits(got[:count], expected[:count], f"{weight.format}, {count} rows")
    if level not in ("portable", LEVELS[0]):
        use_level(LEVELS[0])
        best = run_native(product_of(LEVELS[0]), x, packed, np.int32(50), threads=2)
        for weight, got, expected in zip(packed, whole, best, strict=True):
            assert_same_bits(got, expected, weight.format)
