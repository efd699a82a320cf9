"""Prompt lookup against a search written with lists, and what it learns while decoding."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import Case, count_on, counting, engine_of, passes_of, run
from tiny_models import FAMILIES, place

from jaxspec.methods.core.copies import (
    PRIOR_ACCEPTANCE,
    LookupSettings,
    NGramDrafter,
    TokenBuffer,
    acceptance,
    learn,
    merge_matches,
)
from jaxspec.methods.core.cost_model import CostModel, keep_worthwhile, pass_costs
from jaxspec.methods.core.round import ModelParams, first_verified, verified_shapes
from jaxspec.methods.lookup import PromptLookup
from jaxspec.sampling.accept import Verified
from jaxspec.tree.select import Candidates, pack_best

CAPACITY = 96
PLACEMENT = place(FAMILIES["llama"])
GREEDY_DRAFT = LookupSettings(num_rows=64, ngram=3, candidates=4, length=6, adaptive=False)
ADAPTIVE = LookupSettings(num_rows=16, ngram=8, candidates=8, length=15)


def occurrences(text, method):
    """Ends of the earlier occurrences of the text's last tokens, best first, and the lengths of their matches."""
    found = []
    for end in range(len(text) - 1):
        length = 0
        while length < method.ngram and length <= end and text[end - length] == text[-1 - length]:
            length += 1
        if length:
            found.append((length, end))
    return sorted(found, reverse=True)[: method.candidates]


def continuations(text, method):
    """The tokens that followed each of them; a passage that reaches the end goes on with itself."""
    copies = []
    for _, end in occurrences(text, method):
        period = text[end + 1 :]
        copies.append(tuple(period[i % len(period)] for i in range(method.length)))
    return copies


def paths_of(batch):
    """All root-to-row token sequences of a batch, the root left out."""
    token, parent, count = np.asarray(batch.token), np.asarray(batch.parent), int(batch.count)
    paths = [()]
    for row in range(1, count):
        assert parent[row] < row
        paths.append((*paths[parent[row]], int(token[row])))
    assert all(parent[row] == row for row in range(count, batch.rows))
    return paths


def state_of(text, method, tried=None, accepted=None):
    token = np.zeros(CAPACITY, np.int32)
    token[: len(text)] = text
    token[len(text) :] = text[-1]  # must not be taken for text
    zeros = np.zeros(method.ngram + 1, np.float32)
    rows = np.arange(method.num_rows, dtype=np.int32)
    tried, accepted = (zeros if x is None else np.asarray(x, np.float32) for x in (tried, accepted))
    return TokenBuffer(token, np.int32(len(text)), np.zeros_like(rows), rows, tried, accepted)


@functools.partial(jax.jit, static_argnames="method")
def merged(state, method):
    """Everything that was found, as a batch that holds it all."""
    candidates, matched = merge_matches(state, acceptance(state), method)
    return pack_best(jnp.int32(0), candidates, candidates.token.shape[0] + 1), candidates, matched


def texts():
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 5, 8, 13, 21, 40, 80):
        for kinds in (1, 2, 3, 9, 60):
            yield rng.integers(0, kinds, length).tolist()


@pytest.mark.parametrize("method", [GREEDY_DRAFT, LookupSettings(num_rows=64, ngram=1, candidates=7, length=3)])
def test_finds_what_lists_find(method):
    for text in texts():
        batch, _, _ = merged(state_of(text, method), method)
        paths = paths_of(batch)
        expected = {copy[:end] for copy in continuations(text, method) for end in range(method.length + 1)} | {()}
        assert len(paths) == len(set(paths))  # a token that several occurrences share is one row
        assert set(paths) == expected, text


def test_the_longest_and_then_the_most_recent_match_comes_first():
    chain = LookupSettings(num_rows=5, ngram=3, candidates=1, length=4, adaptive=False)
    found = 0
    for text in texts():
        drafted = draft(text, chain)
        copies = continuations(text, chain)
        found += bool(copies)
        assert paths_of(drafted.batch)[-1] == (copies[0] if copies else ())
        assert int(drafted.batch.token[0]) == text[-1]
    assert found > 20


@functools.cache
def drafter_of(method):
    verified = verified_shapes(PLACEMENT, method.length + 1)
    costs = CostModel(pass_costs(PLACEMENT, method.num_rows), round=0.0)
    return NGramDrafter(PLACEMENT, 128, method, costs, verified), verified


def draft(text, method):
    """Draft after a text whose last token the last round added."""
    drafter, verified = drafter_of(method)
    state = drafter.prefill(ModelParams({}), drafter.start(text[-1], None), np.array(text[:-1], np.int32))
    return drafter.draft(ModelParams({}), None, state, first_verified(verified, text[-1]), None)[2]


def test_a_full_batch_is_closed_and_holds_the_best():
    """More was found than fits: the best-matched continuation is complete before others are dropped to their start."""
    method = LookupSettings(num_rows=8, ngram=4, candidates=6, length=7, adaptive=False)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 3, 4, 11, 12, 13, 9, 4, 14, 2, 3, 4]
    drafted = draft(text, method)
    paths = paths_of(drafted.batch)
    assert len(paths) == 8
    assert (5,) in paths and (5, 6, 7) in paths  # after "2 3 4", the longest match
    known = {copy[:end] for copy in continuations(text, method) for end in range(8)}
    assert set(paths) <= known


def test_without_a_match_the_root_is_alone():
    for method in (GREEDY_DRAFT, ADAPTIVE):
        for text in ([7], [1, 2, 3, 4, 5]):
            drafted = draft(text, method)
            assert int(drafted.batch.count) == 1 and int(drafted.passes) == 0


def test_candidates_know_how_long_their_match_is():
    text = [1, 2, 3, 9, 3, 8, 1, 2, 3]
    _, candidates, matched = merged(state_of(text, GREEDY_DRAFT), GREEDY_DRAFT)
    rows = zip(candidates.token, matched, candidates.score, candidates.depth, strict=True)
    lengths = {(int(depth), int(token)): int(n) for token, n, score, depth in rows if score > -jnp.inf}
    assert {key: n for key, n in lengths.items() if key[0] == 1} == {(1, 9): 3, (1, 8): 1}
    # One longer after an accepted token, as far as matches are compared.
    assert lengths[2, 3] == 3 and lengths[2, 1] == 2


def verified_path(rows):
    """A round that accepted a path of batch rows."""
    path = np.zeros(6, np.int32)
    path[: len(rows)] = rows
    return Verified(np.zeros(6, np.int32), np.int32(len(rows)), path, np.zeros(6, np.float32))


def test_learning_counts_the_path_and_the_first_refusal():
    method = LookupSettings(num_rows=6, ngram=4, candidates=2, length=5)
    # Rows 1 - 2 - 3 below the root, and 4 and 5 below row 1; the walk takes 1 and leaves there.
    parent = np.array([0, 0, 1, 2, 1, 1], np.int32)
    matched = np.array([0, 2, 3, 4, 1, 1], np.int32)
    state = state_of([1, 2], method).replace(parent=parent, matched=matched)
    learned = jax.jit(learn)(state, verified_path([0, 1]))
    assert np.asarray(learned.accepted).tolist() == [0, 0, 1, 0, 0]
    assert np.asarray(learned.tried).tolist() == [0, 0, 1, 1, 0]  # the best child of row 1 had matched 3
    # A walk that ends at a leaf refuses nothing.
    learned = jax.jit(learn)(state, verified_path([0, 1, 2, 3]))
    assert np.asarray(learned.accepted).tolist() == np.asarray(learned.tried).tolist() == [0, 0, 1, 1, 1]


def test_acceptance_follows_what_was_seen():
    method = LookupSettings(num_rows=16, ngram=4, candidates=8, length=15)
    fresh = np.asarray(acceptance(state_of([1], method)))
    np.testing.assert_allclose(fresh, PRIOR_ACCEPTANCE[:5], rtol=1e-6)
    tried = [0, 100, 100, 100, 100]
    bad = np.asarray(acceptance(state_of([1], method, tried, [0, 1, 1, 1, 1])))
    good = np.asarray(acceptance(state_of([1], method, tried, [0, 99, 99, 99, 99])))
    assert bad[4] < 0.06 and good[1] > 0.9
    assert (np.diff(bad) >= 0).all() and (np.diff(good) >= 0).all()


def test_what_does_not_pay_is_not_drafted():
    rows = 16
    chain = np.arange(15, dtype=np.int32)
    for chance, worth in ((0.95, True), (0.01, False)):
        score = np.cumsum(np.full(15, np.log(chance), np.float32))
        candidates = Candidates(chain, chain - 1, chain + 1, score)
        kept = np.asarray(keep_worthwhile(candidates, pass_costs(PLACEMENT, rows))[0].score) > -np.inf
        assert kept.any() == worth
        assert (np.diff(kept.astype(int)) <= 0).all()  # what is kept comes first


def test_drafting_stops_where_nothing_is_accepted_and_goes_on_where_text_repeats():
    """After a stretch of text that lookup gets wrong, rounds verify the root alone; a copy is drafted."""
    case = Case("llama", 1, "none", PromptLookup())
    params = ModelParams(counting())
    # The model counts; the prompt repeats pairs that it never continues so.
    misleading = [t for start in range(0, 30, 3) for t in (start, start + 50)] * 2 + [0]
    rounds = passes_of(run(engine_of(case), params, misleading, 40))
    assert [t for r in rounds for t in r.tokens] == count_on(0, 40)
    drafted = [r.drafted for r in rounds]
    assert sum(drafted[len(drafted) // 2 :]) < sum(drafted[: len(drafted) // 2]) or sum(drafted) == 0
    assert Counter(drafted)[0] > len(rounds) / 2
    # It has counted through this range before: copied in few rounds.
    rounds = passes_of(run(engine_of(case), params, count_on(90, 60), 60))
    assert len(rounds) > 20  # nothing to copy yet
    again = run(engine_of(case), params, [*count_on(90, 40), *count_on(90, 10)], 30)
    assert [t for r in again for t in r.tokens] == count_on(100, 30) and len(again) <= 5
