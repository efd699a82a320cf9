"""The draw follows the processed distribution; greedy takes the lowest id; one seed, one token."""

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from marks import fast_part, quick_part
from sampling_cases import PADDED, ROWS, SHARDS, VOCAB, run

from jaxspec.config import SamplingParams
from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.accept import match_rule, walk, walk_at_once
from jaxspec.sampling.choose import choose, choose_and_rank, seed_key
from jaxspec.sampling.processors import History, from_sampling, process, score
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Batch
from pallas_kernels import selection
from pallas_kernels.registry import using

_DRAWS = 20_000
_SMALL = VocabShard(8, 8)
_LOGITS = np.array([[1.0, 0.2, -0.5, 2.0, 0.2, -3.0, 0.9, 1.0]], np.float32)
_HISTORY = History(np.isin(np.arange(8), (0, 3)), np.array([2] + 7 * [0], np.int32))


@jax.jit
def _draw(processors, key):
    positions = np.arange(_DRAWS, dtype=np.int32)
    logits = jax.numpy.broadcast_to(_LOGITS, (_DRAWS, 8))
    token, _ = choose(logits, processors, _HISTORY.row, key, positions, _SMALL)
    return token, process(_LOGITS, processors, _HISTORY.row, _SMALL)[0]


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"temperature": 1.0, "logit_bias": {3: -np.inf, 5: 4.0}, "top_k": 4, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(knobs):
    token, logprobs = _draw(from_sampling(SamplingParams(**knobs), 8, 8), seed_key(11))
    expected = np.exp(np.asarray(logprobs, np.float64)) * _DRAWS
    observed = np.bincount(token, minlength=8)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    # Mean df, variance 2 df; the bound has a probability below 1e-3 for every df up to 7.
    df = possible.sum() - 1
    assert chi_square < df + 5 * np.sqrt(2 * df) + 3


@pytest.mark.parametrize(
    "num_shards", quick_part(fast_part([0, *SHARDS], lambda shards: shards in (0, 3, 8)), lambda shards: shards == 0)
)
def test_greedy_takes_the_lowest_id_on_a_tie(num_shards):
    z = np.zeros((ROWS, PADDED), np.float32)
    z[0, [20, 4, 11]] = 5
    z[1, [20, 19]] = 5
    z[:, 22] = 9  # padding
    token, logprob = run(z, SamplingParams(logprobs=True), num_shards=num_shards)[1:3]
    assert token.tolist() == [4, 19]
    expected = 5 - np.log(np.exp(z[:, :VOCAB].astype(np.float64)).sum(-1))
    np.testing.assert_allclose(logprob, expected, atol=1e-6)
    assert token.dtype == np.int32 and (run(z, SamplingParams(), num_shards=num_shards)[2] == 0).all()


@pytest.mark.parametrize("num_shards", [0, 4])
def test_greedy_sees_penalties_and_nothing_else(num_shards):
    z = np.zeros((ROWS, PADDED), np.float32)
    z[:, 2], z[:, 6] = 3, 2
    plain = SamplingParams(top_k=1, top_p=0.1, min_p=1.0)
    assert run(z, plain, prompt=(2,), num_shards=num_shards)[1].tolist() == [2, 2]
    assert run(z, SamplingParams(repetition_penalty=2.0), prompt=(2,), num_shards=num_shards)[1].tolist() == [6, 6]
    penalty = SamplingParams(frequency_penalty=1.5)
    assert run(z, penalty, prompt=(2,), num_shards=num_shards)[1].tolist() == [2, 2]  # the prompt is not counted
    assert run(z, penalty, output=(2,), num_shards=num_shards)[1].tolist() == [6, 6]


def test_logprob_is_that_of_the_processed_distribution():
    rng = np.random.default_rng(0)
    for params in (
        SamplingParams(temperature=0.7, top_p=0.9, logprobs=True),
        SamplingParams(temperature=1.5, top_k=6, repetition_penalty=2.0, logprobs=True),
    ):
        logprobs, token, logprob, _ = run(rng.normal(size=(ROWS, PADDED)), params, prompt=(3,), output=(4, 4))
        np.testing.assert_allclose(logprob, logprobs[np.arange(ROWS), token], atol=1e-6)


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(1)
    row = rng.normal(size=PADDED)
    params = SamplingParams(temperature=1.0)
    draws = [run([row, row], params, seed=s, positions=(p, p + 1))[1] for s in (1, 2**40 + 1) for p in range(0, 40, 2)]
    again = [run([row, row], params, seed=s, positions=(p, p + 1))[1] for s in (1, 2**40 + 1) for p in range(0, 40, 2)]
    np.testing.assert_array_equal(draws, again)
    first, second = np.concatenate(draws[:20]), np.concatenate(draws[20:])
    assert 0 < (first == second).sum() < 40 and len(set(first.tolist())) > 5
    # The same position in another row of the batch, beside another position.
    swapped = run([row, row], params, seed=1, positions=(1, 0))[1]
    np.testing.assert_array_equal(swapped, draws[0][::-1])


@pytest.mark.parametrize("name", ["auto", "xla"])
@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.7, "top_k": 4}, {"repetition_penalty": 2.0}])
def test_the_most_probable_tokens_are_those_of_the_distribution(name, knobs):
    """In order, also where logits are no numbers, and zeros where they are not asked for."""
    logits = _LOGITS.copy()
    logits[0, [2, 6]] = np.nan, -np.inf

    @jax.jit
    def run(processors):
        rows = logits, processors, _HISTORY.row
        with using(selection.choose(name, "cpu")):
            return process(*rows, _SMALL)[0], choose_and_rank(*rows, seed_key(3), np.int32([5]), _SMALL, 5)

    for asked in (5, 0):
        expected, (token, logprob, ranked) = run(from_sampling(SamplingParams(**knobs, logprobs=asked), 8, 8))
        best = np.argsort(-expected, stable=True)[:5]
        chances = expected[best] if asked else np.zeros(5)
        np.testing.assert_array_equal(ranked[0][0][np.isfinite(chances)], (best * bool(asked))[np.isfinite(chances)])
        np.testing.assert_allclose(ranked[1][0], chances, rtol=1e-5)
        np.testing.assert_allclose(logprob[0], expected[token[0]], rtol=1e-5)


def made_outside_branches(jaxpr):
    """Types of what a program computes outside of branches, in loops, too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name != "cond":
            yield from (out.aval.str_short() for out in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from made_outside_branches(inner)


def test_histories_are_made_where_a_penalty_looks_and_nowhere_else():
    rows = jax.numpy.arange(4)
    batch = Batch(rows, jax.numpy.maximum(rows - 1, 0), rows, np.int32(4))
    request = Request(from_sampling(SamplingParams(), 8, 8), seed_key(1))
    rule = (lambda row: _LOGITS), batch, request, np.int32(0), _SMALL

    def decide_row(row, logits, histories):
        return match_rule(lambda _: logits, *rule[1:])(row, histories)

    def run(history):
        turns = walk(match_rule(*rule), history, 4, _SMALL)
        logits = jax.numpy.zeros((4, 8))
        return turns, walk_at_once(decide_row, lambda rows: rows, logits, batch, history, 4, _SMALL)

    made = {*made_outside_branches(jax.make_jaxpr(run)(_HISTORY))}
    assert "int32[4]" in made and not made & {"bool[1,8]", "bool[4,8]", "bool[4,1,8]"}


@pytest.mark.thorough
@pytest.mark.parametrize("size", [3000, 3001])
def test_rows_do_not_depend_on_the_rows_beside_them(size):
    """Speculative decoding scores many rows at once and must draw what one row at a time draws."""
    vocab = VocabShard(size, size)
    logits = (np.random.default_rng(2).normal(size=(5, size)) * 3).astype(np.float32)
    processors = from_sampling(SamplingParams(temperature=0.9, top_k=500, top_p=0.95, logprobs=True), size, size)
    history = History(np.zeros(size, bool), np.zeros(size, np.int32))

    @jax.jit
    def both(logits, positions):
        rows = logits, processors, history.row
        return score(*rows, vocab), *choose(*rows, seed_key(1), positions, vocab)

    scores, token, logprob = both(logits, np.arange(5, dtype=np.int32))
    for i in range(5):
        alone = both(logits[i : i + 1], np.arange(i, i + 1, dtype=np.int32))
        np.testing.assert_array_equal(alone[0][0], scores[i])
        assert alone[1][0] == token[i]
        np.testing.assert_allclose(alone[2][0], logprob[i], rtol=1e-6)  # its normalising sum may round differently
