"""The largest numbers of rows: as a stable sort has them, and the same bits whatever the other rows and threads are."""

import numpy as np
import pytest
from kernel_cases import assert_same_bits, needs_native, run_native

from pallas_kernels.row_top import MAX_COUNT, row_top

LARGEST = np.finfo(np.float32).max


def expect(values, count):
    """Columns and numbers by a stable sort, and the logarithm of the sum in float64."""
    tidied = np.where(np.isnan(values), -np.inf, np.minimum(values, LARGEST)).astype(np.float64)
    column = np.argsort(-tidied, axis=1, kind="stable")[:, :count]
    top = np.maximum(tidied.max(axis=1, keepdims=True), -LARGEST)
    total = top[:, 0] + np.log(np.maximum(np.exp(tidied - top).sum(axis=1), 1.0))
    return np.take_along_axis(tidied, column, axis=1), column, total


def make_rows(kind, rows, columns):
    rng = np.random.default_rng(columns)
    values = rng.normal(scale=4, size=(rows, columns)).astype(np.float32)
    if kind == "ties":
        values = rng.integers(-2, 3, values.shape).astype(np.float32) * rng.choice([1, -0.0], values.shape)
    elif kind == "few":
        values[rng.random(values.shape) < 0.98] = -np.inf
    elif kind == "broken":
        values[rng.random(values.shape) < 0.3] = np.nan
        values[0, columns // 2 :] = np.inf
        values[-1] = np.nan
    return values.astype(np.float32)


@needs_native
@pytest.mark.parametrize("kind", ["numbers", "ties", "few", "broken"])
@pytest.mark.parametrize("columns", [1, 63, 64, 1000, 50000])
def test_row_top(kind, columns):
    values = make_rows(kind, 5, columns)
    for count in sorted({min(n, columns) for n in (1, 2, 20, MAX_COUNT)}):
        best, column, total = run_native(row_top, values, count=count, with_total=True)
        sorted_best, sorted_column, sum_total = expect(values, count)
        np.testing.assert_array_equal(column, sorted_column)
        np.testing.assert_array_equal(best, sorted_best.astype(np.float32))
        assert not np.signbit(best[best == 0]).any()
        np.testing.assert_allclose(total, sum_total, rtol=1e-6, atol=1e-6)
        for threads in (1, 2, 3):
            alone = run_native(row_top, values[3:4], count=count, with_total=True, threads=threads)
            for got, expected in zip(alone, (best, column, total), strict=True):
                assert_same_bits(got, expected[3:4])


@needs_native
def test_without_a_total():
    values = make_rows("numbers", 3, 300)
    assert run_native(row_top, values, count=2)[2].shape == (0,)


@needs_native
@pytest.mark.parametrize(
    ("values", "count"),
    [
        (np.zeros(4, np.float32), 1),
        (np.zeros((2, 4), np.float16), 1),
        (np.zeros((2, 4), np.float32), 5),
        (np.zeros((2, 4), np.float32), 0),
        (np.zeros((2, 400), np.float32), MAX_COUNT + 1),
    ],
)
def test_what_is_refused(values, count):
    with pytest.raises(ValueError, match="row_top needs float32"):
        row_top(values, count)
