"""The native delta rule, its fold and its short convolution: XLA's results, and bits that no neighbour changes."""

import numpy as np
import pytest
from kernel_cases import XLA, assert_same_bits, needs_native, run, run_native
from test_levels import LEVELS, use_level  # noqa: F401

from pallas_kernels.delta_rule import DeltaRows, KeptRows, delta_fold, delta_rule, short_conv

BLOCK = 32
# Hk, g, K, V: one of everything, widths of no lane, of several, of a published model, and wide groups.
SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 1, 33, 17), (1, 2, 128, 128), (2, 5, 16, 80)]


def make(sizes, rows, first, offset=0, seed=0):
    """Rows, kept rows with NaN wherever no row may read, a tree's mask and which rows are late."""
    heads, group, key, value = sizes
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    def rates(*shape):
        return rng.uniform(0.01, 1, shape).astype(np.float32)

    new = DeltaRows(
        normal(rows, heads, key, scale=key**-0.5), normal(rows, heads, key, scale=key**-0.5),
        normal(rows, heads, group, value), rates(rows, heads, group), rates(rows, heads, group),
    )  # fmt: skip
    kept = KeptRows(
        normal(heads, first + offset + rows + 3, key, scale=key**-0.5),
        normal(heads, first + offset + rows + 3, group * value), rates(heads, first + offset + rows + 3, group),
        normal(heads, key, group * value),
    )  # fmt: skip
    mask = np.eye(rows, offset + rows, offset, dtype=bool)
    mask[:, : min(offset, 1)] = True
    for row in range(1, rows):
        mask[row] |= mask[max(0, row - int(rng.integers(1, 4)))]
    for array in kept[:3]:
        array[:, first + offset :] = np.nan
        array[:, first + 1 : first + offset] = np.nan  # slots of the window that no row sees
    return new, kept, np.int32(first), mask, (rng.random(rows) < 0.4) & (first >= BLOCK), np.int32(offset)


def pick(new, mask, late, index):
    return DeltaRows(*(array[index] for array in new)), mask[index], late[index]


@pytest.mark.thorough
@needs_native
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("rows", "first", "offset"), [(1, 0, 0), (1, 40, 0), (5, 3, 0), (8, 63, 4), (32, 95, 0)])
def test_trees_equal_xlas_within_rounding(sizes, rows, first, offset):
    operands = make(sizes, rows, first, offset)
    out, kept = run_native(delta_rule, *operands, block=BLOCK, threads=2)
    finite = list(operands)
    finite[1] = KeptRows(*(np.nan_to_num(array) for array in operands[1]))
    expected, rule = run(delta_rule, *finite, kernels=XLA, block=BLOCK)
    assert np.abs(out - expected).max() <= 2e-5 * np.abs(expected).max()
    written = slice(first + offset, first + offset + rows)
    np.testing.assert_allclose(kept.value[:, written], rule.value[:, written], rtol=1e-4, atol=1e-5)
    for got, old, exact in zip(kept[:3], operands[1], rule, strict=False):
        assert_same_bits(got[:, : written.start], old[:, : written.start])
        assert_same_bits(got[:, written.stop :], old[:, written.stop :])
        del exact
    assert_same_bits(kept.key[:, written], operands[0].key.swapaxes(0, 1))


@needs_native
@pytest.mark.parametrize("rows", range(1, 33))
def test_a_row_has_the_same_bits_alone_and_among_any_others(rows):
    """Row by row, each after its ancestors; threads change nothing, nor do inactive rows."""
    sizes = (2, 2, 20, 18)
    new, kept, first, mask, late, _ = make(sizes, rows, 40, seed=rows)
    whole, after = run_native(delta_rule, new, kept, first, mask, late, np.int32(0), block=BLOCK, threads=3)
    layer = kept
    for row in {0, rows // 2, rows - 1} if rows > 8 else range(rows):
        # The rows before it are there already.
        layer = KeptRows(*(old.copy() for old in kept))
        for old, done in zip(layer[:3], after[:3], strict=True):
            old[:, 40 : 40 + row] = done[:, 40 : 40 + row]
        one, own, its = pick(new, mask, late, slice(row, row + 1))
        alone, _ = run_native(delta_rule, one, layer, first, own, its, np.int32(row), block=BLOCK)
        assert_same_bits(alone[0], whole[row])
    some, _ = run_native(
        delta_rule, new, kept, first, mask, late, np.int32(0), block=BLOCK, active_rows=np.int32((rows + 1) // 2)
    )
    assert_same_bits(some[: (rows + 1) // 2], whole[: (rows + 1) // 2])
    assert not some[(rows + 1) // 2 :].any()


@needs_native
@pytest.mark.parametrize("sizes", SIZES)
def test_late_rows_use_the_bits_of_the_folded_state(sizes):
    new, kept, first, mask, _, offset = make(sizes, 4, 50)
    out, _ = run_native(delta_rule, new, kept, first, mask, np.ones(4, bool), offset, block=BLOCK)
    state = run_native(delta_fold, kept, np.int32(3), block=BLOCK, threads=2)
    expected = run(delta_fold, kept, np.int32(3), kernels=XLA, block=BLOCK)
    assert np.abs(state - expected).max() <= 1e-5 * np.abs(expected).max()
    rolled = KeptRows(*(np.ascontiguousarray(array[:, BLOCK:]) for array in kept[:3]), state)
    later, _ = run_native(delta_rule, new, rolled, first - BLOCK, mask, np.zeros(4, bool), offset, block=BLOCK)
    assert_same_bits(later, out)


@needs_native
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("heads", "width", "taps"), [(1, 1, 2), (3, 37, 4), (2, 384, 4), (4, 16, 3)])
def test_short_convolutions(heads, width, taps, silu):
    rng = np.random.default_rng(0)
    weight, kept, x = (rng.normal(size=shape).astype(np.float32) for shape in ((heads, width, taps), (heads, 9, width),
                                                                             (12, heads, width)))  # fmt: skip
    kept[:, 6:] = np.nan
    before = rng.integers(-3, 6, (taps - 1, 12)).astype(np.int32)
    before[-1, 1:] = 6 + np.arange(11)
    operands = weight, kept, x, before, np.int32(6)
    out = run_native(short_conv, *operands, silu=silu, threads=2)
    finite = weight, np.nan_to_num(kept), *operands[2:]
    np.testing.assert_allclose(out, run(short_conv, *finite, kernels=XLA, silu=silu), rtol=1e-5, atol=1e-5)
    kept[:, 6:] = x[:3].swapaxes(0, 1)  # the same rows, some of them kept
    later = run_native(short_conv, weight, kept, x[3:], np.ascontiguousarray(before[:, 3:]), np.int32(9), silu=silu)
    assert_same_bits(later, out[3:])


@needs_native
@pytest.mark.parametrize(("first", "offset"), [(-1, 0), (0, -1), (41, 3), (2**31 - 1, 1)])
def test_rows_beyond_the_kept_ones_are_refused(first, offset):
    new, kept, _, mask, late, _ = make((1, 1, 4, 4), 2, 40)
    with pytest.raises(Exception, match="do not lie among the kept ones"):
        run_native(delta_rule, new, kept, np.int32(first), mask, late, np.int32(offset), block=BLOCK)


def test_shapes_that_do_not_fit_are_refused():
    new, kept, first, mask, late, offset = make((2, 1, 4, 4), 2, 40)
    with pytest.raises(ValueError, match="needs float32"):
        delta_rule(new._replace(query=new.query[:, :1]), kept, first, mask, late, offset, block=BLOCK)
    with pytest.raises(ValueError, match="needs bool"):
        delta_rule(new, kept, first, mask[:1], late, offset, block=BLOCK)


@needs_native
def test_vector_levels_agree_in_every_bit(use_level):  # noqa: F811
    if not {"avx2", "avx512"} <= {*LEVELS}:
        pytest.skip("this machine does not run both, or they were not built")
    results = []
    for level in ("avx2", "avx512", "vnni"):
        if level in LEVELS:
            use_level(level)
            operands = make((2, 3, 21, 19), 9, 70)
            rule = lambda *rows: delta_rule(*rows, block=BLOCK)  # noqa: E731
            fold = lambda kept, first: delta_fold(kept, first, block=BLOCK)  # noqa: E731
            results.append((run_native(rule, *operands)[0], run_native(fold, *operands[1:3])))
    for got in results[1:]:
        for one, other in zip(got, results[0], strict=True):
            assert_same_bits(one, other)
