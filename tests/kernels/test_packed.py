"""Packed weights, activations of 8 and 16 bits: exact integer sums, the same bits whatever the other rows are."""

import functools

import jax
import numpy as np
import pytest
from kernel_cases import assert_same_bits, needs_native, numbers, random_rows, random_weight, run_native
from marks import quick_part

from pallas_kernels.linear import Blocks, linear, take_rows
from pallas_kernels.linear.blocks import FORMATS, packed_name
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.swiglu import swiglu

pytestmark = needs_native

FORMAT_NAMES = tuple(name for name, block_format in FORMATS.items() if block_format.has_integers)
# A last group of sixteen outputs, of fewer, and fewer in all.
OUTPUTS = (32, 39, 7)
INPUTS = 512


BITS = {"int8": 127, "int16": 127 * 256}


@functools.cache
def operands(name, outputs, activations, rows=35):
    rng = np.random.default_rng([outputs, rows])
    weight = random_weight(rng, name, outputs, INPUTS)
    data = pack_blocks(np.asarray(weight.data), name, outputs)
    return random_rows(rng, rows, INPUTS), weight, Blocks(data, packed_name(name, activations))  # pyright: ignore[reportArgumentType]


def round_rows(x, activations):
    """Values of rounded activations, float64: 32 inputs share a scale, the largest one is 127, or 127 * 256."""
    most = np.float32(BITS[activations])
    units = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(units).max(-1, keepdims=True)
    tiny = largest < 1e-36
    codes = np.rint(units * (most / np.where(tiny, np.float32(1), largest)))
    scale = np.where(tiny, np.float32(0), largest / most).astype(np.float64)
    return (codes * scale).reshape(x.shape)


@pytest.fixture(params=BITS)
def activations(request):
    return request.param


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_products_are_those_of_rounded_rows(name, outputs, activations):
    x, weight, packed = operands(name, outputs, activations)
    x = x.copy()
    x[0], x[1] = 0, 1e-38
    rounded, exact = round_rows(x, activations), numbers(weight).astype(np.float64)
    got = run_native(linear, x, packed)
    bound = np.abs(rounded) @ np.abs(exact).T
    # Each of the sums of 16 unit products rounds a few times. Minima are added apart from what they cancel.
    if name in ("q4_1", "q4_k", "q5_k"):
        bound = bound + 4 * np.abs(rounded).sum(-1, keepdims=True) * np.abs(exact).max(-1)
    assert (np.abs(got - rounded @ exact.T) <= 3e-6 * bound + 1e-30).all()
    assert not got[:2].any()


@pytest.mark.parametrize("name", quick_part(FORMAT_NAMES, lambda name: name in ("q4_0", "q6_k", "int4_g64", "mxfp4")))
def test_a_row_has_the_same_bits_alone_and_beside_others(name, activations):
    x, _, packed = operands(name, 39, activations)
    alone = np.concatenate([run_native(linear, row[None], packed) for row in x])
    for place, count in enumerate((2, 3, 5, 8, 9, 16, 17, 35), FORMAT_NAMES.index(name)):
        threads = 1 + place % 3  # over all formats, each count meets each number of threads
        assert_same_bits(run_native(linear, x[:count], packed, threads=threads), alone[:count])
    assert_same_bits(run_native(linear, x[::-1].copy(), packed), alone[::-1])


@pytest.mark.parametrize("outputs", (64, 14))
@pytest.mark.parametrize("name", ("q4_1", "q6_k"))
def test_swiglu_is_made_of_the_same_products(name, outputs, activations):
    """Also where gate and up share a group of sixteen outputs."""
    x, _, packed = operands(name, outputs, activations)
    both = run_native(linear, x, packed)
    gate, up = np.split(both.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        exact = gate / (1 + np.exp(-gate)) * up
    for threads in (1, 2):
        got = run_native(swiglu, x, packed, threads=threads)
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_taken_rows_are_the_numbers_of_the_file(name, outputs):
    _, weight, packed = operands(name, outputs, "int8")
    index = np.array([outputs - 1, 0, outputs // 2], np.int32)
    rows = Blocks(np.asarray(weight.data)[index], name)  # pyright: ignore[reportArgumentType]
    assert_same_bits(run_native(take_rows, packed, index), numbers(rows))


@pytest.mark.parametrize("name", ("q8_0", "q4_k"))
def test_broken_numbers_stay_in_their_row(name, activations):
    x, _, packed = operands(name, 39, activations)
    whole = run_native(linear, x, packed)
    for broken in (np.nan, np.inf, -np.inf):
        rows = x.copy()
        rows[3, 40] = broken
        got = run_native(linear, rows, packed)
        assert np.isnan(got[3]).all()
        others = np.arange(len(x)) != 3
        assert_same_bits(got[others], whole[others])


def test_what_cannot_be_packed_is_refused():
    data = np.zeros((4, 2, 18), np.uint8)
    for rows, name, outputs in (
        (data, "q8_0", 4),
        (data, "f32", 4),
        (np.zeros((4, 2, 36), np.uint8), "fp8_g32", 4),
        (data.astype(np.int8), "q4_0", 4),
        (data, "q4_0", 3),
    ):
        with pytest.raises(ValueError, match="is no array of"):
            pack_blocks(rows, name, outputs)
    weight = Blocks(np.zeros((4, 2, 19), np.uint8), packed_name("q4_0", "int8"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="blocks"):
        jax.eval_shape(linear, np.zeros((1, 64), np.float32), weight)
