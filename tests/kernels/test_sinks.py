"""Attention sinks: a score of each query head that weighs no value, natively and with XLA."""

import dataclasses

import numpy as np
import pytest
from attention_cases import expected_and_bound, random_case, random_parents, tree_mask
from kernel_cases import XLA, assert_same_bits, needs_native, run
from test_native_attention import _attend, assert_right, assert_same_rows, attend, token_by_token

from pallas_kernels import registry
from pallas_kernels.tree_attention import tree_attention

MODEL = (2, 3, 24, "float32")
GPU = registry.Kernels("xla", "gpu")  # whose XLA form is the reference


def with_sinks(rng, rows, length, parents=None, sliding_window=None, size=1.0):
    case = random_case(rng, MODEL, rows, length, parents, sliding_window)
    return dataclasses.replace(case, sinks=(3 + size * rng.normal(size=MODEL[:2])).astype(np.float32))


CASES = {
    "tree": dict(rows=9, length=150, parents=True),
    "tree in a window": dict(rows=9, length=150, parents=True, sliding_window=5),
    "first tree": dict(rows=4, length=0, parents=True),
    "chunk": dict(rows=130, length=40),
    "chunk in a window": dict(rows=20, length=140, sliding_window=7),
    "first chunk": dict(rows=12, length=0),
}


def make(name, size=1.0):
    rng, options = np.random.default_rng(3), dict(CASES[name])
    if options.get("parents"):
        options["parents"] = random_parents(rng, options["rows"])
    return with_sinks(rng, **options, size=size)


@needs_native
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_native(name, size):
    """Also sinks that leave next to nothing to the keys."""
    case = make(name, size)
    out, _, _ = assert_right(case)
    without, _, _ = attend(dataclasses.replace(case, sinks=None))
    assert np.abs(out - without).max() > 1e-3


@pytest.mark.parametrize("kernels", [XLA, GPU], ids=["blocked", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_xla(name, kernels):
    case = make(name)
    operands = (case.qkv, case.cos, case.sin, case.key, case.value, np.int32(case.length), case.mask, case.position)
    out, key, value = run(
        _attend, *operands, None, None, case.sinks,
        kernels=kernels, sliding_window=case.sliding_window, write_only=False,
    )  # fmt: skip
    exact, _ = expected_and_bound(case, key, value)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)


@needs_native
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_bits_are_those_of_decoding_token_by_token(sliding_window):
    rng = np.random.default_rng(0)
    parents = random_parents(rng, 9)
    case = with_sinks(rng, 9, 125, parents, sliding_window)
    _, depth = tree_mask(parents)
    rows = token_by_token(case, depth, parents)
    for threads in (1, 4):
        assert_same_rows(case, attend(case, threads), rows)


@needs_native
def test_dead_rows_leave_the_others_as_they_are():
    case = make("tree")
    whole, some = attend(case)[0], attend(case, active_rows=4)[0]
    assert_same_bits(some[:4], whole[:4])
    assert np.isfinite(some).all()


def test_sinks_that_do_not_fit_are_refused():
    case = make("tree")
    operands = (case.qkv, case.cos, case.sin, case.key, case.value, np.int32(case.length), case.mask, case.position)
    for sinks in (case.sinks[:1], case.sinks.astype(np.float16)):
        with pytest.raises(ValueError, match=r"sinks must be float32 \(2, 3\)"):
            tree_attention(*operands, sinks=sinks)
