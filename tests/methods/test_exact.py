"""Losslessness, end to end: every method gives the tokens of plain decoding, whatever its draft, tree and mesh.

That any tree gives these tokens is a property of the verify seam (`test_verify_seam`). Here each kind of method decodes
once greedily and once at temperature 1; the slow suite adds trees of special shapes, families and meshes.
"""

import itertools

import numpy as np
import pytest
from marks import fast_part
from method_cases import (
    BASIC,
    CASES,
    CHAIN_TP4,
    GREEDY,
    LADDER,
    LARGE_REJECTION,
    LARGE_SPECEXEC,
    LLAMA_CHAIN,
    LLAMA_LOOKUP,
    LLAMA_SPECEXEC,
    LLAMA_SPECINFER,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    SMALL_SPECEXEC,
    SMALL_TP4,
    case_id,
    check_counts,
    decode,
    engine_of,
    logprobs_of,
    params_of,
    plain,
    rounds_of,
    run,
    tokens_of,
)
from tiny_pairs import DRAFTS, SMALL, VOCAB, count_on, counting, flat_params, vocab_rows_of

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import ModelParams

# One of each kind of method, and one on a mesh.
FAST = [*BASIC, CHAIN_TP4]


def exact_samplings(case):
    """Ways of sampling at which a case gives the very tokens of plain decoding; all of them if it is fast."""
    return list(SAMPLINGS) if case.method.exact == "tokens" else GREEDY


@pytest.mark.parametrize("case", fast_part(CASES, lambda case: case in FAST), ids=case_id)
def test_tokens_are_those_of_plain_decoding(case):
    """The drafts take turns with the ways of sampling."""
    samplings = exact_samplings(case)
    count = 6 if case.method.num_rows > 200 else 20  # large trees are slow
    for index, draft in enumerate(("copy",) if case.geometry == "none" else DRAFTS):
        for sampling in {samplings[0], samplings[1 % len(samplings)], samplings[index % len(samplings)]}:
            prompt = (PROMPT, LONG_PROMPT)[index % 2]
            rounds = decode(case, prompt, count, draft, index, **SAMPLINGS[sampling])
            expected = plain(case.family, prompt, count, index, **SAMPLINGS[sampling])
            assert tokens_of(rounds) == tokens_of(expected), (draft, sampling)
            np.testing.assert_allclose(logprobs_of(rounds), logprobs_of(expected), atol=1e-3)
            check_counts(case, rounds)


@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_tokens_do_not_depend_on_where_generation_stops(case):
    sampling = {"temperature": 1.0} if case.method.exact == "tokens" else {}
    expected = tokens_of(plain(case.family, PROMPT, 2 * case.method.max_path, 3, **sampling))
    for count in range(1, min(2 * case.method.max_path, 13)):
        rounds = decode(case, PROMPT, count, "copy", 3, **sampling)
        assert tokens_of(rounds) == expected[:count]
        assert all(emitted.tokens for emitted in rounds)


@pytest.mark.parametrize(
    "case", fast_part([*BASIC[:4], LADDER[1]], lambda case: case in (LLAMA_CHAIN, LLAMA_SPECEXEC)), ids=case_id
)
def test_the_last_token_of_the_context_can_be_decoded(case):
    """Down to the last slot of the cache: good drafts overshoot the most, bad ones run the most rounds."""
    engine = engine_of(case)
    prompt = (LONG_PROMPT + PROMPT)[:90]
    room = engine.max_context - len(prompt)
    sampling = {"temperature": 1.0} if case.method.exact == "tokens" else {}
    expected = tokens_of(plain(case.family, prompt, room, 1, **sampling))
    for draft in ("copy", "first layer", "random"):
        assert tokens_of(decode(case, prompt, room, draft, 1, **sampling)) == expected
    # A prompt that leaves room for one token.
    prompt = (prompt * 3)[: engine.max_context - 1]
    assert tokens_of(decode(case, prompt, 1, "copy", 1, **sampling)) == tokens_of(
        plain(case.family, prompt, 1, 1, **sampling)
    )


def test_the_last_token_of_the_context_can_be_looked_up():
    case = LLAMA_LOOKUP
    room = engine_of(case).max_context - 30
    prompt = count_on(80, 30)
    params = ModelParams(counting())
    assert tokens_of(run(engine_of(case), params, prompt, room)) == count_on(prompt[-1], room)
    ones = [1] * 30
    rounds = run(engine_of(case), params, ones, room, logit_bias={1: 1e4})
    assert tokens_of(rounds) == [1] * room and len(rounds) < room / 4


@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_a_second_generation_compiles_nothing(case, compilations):
    decode(case, PROMPT, 1)
    compilations.clear()
    decode(case, LONG_PROMPT, 4, "random", 5, **SAMPLINGS["cuts"])
    decode(case, PROMPT[:1], 2, "broken", **SAMPLINGS["greedy penalties"])
    assert compilations == []


# How good drafts are: what a method that loses its draft's work would still pass above.


@pytest.mark.parametrize("case", [LLAMA_CHAIN, CHAIN_TP4, LARGE_REJECTION], ids=case_id)
@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
def test_a_copy_of_the_target_is_always_accepted(case, sampling):
    """Also one with more rows, all of which would win if they were not masked."""
    length = case.method.num_draft_tokens
    rounds = decode(case, PROMPT, 8 * (length + 1), "copy", 2, **SAMPLINGS[sampling])
    assert [emitted.accepted for emitted in rounds] == [length] * 8
    assert [emitted.drafted for emitted in rounds] == [length] * 8
    assert [emitted.draft_passes for emitted in rounds] == [length] * 8


@pytest.mark.parametrize("sampling", ["cuts", "penalties", "greedy penalties"])
def test_a_copy_simulates_all_processors(sampling):
    rounds = decode(LLAMA_CHAIN, LONG_PROMPT, 40, "copy", 2, **SAMPLINGS[sampling])
    assert [emitted.accepted for emitted in rounds] == [4] * 8
    rounds = decode(LARGE_REJECTION, LONG_PROMPT, 40, "copy", 2, **SAMPLINGS[sampling])
    assert [emitted.accepted for emitted in rounds] == [3] * 10


@pytest.mark.parametrize(
    ("case", "least"), fast_part([(LLAMA_SPECINFER, 4), (LARGE_SPECEXEC, 1)], lambda case, _: case is LLAMA_SPECINFER)
)
def test_greedy_copies_fill_every_tree(case, least):
    """The most probable children hold the argmax at every level; a best-first tree may prefer breadth."""
    assert all(emitted.accepted >= least for emitted in decode(case, PROMPT, 40, "copy")[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "T=1", "cuts"])
def test_larger_budgets_are_accepted_no_less(sampling):
    """Best sets of growing size hold each other, so at the same text a larger one accepts at least as much."""
    accepted, rates = [], []
    for case in LADDER:
        accepted.append([])
        for length in range(1, 33, 4):
            options = SamplingParams(max_tokens=case.method.max_path, **SAMPLINGS[sampling])
            with engine_of(case).open(params_of(case), PROMPT[:length], options, length) as session:
                accepted[-1].append(session.step().accepted)
        rates.append(40 / len(decode(case, PROMPT, 40, "copy", 4, **SAMPLINGS[sampling])))
    for fewer, more in itertools.pairwise(accepted):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]
    assert sum(accepted[-1]) > 2 * sum(accepted[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", fast_part([SMALL_SPECEXEC, SMALL_TP4], lambda case: case == SMALL_SPECEXEC), ids=case_id
)
def test_a_smaller_vocabulary_proposes_only_its_own_tokens(case):
    accepted = []
    for draft, sampling in itertools.product(("copy", "constant", "random"), ("greedy", "T=1")):
        for emitted in decode(case, PROMPT, 40, draft, 1, **SAMPLINGS[sampling]):
            accepted += emitted.tokens[: emitted.accepted]
    assert accepted and max(accepted) < SMALL


def test_tokens_above_the_drafts_vocabulary_are_emitted_all_the_same():
    """The prompt and the output consist of tokens that the draft does not have."""
    bias = dict.fromkeys(range(SMALL), -np.inf)
    prompt = [70, 100, 60, 99]
    for case in (SMALL_SPECEXEC,):
        rounds = decode(case, prompt, 20, "copy", logit_bias=bias, temperature=1.0)
        assert tokens_of(rounds) == tokens_of(plain(case.family, prompt, 20, logit_bias=bias, temperature=1.0))
        assert all(emitted.accepted == 0 for emitted in rounds)


@pytest.mark.parametrize(
    "case", fast_part([LARGE_SPECEXEC, LARGE_REJECTION], lambda case: case == LARGE_REJECTION), ids=case_id
)
def test_rows_without_a_token_are_never_emitted(case):
    for sampling in ("T=1", "cuts"):
        for draft in ("copy", "constant"):
            rounds = decode(case, PROMPT, 30, draft, 1, **SAMPLINGS[sampling])
            assert max(tokens_of(rounds)) < VOCAB


def test_a_broken_draft_does_not_reach_the_next_generation():
    """Its keys stay in the buffers; generations of sound drafts follow in the same ones."""
    for case in (LLAMA_SPECEXEC, LLAMA_CHAIN, LARGE_REJECTION):
        before = decode(case, PROMPT, 20, "copy")
        decode(case, LONG_PROMPT, 20, "broken")
        assert decode(case, PROMPT, 20, "copy") == before


def test_interleaved_generations_do_not_disturb_each_other():
    for case in BASIC:
        options, params = SamplingParams(max_tokens=20), params_of(case, "first layer")
        alone = [tokens_of(decode(case, prompt, 20, "first layer")) for prompt in (PROMPT, LONG_PROMPT)]
        with (
            engine_of(case).open(params, PROMPT, options, 0) as one,
            engine_of(case).open(params, LONG_PROMPT, options, 0) as other,
        ):
            rounds = list(itertools.zip_longest(rounds_of(one), rounds_of(other)))
        assert [tokens_of(filter(None, column)) for column in zip(*rounds, strict=True)] == alone


@pytest.mark.parametrize("case", BASIC, ids=case_id)
def test_ties_go_to_the_lowest_id(case):
    """Target and draft find all tokens alike: greedy output is id 0 for ever."""
    flat = flat_params(case.family, vocab_rows_of(case.geometry))
    params = ModelParams(flat, None if case.geometry == "none" else params_of(case, "constant").draft)
    assert tokens_of(run(engine_of(case), params, [5, 7, 5], 20)) == [0] * 20
    if case.method.exact == "tokens":
        expected = tokens_of(plain(case.family, [5, 7, 5], 20, params=flat, temperature=1.0))
        assert tokens_of(run(engine_of(case), params, [5, 7, 5], 20, temperature=1.0)) == expected
