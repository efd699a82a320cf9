"""The attention for TPUs in Pallas' interpreter, which leaves NaN in all that no program wrote; compiled by libtpu."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from attention_cases import Interpreted, grown_case, random_case, random_parents
from marks import quick_part

from pallas_kernels import registry, selection
from pallas_kernels.tree_attention import mosaic_tpu

KERNELS = registry.Kernels("mosaic-tpu", "tpu", implementations=(("tree_attention", "mosaic_tpu"),), interpret=True)
ATTENTION = Interpreted(mosaic_tpu, KERNELS, {"float32": 2e-6, "bfloat16": 6e-3})
assert_right = ATTENTION.assert_right
# Blocks of 256 slots; the last one begins before the end of the one before.
SLOTS = 592
WINDOW_BLOCKS = mosaic_tpu._window_blocks
LENGTHS = (0, 1, 255, 256, 300)

# K, G, H and the cache's dtype; rows.
TREES = (
    ((2, 4, 128, "bfloat16"), 8),
    ((2, 3, 128, "float32"), 13),
    ((1, 1, 128, "bfloat16"), 1),
    ((1, 8, 128, "bfloat16"), 70),  # two blocks of rows, the last one not full
    ((1, 2, 256, "float32"), 17),
)


@pytest.mark.parametrize("model, rows", quick_part(TREES, lambda _, rows: rows in (1, 13)), ids=str)
def test_trees(model, rows):
    rng = np.random.default_rng(0)
    for length in (*LENGTHS, SLOTS - rows):
        assert_right(random_case(rng, model, rows, length, random_parents(rng, rows), slots=SLOTS))


def test_a_tree_that_grows():
    rng = np.random.default_rng(2)
    for length, offset in ((0, 0), (31, 1), (250, 31), (256, 35)):
        assert_right(grown_case(rng, (1, 4, 128, "bfloat16"), 5, length, offset, 70, slots=SLOTS))


@pytest.mark.thorough
@pytest.mark.parametrize("sliding_window", [5, 300, None])
def test_causal_chunks_and_sliding_windows(sliding_window):
    rng = np.random.default_rng(1)
    for length in (0, 63, 400):
        case = random_case(rng, (1, 8, 128, "float32"), 100, length, sliding_window=sliding_window, slots=SLOTS)
        assert_right(case)
    if sliding_window is not None:
        assert_right(random_case(rng, (2, 3, 128, "float32"), 13, 400, random_parents(rng, 13), sliding_window, SLOTS))


@pytest.mark.thorough
def test_the_check_before_it_is_used():
    """Which the kernel passes, and finds a tree's mask that is not read."""
    check = functools.partial(selection.find_failure.__wrapped__, "tree_attention", "mosaic_tpu")
    base = dataclasses.replace(KERNELS, implementations=())
    assert check(base, jax.devices()[0]) is None
    with mock.patch.object(mosaic_tpu, "_window_blocks", lambda mask, *rest: WINDOW_BLOCKS(mask | True, *rest)):
        assert "tree_attention by mosaic_tpu fails its check: of a tree" in check(base, jax.devices()[0])


@pytest.mark.thorough
def test_rows_are_apart():
    rng = np.random.default_rng(4)
    case = random_case(rng, (2, 3, 128, "bfloat16"), 13, 100, random_parents(rng, 13), slots=SLOTS)
    ATTENTION.assert_rows_are_apart(rng, case, None, (1, 5, 13))
