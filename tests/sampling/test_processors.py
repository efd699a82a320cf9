"""`process` against the brute-force reference, whole and split over devices; edges by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from marks import quick_part
from sampling_cases import CASES, PADDED, ROWS, SHARDS, VOCAB, run
from sampling_reference import process_reference

from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.processors import (
    _MOST_TOKENS,
    cut_top_k,
    cut_top_p,
    fixed_point,
    from_fixed_point,
    from_sampling,
)

_INF = np.inf


def _kept(logprobs):
    return logprobs > -_INF


def check_row(actual, logits, params, prompt=(), output=()):
    """One row equals the reference, but for tokens within rounding (1e-6) of the edge of top-p or min-p."""

    def reference(slack):
        top_p = params.top_p if params.top_p == 1 else min(max(params.top_p + slack, 1e-38), 1.0)
        min_p = params.min_p if params.min_p in (0, 1) else params.min_p - slack * params.min_p
        edge = dataclasses.replace(params, top_p=top_p, min_p=min_p)
        return process_reference(logits, edge, prompt, output, VOCAB)

    assert not np.isnan(actual).any()
    narrow, wide = reference(-1e-6), reference(1e-6)
    assert (_kept(narrow) <= _kept(actual)).all() and (_kept(actual) <= _kept(wide)).all()
    if _kept(actual).any():
        # The kept tokens have the wide result's ratios and sum to one.
        expected = np.where(_kept(actual), wide, -_INF)
        expected = expected - np.log(np.exp(expected).sum())
        np.testing.assert_allclose(actual[_kept(actual)], expected[_kept(actual)], rtol=2e-6, atol=2e-6)


@given(CASES)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_process_equals_reference(case):
    logprobs = run(**case)[0]
    for row, logits in zip(logprobs, case["logits"], strict=True):
        check_row(row, logits, case["params"], case["prompt"], case["output"])


@pytest.mark.parametrize("num_shards", quick_part(SHARDS, lambda num_shards: num_shards in (3, 8)))
def test_sharded_equals_whole(num_shards):
    @given(CASES)
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    def check(case):
        logprobs, token, logprob, history = run(**case)
        sharded = run(**case, num_shards=num_shards)
        # The cuts and the draw are exact; only the normalising sum rounds in another order.
        np.testing.assert_array_equal(_kept(sharded[0]), _kept(logprobs))
        np.testing.assert_allclose(sharded[0], logprobs, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(sharded[1], token)
        np.testing.assert_allclose(sharded[2], logprob, rtol=1e-6, atol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, sharded[3], history)

    check()


@pytest.mark.parametrize("size", [1, 7, 1000, 4096])
def test_cuts_of_long_rows(size):
    rng = np.random.default_rng(size)
    scores = np.round(-rng.exponential(3.0, (1, size)), 2).astype(np.float32)  # two decimals: many ties
    scores -= scores.max()
    vocab = VocabShard(size, size)
    descending = np.sort(scores[0])[::-1]
    for k in {1, size // 2 + 1, size}:
        assert jax.jit(cut_top_k, static_argnums=2)(scores, np.int32(k), vocab) == descending[k - 1]
    p = np.exp(descending.astype(np.float64))
    before = (p.cumsum() - p) / p.sum()
    for top_p in (1e-6, 0.3, 0.9, 0.999):
        expected = descending[before < top_p].min()
        assert jax.jit(cut_top_p, static_argnums=2)(scores, np.float32(top_p), vocab) == expected


def _row(*values):
    return np.array([[*values, *[-_INF] * (PADDED - len(values))]] * ROWS, np.float32)


def test_ties_at_every_cut_are_kept():
    z = _row(1, 3, 2, 3, 2, 2, -1)
    for params, kept in (
        (SamplingParams(temperature=1.0, top_k=1), {1, 3}),
        (SamplingParams(temperature=1.0, top_k=2), {1, 3}),
        (SamplingParams(temperature=1.0, top_k=3), {1, 2, 3, 4, 5}),
        (SamplingParams(temperature=1.0, top_k=6), {0, 1, 2, 3, 4, 5}),
        (SamplingParams(temperature=1.0, top_p=1e-45), {1, 3}),
        (SamplingParams(temperature=1.0, top_p=0.3), {1, 3}),
        (SamplingParams(temperature=1.0, top_p=0.65), {1, 2, 3, 4, 5}),
        (SamplingParams(temperature=1.0, min_p=1.0), {1, 3}),
    ):
        assert set(np.flatnonzero(_kept(run(z, params)[0][0]))) == kept, params
    signed_zeros = _row(0.0, -0.0, -1)
    assert set(np.flatnonzero(_kept(run(signed_zeros, SamplingParams(temperature=1.0, top_k=1))[0][0]))) == {0, 1}


def test_top_p_counts_the_mass_before():
    # Four equal tokens and crumbs. The mass before the crumbs is 1 - 2e-9 or so: above any top_p below 1.
    z = _row(0, 0, 0, 0, -20, -20)
    assert _kept(run(z, SamplingParams(temperature=1.0, top_p=0.9999999))[0][0]).sum() == 4
    assert _kept(run(z, SamplingParams(temperature=1.0, top_p=1.0))[0][0]).sum() == 6
    # At the edge itself the mass before reaches top_p, so the token goes: 2 / 2.5 and 1 / 1.25 are 0.8.
    for z in (_row(0, 0, np.log(0.5)), _row(0, np.log(0.25))):
        possible = _kept(z[0]).sum()
        assert _kept(run(z, SamplingParams(temperature=1.0, top_p=0.8))[0][0]).sum() == possible - 1
        assert _kept(run(z, SamplingParams(temperature=1.0, top_p=0.80001))[0][0]).sum() == possible
    # Top-p after top-k sees the survivors' softmax: 2 of 3 survivors hold 0.88 of it, but 0.79 of the whole.
    z = np.log(_row(0.5, 0.3, 0.12, 0.08).clip(1e-30))
    z[:, 4:] = -_INF
    assert _kept(run(z, SamplingParams(temperature=1.0, top_p=0.85))[0][0]).sum() == 3
    assert _kept(run(z, SamplingParams(temperature=1.0, top_k=3, top_p=0.85))[0][0]).sum() == 2


def test_rows_without_choice():
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.5, logprobs=True)
    for shards in (0, 8):
        nothing = run(_row(), params, num_shards=shards)
        assert not _kept(nothing[0]).any() and (nothing[1] == 0).all() and not np.isnan(nothing[2]).any()
        not_numbers = run(np.full((ROWS, PADDED), np.nan), params, num_shards=shards)
        assert not _kept(not_numbers[0]).any() and (not_numbers[1] == 0).all()
        only = _row()
        only[:, 17] = -3
        logprobs, token, logprob, _ = run(only, params, num_shards=shards)
        assert (token == 17).all() and (logprob == 0).all() and _kept(logprobs).sum() == ROWS
        ban = SamplingParams(temperature=1.0, logit_bias={i: -_INF for i in range(VOCAB) if i != 20})
        assert (run(np.zeros((ROWS, PADDED)), ban, num_shards=shards)[1] == 20).all()


def test_padding_and_not_a_number_are_never_chosen():
    z = np.zeros((ROWS, PADDED), np.float32)
    z[:, VOCAB:] = 50
    z[:, 3] = np.nan
    z[:, 5] = 1
    for shards in (0, 1, 3, 8):
        for temperature in (0.0, 5.0):
            logprobs, token, _, _ = run(z, SamplingParams(temperature=temperature), num_shards=shards)
            assert _kept(logprobs).sum(axis=-1).tolist() == [VOCAB - 1] * ROWS
            assert (token < VOCAB).all() and (token != 3).all()
        assert (token == 5).all() or temperature > 0


def test_extreme_values_stay_finite():
    z = _row(_INF, 3e38, -3e38, 0)
    for params in (
        SamplingParams(temperature=1e-40, top_p=0.9),
        SamplingParams(temperature=1e-6, top_k=2),
        SamplingParams(temperature=1e6, repetition_penalty=1e-44, min_p=0.1),
        SamplingParams(temperature=1.0, repetition_penalty=3e38),
        SamplingParams(temperature=1.0, logit_bias={1: 3e38}),
    ):
        logprobs, _, logprob, _ = run(z, dataclasses.replace(params, logprobs=True), prompt=(0, 1, 2, 3))
        assert not np.isnan(logprobs).any() and np.isfinite(logprob).all()
        np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, atol=1e-6)


def test_fixed_point_sums_exactly():
    rng = np.random.default_rng(1)
    mass = np.concatenate([[0, 1, 2.0**-38, 1 - 2.0**-24], rng.random(1000), np.exp(-27 * rng.random(1000))])
    words = np.stack([np.asarray(w) for w in fixed_point(mass.astype(np.float32))], -1)
    assert words.max() <= 2**13
    total = from_fixed_point(words.sum(axis=0, dtype=np.uint32))
    np.testing.assert_allclose(total, mass.astype(np.float32).astype(float).sum() * 2**12, rtol=1e-7)
    # The most tokens there may be, all of mass one, do not overflow.
    full = np.array([2**12, 0, 0], np.uint64) * (_MOST_TOKENS - 1)
    assert full.max() < 2**32
    assert from_fixed_point(full.astype(np.uint32)) == float(full[0])


def test_refused_before_compute():
    with pytest.raises(ConfigError, match="token 21.* 21 tokens"):
        from_sampling(SamplingParams(logit_bias={VOCAB: 1.0}), VOCAB, PADDED)
    with pytest.raises(ConfigError, match=f"{2**20}.*{_MOST_TOKENS}"):
        from_sampling(SamplingParams(), 2**20, 2**20)
