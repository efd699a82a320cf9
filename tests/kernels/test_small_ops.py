"""SwiGLU, RMS norm, rotary tables, rows of a weight: against float64, and the same bits whatever the other rows are."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ALL_FORMATS,
    ROUNDING,
    XLA,
    assert_close,
    assert_same_bits,
    block_values,
    needs_native,
    numbers,
    product_and_bound,
    random_rows,
    random_weight,
    run,
    run_native,
)
from scipy.special import expit

from pallas_kernels import registry
from pallas_kernels.linear import Blocks, take_rows
from pallas_kernels.linear.blocks import FORMATS
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables
from pallas_kernels.swiglu import swiglu

BOTH = pytest.mark.parametrize("kernels", [XLA, pytest.param(registry.Kernels("cpu", "cpu", 2), marks=needs_native)])


def swiglu_and_bound(x, gate_up):
    """In float64, and how far a good float32 computation may be off: the products' bounds, and a few roundings."""
    hidden, error = product_and_bound(x, gate_up)
    gate, up = np.split(hidden, 2, axis=1)
    gate_error, up_error = np.split(error, 2, axis=1)
    activated = gate * expit(gate)
    # The slope of silu is at most 1.1. A rounding of the exponential's argument g is a factor of exp(|g| / 2^24).
    bound = (1.1 * gate_error + (8 + np.abs(gate)) * ROUNDING * np.abs(activated)) * (np.abs(up) + up_error)
    return activated * up, bound + np.abs(activated) * up_error + 1e-37


@functools.cache
def swiglu_operands(weight_format):
    """Gates from very negative to very positive, 2 x 83 outputs."""
    rng = np.random.default_rng(0)
    inputs = block_values(weight_format) * (2 if weight_format in FORMATS else 100)
    return random_rows(rng, 130, inputs), random_weight(rng, weight_format, 166, inputs)


def swiglus(xs, weights, active_rows=None):
    """Many calls in one program."""
    return [swiglu(x, weight, active_rows) for x, weight in zip(xs, weights, strict=True)]


@needs_native
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_swiglu(weight_format):
    x, weight = swiglu_operands(weight_format)
    alone = np.concatenate([run_native(swiglu, row[None], weight) for row in x])
    assert_close(alone, *swiglu_and_bound(x, weight))
    counts = (1, 2, 3, 8, 17, 64, 130)
    for threads in (1, 2):
        calls = [*(x[:rows] for rows in counts), x], [weight] * len(counts) + [numbers(weight)]
        for got in run_native(swiglus, *calls, threads=threads):
            assert_same_bits(got, alone[: len(got)], f"{len(got)} rows, {threads} threads")
    for active_rows in (1, 2, 9, 64, 129, 130):
        broken = x.copy()
        broken[active_rows:] = np.nan
        got = run_native(swiglu, broken, weight, np.int32(active_rows), threads=2)
        assert_same_bits(got[:active_rows], alone[:active_rows], f"{active_rows} active rows")
    for row in (0, 8):
        broken = x[:9].copy()
        broken[row, 5] = np.nan
        got = run_native(swiglu, broken, weight)
        assert np.isnan(got[row]).all()
        assert_same_bits(np.delete(got, row, axis=0), np.delete(alone[:9], row, axis=0))


@needs_native
def test_swiglu_of_large_gates():
    x = np.array([0, -0.0, 1e-30, 20, -20, 80, -80, 100, -100, 1e4, -1e4, 3e18, -3e18], np.float32)[:, None]
    got = run_native(swiglu, x, np.ones((2, 1), np.float32))
    assert_close(got, *swiglu_and_bound(x, np.ones((2, 1), np.float32)))


def norm(x, scale, eps):
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + float(np.float32(eps))) * scale.astype(np.float64)


@BOTH
@pytest.mark.parametrize("width", [1, 7, 16, 33, 576, 4096])
def test_rms_norm(kernels, width):
    rng = np.random.default_rng(width)
    x, scale = random_rows(rng, 9, width), rng.normal(size=width).astype(np.float32)
    x[3] = 0
    x[4] *= 1e-6  # less than epsilon
    x[5] *= 1e15
    got = run(rms_norm, x, scale, kernels=kernels, eps=1e-5)
    expected = norm(x, scale, 1e-5)
    # The sum of squares has one sign: its relative error is that of a sum in 16 parts, halved by the root.
    assert_close(got, expected, (width / 32 + 16) * ROUNDING * np.abs(expected))


@needs_native
@pytest.mark.parametrize("shape", [(64, 576), (130, 33), (5, 3, 4, 100), (100,), (1, 1, 1), (0, 16)])
def test_rms_norm_of_each_row_by_itself(shape):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[-1]).astype(np.float32)
    got = run_native(rms_norm, x, scale, eps=1e-6)
    assert got.shape == shape
    rows = x.reshape(-1, shape[-1])
    alone = np.array([run_native(rms_norm, row, scale, eps=1e-6) for row in rows], np.float32)
    assert_same_bits(got, alone.reshape(shape))
    assert_same_bits(run_native(rms_norm, x, scale, threads=2, eps=1e-6), got)
    order = rng.permutation(len(rows))
    assert_same_bits(run_native(rms_norm, rows[order], scale, eps=1e-6), alone.reshape(rows.shape)[order])
    if len(rows) > 4:
        for broken in (np.nan, np.inf):
            damaged = rows.copy()
            damaged[4, -1] = broken
            out = run_native(rms_norm, damaged, scale, eps=1e-6)
            assert_same_bits(np.delete(out, 4, axis=0), np.delete(alone.reshape(rows.shape), 4, axis=0))
            assert np.isnan(out[4, -1])


@BOTH
def test_rms_norm_of_bfloat16_is_that_of_its_numbers(kernels):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(2, 3, 40)).astype(ml_dtypes.bfloat16), rng.normal(size=40).astype(ml_dtypes.bfloat16)
    got = run(rms_norm, x, scale, kernels=kernels, eps=1e-5)
    expected = norm(x.astype(np.float32), scale.astype(np.float32), 1e-5)
    assert_close(got, expected, 20 * ROUNDING * np.abs(expected))


def frequencies(width, base=1e4):
    return (base ** -(np.arange(0, width, 2) / width)).astype(np.float32)


@BOTH
@pytest.mark.parametrize("width", [2, 8, 24, 64, 80, 128])
def test_rope_tables(kernels, width):
    position = np.array([0, 1, 2, 3, 127, 128, 2047, 2048, 8191, 131_071, 1_000_003], np.int32)
    frequency = frequencies(width)
    cos, sin = run(rope_tables, position, frequency, kernels=kernels)
    # The angle is a float32 product; all after it is good to a rounding or two.
    angle = (position.astype(np.float32)[:, None] * frequency).astype(np.float64)
    assert_close(cos, np.cos(angle), 3 * ROUNDING * np.ones_like(angle))
    assert_close(sin, np.sin(angle), 3 * ROUNDING * np.ones_like(angle))
    assert (cos[0] == 1).all() and (sin[0] == 0).all()
    # Rows of padding may carry any position.
    tables = run(rope_tables, np.array([-1, -(2**31), 2**31 - 1], np.int32), frequency, kernels=kernels)
    assert (np.abs(tables) <= 1).all()


@needs_native
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_rows_of_a_weight(weight_format, alone):
    """The very numbers, from the first row to the last, some twice; of a zero the sign may differ."""
    rng = np.random.default_rng(0)
    weights, indices = [], []
    for outputs, blocks in ((1, 1), (5, 2), (97, 3)):
        inputs = blocks * (block_values(weight_format) if weight_format in FORMATS else 33)
        weight = random_weight(rng, weight_format, outputs, inputs, extreme=True)
        for index in ([outputs - 1], [0, outputs - 1, outputs // 2, 0], rng.integers(0, outputs, 70)):
            weights.append(weight)
            indices.append(np.asarray(index, np.int32))
    take = functools.partial(rows_of, alone=alone)
    for got, weight, index in zip(run_native(take, weights, indices, threads=2), weights, indices, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, numbers(weight)[index])


def rows_of(weights, indices, alone=False):
    return [take_rows(weight, index, alone) for weight, index in zip(weights, indices, strict=True)]


@needs_native
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_loop_takes_rows_of_a_table_as_it_is(dtype):
    """Not of a copy of the whole table as float32, which would be made in every dispatch."""
    table = (jnp.arange(4096 * 64) % 251).reshape(4096, 64).astype(dtype)

    def add_rows(table, first, count):
        row = functools.partial(take_rows, table, alone=True)
        return jax.lax.fori_loop(0, count, lambda n, total: total + row(first + n[None]), jnp.zeros((1, 64)))

    with registry.using(registry.Kernels("cpu", "cpu", 2)):
        compiled = jax.jit(add_rows).lower(table, jnp.zeros(1, jnp.int32), jnp.int32(3)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes // 8
    got = compiled(table, jnp.array([5], jnp.int32), jnp.int32(3))
    np.testing.assert_array_equal(got[0], np.asarray(table[5:8], np.float32).sum(axis=0))


@pytest.mark.parametrize("weight_format", ALL_FORMATS)
def test_rows_of_a_weight_through_xla(weight_format):
    weight = random_weight(np.random.default_rng(0), weight_format, 7, 2 * block_values(weight_format))
    index = np.array([6, 0, 6], np.int32)
    got = run(take_rows, weight, index, kernels=XLA)
    expected = numbers(weight)[index]
    # In a compiled program a product and the sum after it may round once instead of twice.
    assert_close(got, expected, 2 * ROUNDING * 64 * np.abs(expected).max() * np.ones(expected.shape))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


REFUSED = (
    (swiglu, (zeros(3, 8), zeros(5, 8)), "as many gate as up rows, got 5"),
    (swiglu, (zeros(3, 8), zeros(6, 7)), r"\(3, 8\) and \(6, 7\)"),
    (swiglu, (zeros(3, 8), zeros(6, 8, dtype=np.int8)), r"int8 \(6, 8\)"),
    (swiglu, (zeros(3, 32), Blocks(zeros(6, 1, 18, dtype=np.uint8), "q8_0")), r"\(6, 1, 18\)"),
    *((rms_norm, (zeros(3, 8), zeros(*shape), 1e-5), r"\(3, 8\)") for shape in ((7,), (9,), (3, 8), ())),
    (rope_tables, (zeros(2, 3, dtype=np.int32), zeros(4)), r"\(2, 3\)"),
    (rope_tables, (np.int32(1), zeros(4)), r"\(\)"),
    (rope_tables, (zeros(3, dtype=np.int32), zeros(4, 1)), r"\(4, 1\)"),
    (rope_tables, (zeros(3), zeros(4)), "float32"),
    (rope_tables, (zeros(3, dtype=np.int32), zeros(4, dtype=ml_dtypes.bfloat16)), "bfloat16"),
    (take_rows, (Blocks(zeros(5, 2, 18, dtype=np.uint8), "q8_0"), zeros(2, dtype=np.int32)), r"\(5, 2, 18\)"),
    (take_rows, (Blocks(zeros(5, 34, dtype=np.uint8), "q8_0"), zeros(2, dtype=np.int32)), r"\(5, 34\)"),
    (take_rows, (Blocks(zeros(5, 2, 34, dtype=np.uint8), "q9_0"), zeros(2, dtype=np.int32)), "q9_0"),
    (take_rows, (Blocks(zeros(5, 2, 34, dtype=np.int8), "q8_0"), zeros(2, dtype=np.int32)), "int8"),
    (take_rows, (Blocks(zeros(5, 2, 34, dtype=np.uint8), "q8_0"), zeros(2, 1, dtype=np.int32)), r"\(2, 1\)"),
)


@BOTH
def test_operands_that_do_not_fit_are_refused(kernels):
    with registry.using(kernels):
        for operation, operands, message in REFUSED:
            with pytest.raises(ValueError, match=message):
                operation(*operands)


@needs_native
@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    st.sampled_from(ALL_FORMATS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1)
)
def test_operations_on_any_rows(weight_format, rows, columns, threads, seed):
    rng = np.random.default_rng(seed)
    inputs = block_values(weight_format) if weight_format in FORMATS else int(rng.integers(1, 200))
    x, weight = random_rows(rng, rows, inputs), random_weight(rng, weight_format, 2 * columns, inputs)
    scale = rng.normal(size=inputs).astype(np.float32)
    position, frequency = rng.integers(0, 5000, rows).astype(np.int32), frequencies(2 * columns)
    chosen = rng.integers(0, rows, rng.integers(1, 40))
    index = rng.integers(0, 2 * columns, rows).astype(np.int32)

    expected = run_native(_operations, x, weight, scale, position, frequency, index, threads=threads)
    again = run_native(_operations, x[chosen], weight, scale, position[chosen], frequency, index[chosen])
    for got, of_all in zip(again, expected, strict=True):
        assert_same_bits(got, of_all[chosen])
    assert_close(expected[0], *swiglu_and_bound(x, weight))
    np.testing.assert_array_equal(expected[4], numbers(weight)[index])


def _operations(x, weight, scale, position, frequency, index):
    return (swiglu(x, weight), rms_norm(x, scale, 1e-5), *rope_tables(position, frequency), take_rows(weight, index))
