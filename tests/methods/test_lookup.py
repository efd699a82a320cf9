"""Prompt lookup against a search written with lists, and what it learns while decoding."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import Case, engine_of, params_of, passes_of, run
from tiny_models import FAMILIES, place
from tiny_pairs import count_on, counting

from jaxspec.config import SamplingParams
from jaxspec.methods.core.copies import (
    EARLIER_TOKENS,
    CopySettings,
    Nodes,
    Text,
    Watch,
    find_copies,
    join,
    keep_answer,
    learn,
    least_match,
    match_lengths,
    path_terms,
    proposal_hashes,
)
from jaxspec.methods.core.cost_model import (
    COPIES,
    PRIOR_COPY,
    CostModel,
    copy_kind,
    init_acceptance,
    keep_best,
    pass_costs,
)
from jaxspec.methods.core.executor import place_request
from jaxspec.methods.core.round import ModelParams, first_verified, verified_shapes
from jaxspec.methods.core.tree_drafter import TreeDrafter
from jaxspec.methods.core.tree_round import TreeSettings
from jaxspec.methods.lookup import PromptLookup
from jaxspec.sampling.accept import Verified
from jaxspec.tree.tree import Candidates, init_tree, pack_best, plant, proposals

CAPACITY = 96
PLACEMENT = place(FAMILIES["llama"])
GREEDY_DRAFT = TreeSettings(num_rows=64, copies=CopySettings(ngram=3, candidates=4, length=6))
ADAPTIVE = TreeSettings(num_rows=16, copies=CopySettings(ngram=8, candidates=8, length=15), weighs=True)


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


def text_of(text, earlier=()):
    """A `Text`; `earlier` are texts before it."""
    before = [token for one in earlier for token in (*one, -1)]
    token = np.full(CAPACITY, text[-1], np.int32)  # the rest must not be taken for text
    token[: len(before) + len(text)] = [*before, *text]
    return Text(token, np.int32(len(before) + len(text)), np.int32(len(before)))


def nothing_proposed(count=1):
    zero = jnp.zeros(count, jnp.int32)
    return Candidates(zero, zero - 1, zero + 1, jnp.full(count, -jnp.inf)), zero.astype(jnp.uint32), zero > 0


@functools.partial(jax.jit, static_argnames="settings")
def merged(text, settings):
    """Everything that was found, as a batch that holds it all."""
    rates = init_acceptance().rates()
    copies = find_copies(text, rates, settings)
    candidates, nodes = join(*nothing_proposed(), jnp.bool_(False), copies, rates)
    return pack_best(jnp.int32(0), candidates, candidates.token.shape[0] + 1), candidates, nodes


def test_equal_hashes_of_other_depths_join_nothing():
    """A row in a wrong place of the text would have a wrong key: the copy's first token is not the draft's second."""
    own, level = jnp.array([505, 25499]), jnp.array([1, 2])
    hashes = jnp.cumsum(path_terms(own, level), dtype=jnp.uint32)
    rates = init_acceptance().rates()
    copies = find_copies(text_of([3, 7912, 777, 9, 3]), rates, CopySettings(ngram=1, candidates=1, length=3))
    assert hashes[1] == copies.hash[0, 0]
    proposed = Candidates(own, jnp.array([-1, 0]), level, jnp.log(jnp.array([0.9, 0.8])))
    found, _ = join(proposed, hashes, jnp.array([True, False]), jnp.bool_(True), copies, rates)
    batch = pack_best(jnp.int32(3), found, 6)
    assert set(paths_of(batch)) == {(), (505,), (505, 25499), (7912,), (7912, 777), (7912, 777, 9)}
    np.testing.assert_array_equal(batch.depth, [0, *(batch.depth[batch.parent[1:]] + 1)])


def texts():
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 5, 8, 13, 21, 40, 80):
        for kinds in (1, 2, 3, 9, 60):
            yield rng.integers(0, kinds, length).tolist()


@pytest.mark.parametrize("method", [GREEDY_DRAFT.copies, CopySettings(ngram=1, candidates=7, length=3)])
def test_finds_what_lists_find(method):
    for text in texts():
        batch, _, _ = merged(text_of(text), method)
        paths = paths_of(batch)
        expected = {copy[:end] for copy in continuations(text, method) for end in range(method.length + 1)} | {()}
        assert len(paths) == len(set(paths))  # a token that several occurrences share is one row
        assert set(paths) == expected, text


def test_the_longest_match_is_that_of_lists():
    method = GREEDY_DRAFT.copies
    for text in texts():
        longest = max((length for length, _ in occurrences(text, method)), default=0)
        assert int(match_lengths(text_of(text), method.ngram).max()) == longest
        # What was decoded since is a part of the text.
        verified = Verified(jnp.array([*text[-2:], 7]), jnp.int32(2), jnp.zeros(3, int), jnp.zeros(3))
        for least in range(1, method.ngram + 1) if len(text) > 2 else ():
            watch = Watch(text_of(text[:-2]), jnp.int32(least), method.ngram)
            assert bool(watch.finds(verified)) == (longest >= least)


def test_fewer_tokens_must_match_where_rows_cost_less():
    """By the rates that are believed at first, a free row is worth it after one token, and a dear one never."""
    rates, rows = init_acceptance().rates(), np.arange(16.0)
    shapes = CostModel(1 + rows).shapes(PLACEMENT)
    least = [
        int(least_match(rates, dataclasses.replace(shapes, rounds=jnp.array(1 + cost * rows)), 15))
        for cost in (0.0, 0.05, 0.2, 0.5, 10.0)
    ]
    assert least == sorted(least) and least[0] == 1 and 1 < least[2] < len(PRIOR_COPY) < least[-1]


def test_plain_decoding_ends_where_something_can_be_copied():
    """A drafter that weighs nothing copies whatever it finds, so that no token but the last one occurred before."""
    case = Case("llama", 1, "none", PromptLookup(adaptive=False))
    text, several = [5, 6, 7], 0
    rounds = run(engine_of(case), params_of(case), text, 100, 3, temperature=1.5)
    for emitted in rounds[:-1]:
        several += len(emitted.tokens) > 1 and not emitted.drafted
        for token in () if emitted.drafted else emitted.tokens[:-1]:
            assert token not in text
            text.append(token)
        text = [*text, emitted.tokens[-1]] if not emitted.drafted else [*text, *emitted.tokens]
    assert several and any(emitted.drafted for emitted in rounds)


@pytest.mark.thorough
def test_the_longest_and_then_the_most_recent_match_comes_first():
    chain = TreeSettings(num_rows=5, copies=CopySettings(ngram=3, candidates=1, length=4))
    found = 0
    for text in texts():
        drafted = draft(text, chain)
        copies = continuations(text, chain.copies)
        found += bool(copies)
        assert paths_of(drafted.batch)[-1] == (copies[0] if copies else ())
        assert int(drafted.batch.token[0]) == text[-1]
    assert found > 20


@functools.cache
def drafter_of(method):
    verified = verified_shapes(PLACEMENT, method.copies.length + 1)
    costs = CostModel(pass_costs(PLACEMENT, method.num_rows), round=0.0) if method.weighs else None
    return TreeDrafter(PLACEMENT, 128, method, verified, costs=costs), verified


def draft(text, method):
    """Draft after a text whose last token the last round added."""
    drafter, verified = drafter_of(method)
    state, _ = drafter.resume(ModelParams({}), drafter.start(0, None), np.array(text, np.int32), 0)
    request = place_request(PLACEMENT, SamplingParams(), 0, PLACEMENT.cfg.vocab_size)
    return drafter.draft(ModelParams({}), None, state, first_verified(verified, text[-1]), request)[2]


def test_a_full_batch_is_closed_and_holds_the_best():
    """More was found than fits: the best-matched continuation is complete before others are dropped to their start."""
    method = TreeSettings(num_rows=8, copies=CopySettings(ngram=4, candidates=6, length=7))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 3, 4, 11, 12, 13, 9, 4, 14, 2, 3, 4]
    drafted = draft(text, method)
    paths = paths_of(drafted.batch)
    assert len(paths) == 8
    assert (5,) in paths and (5, 6, 7) in paths  # after "2 3 4", the longest match
    known = {copy[:end] for copy in continuations(text, method.copies) for end in range(8)}
    assert set(paths) <= known


@pytest.mark.thorough
def test_without_a_match_the_root_is_alone():
    for method in (GREEDY_DRAFT, ADAPTIVE):
        for text in ([7], [1, 2, 3, 4, 5]):
            drafted = draft(text, method)
            assert int(drafted.batch.count) == 1 and int(drafted.passes) == 0


def test_nodes_know_how_long_their_match_is():
    text = [1, 2, 3, 9, 3, 8, 1, 2, 3]
    _, candidates, nodes = merged(text_of(text), GREEDY_DRAFT.copies)
    rows = zip(candidates.token[1:], nodes.kind, nodes.weight, candidates.depth[1:], strict=True)
    kinds = {(int(depth), int(token)): int(kind) for token, kind, weight, depth in rows if weight > 0}
    assert {key: kind for key, kind in kinds.items() if key[0] == 1} == {(1, 9): COPIES + 3, (1, 8): COPIES + 1}
    # One longer after each accepted token.
    assert kinds[2, 3] == COPIES + 4 and kinds[2, 1] == COPIES + 2


@pytest.mark.thorough
def test_earlier_texts_are_searched_and_never_run_into_one_another():
    """`EARLIER_MATCH` tokens must be the same there; in the text itself one is enough."""
    settings = CopySettings(ngram=6, candidates=4, length=6)
    suffix = [11, 12, 13, 14]
    batch, _, _ = merged(text_of([9, *suffix], earlier=[[8, *suffix, 3, 4], [*suffix, 5], [*suffix[1:], 6]]), settings)
    assert set(paths_of(batch)) == {(), (3,), (3, 4), (5,)}
    # The end of one text and the beginning of the next are no match, and nothing goes on past an end.
    batch, _, _ = merged(text_of([2, 7, *suffix], earlier=[suffix[:2], [*suffix[2:], 5], [6, *suffix]]), settings)
    assert set(paths_of(batch)) == {()}
    batch, _, _ = merged(text_of([4] * 5, earlier=[[4] * 5]), CopySettings(ngram=4, candidates=9, length=2))
    assert set(paths_of(batch)) == {(), (4,), (4, 4)}


def test_answers_are_kept_once_and_the_oldest_go():
    earlier = np.zeros(0, np.int32)
    for answer in ([5, 6, 7, 8], [1, 2, 3], [5, 6, 7, 8], [9, 8, 7, 6, 5]):
        earlier = keep_answer(earlier, answer)
    assert earlier.tolist() == [5, 6, 7, 8, -1, 9, 8, 7, 6, 5, -1]  # three tokens match nothing
    for first in range(7):
        earlier = keep_answer(earlier, list(range(first, first + 1000)))
        assert len(earlier) <= EARLIER_TOKENS
    assert len(earlier) == EARLIER_TOKENS and earlier[-1] == -1 and earlier[-2] == 1005
    assert len(keep_answer(earlier, list(range(10**5)))) == EARLIER_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_is_copied_from_an_earlier_one(monkeypatch, temperature):
    """Without the memory of sessions it is not; the tokens are the same."""
    engine, params = engine_of(Case("llama", 1, "none", PromptLookup())), ModelParams(counting())
    passes = []
    for memory in (0, 2**20, 2**20, 0):
        monkeypatch.setattr(engine, "session_memory", memory)
        rounds = run(engine, params, [0, 7], 60, 5, temperature=temperature)
        passes.append(len(passes_of(rounds)))
        assert [t for r in rounds for t in r.tokens] == count_on(7, 60)
    assert passes[0] == passes[1] > 2 * passes[2]


def hash_of(path):
    depth = jnp.arange(1, len(path) + 1)
    return path_terms(jnp.array(path, jnp.int32), depth).sum(dtype=jnp.uint32) if len(path) else jnp.uint32(0)


def verified_tokens(tokens):
    padded = np.zeros(6, np.int32)
    padded[: len(tokens)] = tokens
    return Verified(padded, np.int32(len(tokens)), np.zeros(6, np.int32), np.zeros(6, np.float32))


def test_learning_counts_what_the_text_reached():
    """Nodes 1, 1-2, 1-2-3 and 1-4, 1-5 below the root, and 6; the text goes on with 1, 4, 9."""
    paths = [(1,), (1, 2), (1, 2, 3), (1, 4), (1, 5), (6,), (1,)]
    weight = [1, 1, 1, 0.5, 0.5, 0.25, 0]  # the last one does not exist
    columns = ([hash_of(path) for path in paths], [hash_of(path[:-1]) for path in paths])
    kind = copy_kind(jnp.arange(1, 8))
    nodes = Nodes(*map(jnp.stack, columns), jnp.array([*map(len, paths)]), kind, jnp.array(weight, jnp.float32))
    stats = jax.jit(learn)(init_acceptance(), nodes, verified_tokens([1, 4, 9]))
    tried, accepted = (np.asarray(x)[COPIES + 1 : COPIES + 8] for x in (stats.tried, stats.accepted))
    assert tried.tolist() == [1, 1, 0, 0.5, 0.5, 0.25, 0] and accepted.tolist() == [1, 0, 0, 1, 0, 0, 0]
    # A text that ends there says nothing of what lies below.
    stats = jax.jit(learn)(init_acceptance(), nodes, verified_tokens([1]))
    assert np.asarray(stats.tried)[COPIES + 1 : COPIES + 8].tolist() == [1, 0, 0, 0, 0, 0.25, 0]


def test_longer_matches_are_never_worth_less():
    kinds = copy_kind(jnp.arange(9))
    np.testing.assert_allclose(init_acceptance().rates()[kinds], PRIOR_COPY, rtol=1e-6)
    for share, check in ((0.01, lambda rate: rate[4] < 0.06), (0.99, lambda rate: rate[1] > 0.9)):
        tried = jnp.zeros_like(init_acceptance().tried).at[kinds[1:5]].set(100.0)
        stats = dataclasses.replace(init_acceptance(), tried=tried, accepted=share * tried)
        rate = np.asarray(stats.rates()[kinds])
        assert check(rate) and (np.diff(rate) >= 0).all()


@pytest.mark.thorough
def test_what_two_sources_propose_is_one_node():
    """A draft with children 3 and 7 of the root, and 8 below 3; the text offers 3-4 and 5."""
    rates, settings = init_acceptance().rates(), CopySettings(ngram=2, candidates=4, length=2)
    copies = jax.jit(find_copies, static_argnums=2)(text_of([1, 2, 3, 4, 2, 5, 6, 1, 2]), rates, settings)
    tree = jax.jit(plant)(init_tree(2, 2), jnp.int32(2), jnp.array([3, 7]), jnp.log(jnp.array([0.5, 0.25])))
    has_row = jnp.zeros(4, bool)
    candidates, nodes = jax.jit(join)(
        proposals(tree), proposal_hashes(tree)[0], has_row, jnp.bool_(True), copies, rates
    )
    batch = jax.jit(pack_best, static_argnums=2)(jnp.int32(2), candidates, 16)
    assert sorted(paths_of(batch)) == [(), (3,), (3, 4), (5,), (5, 6), (7,)]
    score = {path: float(s) for path, s in zip(paths_of(batch)[1:], sorted_scores(candidates), strict=True)}
    assert score[3,] == pytest.approx(np.log(0.5)) and score[3, 4] < score[3,] and score[5, 6] <= score[5,]
    # The draft proposed other tokens than 5: the copy is worth less than without its word.
    alone, _ = jax.jit(join)(*nothing_proposed(), jnp.bool_(False), copies, rates)
    assert score[5,] < float(alone.score.max())


def sorted_scores(candidates):
    """Scores of what is there, in the order of the rows of a batch that holds it all."""
    return np.asarray(candidates.score)[np.asarray(candidates.score) > -np.inf]


def test_what_does_not_pay_is_not_drafted():
    rows = 16
    chain = np.arange(15, dtype=np.int32)
    for chance, worth in ((0.95, True), (0.01, False)):
        score = np.cumsum(np.full(15, np.log(chance), np.float32))
        candidates = Candidates(chain, chain - 1, chain + 1, score)
        kept = np.asarray(keep_best(candidates, jnp.array(pass_costs(PLACEMENT, rows)))[0].score) > -np.inf
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
