"""Prefix reuse: a prompt that goes on from an earlier session gives the tokens, and the bits, of a cold run."""

import numpy as np
import pytest
import swift_cases
import swiftspec_cases
from marks import quick_part
from method_cases import (
    BASIC,
    CHAIN_TP4,
    LLAMA_CHAIN,
    LLAMA_LOOKUP,
    PROMPT,
    case_id,
    engine_of,
    logprobs_of,
    params_of,
    plain_engine,
    tokens_of,
)
from tiny_pairs import target_params

from jaxspec import engine as engine_module
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.core.sequence import CHUNKS, MOST_SMALL, MOST_SMALL_NATIVE, fit_kept, plan_chunks

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {0: 6.0, 7: -np.inf}}


def answer(engine, params, prompt, count, seed=0, in_pieces=False, **sampling):
    """Rounds of a session, and how many prompt tokens it did not compute."""
    options = SamplingParams(max_tokens=count, logprobs=True, **sampling)
    with engine.open(params, prompt, options, seed, in_pieces=in_pieces) as session:
        rounds = []
        while session.reading:
            session.read()
        while not session.done:
            rounds.append(session.step())
        return rounds, session.num_cached


def check_conversation(engine, params, monkeypatch, **sampling):
    """Each turn adds an answer and new words; every answer is that of a run that begins with empty caches."""
    prompt = list(PROMPT)
    monkeypatch.setattr(engine_module, "CPU_PIECE", 9)
    for turn in range(3):
        monkeypatch.setattr(engine, "session_memory", 0)
        cold, cached = answer(engine, params, prompt, 12, turn, **sampling)
        assert cached == 0
        pieces, cached = answer(engine, params, prompt, 12, turn, in_pieces=True, **sampling)
        assert cached == 0 and tokens_of(pieces) == tokens_of(cold)
        np.testing.assert_array_equal(logprobs_of(pieces), logprobs_of(cold))
        monkeypatch.setattr(engine, "session_memory", None)
        answer(engine, params, prompt[:-3], 5, turn)  # the prompt does not go on from this answer
        warm, cached = answer(engine, params, prompt, 12, turn, **sampling)
        assert len(prompt) - 4 <= cached < len(prompt)
        assert tokens_of(warm) == tokens_of(cold)
        np.testing.assert_array_equal(logprobs_of(warm), logprobs_of(cold))
        prompt += [*tokens_of(warm), *PROMPT[turn : turn + 4]]
        # All that was computed: the last token of an answer was not run.
        assert answer(engine, params, prompt, 3, turn, **sampling)[1] == len(prompt) - 5


@pytest.mark.parametrize(
    "case", quick_part([*BASIC, CHAIN_TP4], lambda case: case in (LLAMA_CHAIN, LLAMA_LOOKUP)), ids=case_id
)
def test_a_conversation_gives_the_bits_of_cold_runs(case, monkeypatch):
    draft = "copy" if case.geometry == "none" else "first layer"
    sampling = {"temperature": 1.0} if case.method.exact == "tokens" else {}
    check_conversation(engine_of(case), params_of(case, draft), monkeypatch, **sampling, **PENALTIES)


def test_plain_decoding(monkeypatch):
    check_conversation(plain_engine("llama"), ModelParams(target_params("llama")), monkeypatch, temperature=1.0)


@pytest.mark.thorough
def test_swift(monkeypatch):
    engine = swift_cases.engine_of(swift_cases.EAGER)
    check_conversation(engine, swift_cases.params_of("llama"), monkeypatch, temperature=1.0)


@pytest.mark.parametrize(
    "case", swiftspec_cases.quick([swiftspec_cases.BASIC, swiftspec_cases.WIDE]), ids=swiftspec_cases.case_id
)
def test_swiftspec(case, monkeypatch):
    engine, params = swiftspec_cases.engine_of(case), swiftspec_cases.params_of(case, "first layer")
    check_conversation(engine, params, monkeypatch, temperature=1.0)


@pytest.mark.thorough
def test_a_text_survives_the_growth_of_the_caches(monkeypatch):
    monkeypatch.setattr(engine_module, "FIRST_CAPACITY", 70)
    small, params = plain_engine("llama"), ModelParams(target_params("llama"))
    engine = Engine(small.models, Autoregressive(), session_memory=None)
    engine.prepare()
    first = answer(engine, params, PROMPT, 12)[0]
    prompt = [*PROMPT, *tokens_of(first), *PROMPT] * 2
    engine.prepare(len(prompt) + 12)
    warm, cached = answer(engine, params, prompt, 12)
    cold, none = answer(small, params, prompt, 12)
    assert (cached, none) == (len(PROMPT) + 11, 0)
    assert tokens_of(warm) == tokens_of(cold) and logprobs_of(warm) == logprobs_of(cold)


@pytest.mark.thorough
def test_a_prompt_in_pieces_waits_for_other_texts(monkeypatch):
    """Two prompts are read in turn, rounds run between; what was read of a prompt that is given up is kept."""
    monkeypatch.setattr(engine_module, "CPU_PIECE", 5)
    for case in (BASIC[-1], BASIC[0]):
        engine, params, options = engine_of(case), params_of(case, "first layer"), SamplingParams(max_tokens=12)
        monkeypatch.setattr(engine, "session_memory", 2**30)
        texts = [list(PROMPT), [3, *PROMPT[::-1]]]
        monkeypatch.setattr(engine, "_idle", [])
        wanted = [tokens_of(answer(engine, params, text, 12)[0]) for text in texts]
        monkeypatch.setattr(engine, "_idle", [])
        one, other = (engine.open(params, text, options, 0, in_pieces=True) for text in texts)
        assert one.reading and len(one.tokens) == 6
        found = []
        while other.reading:
            other.read()
            if one.reading:
                one.read()
            else:
                found += one.step().tokens
        with pytest.raises(RuntimeError, match="ended"):
            engine.open(params, [4, *PROMPT], options, 0, in_pieces=True).step()
        while not one.done:
            found += one.step().tokens
        one.close()
        assert found == wanted[0]
        other.close()  # before its first round
        rounds, cached = answer(engine, params, texts[1], 12)
        assert cached >= len(PROMPT) - 1 and tokens_of(rounds) == wanted[1]
        left = engine.open(params, [5, *PROMPT], options, 0, in_pieces=True)
        left.read()
        left.close()
        assert answer(engine, params, [5, *PROMPT], 3)[1] in (10, 9)


def test_other_weights_share_nothing(monkeypatch):
    """The caches of one draft or target are of no use to another."""
    engine = engine_of(BASIC[0])
    monkeypatch.setattr(engine, "session_memory", None)
    assert answer(engine, params_of(BASIC[0], "copy"), PROMPT, 4)[1] == 0
    assert answer(engine, params_of(BASIC[0], "random"), PROMPT, 4)[1] == 0
    assert answer(engine, params_of(BASIC[0], "random"), PROMPT, 4)[1] == len(PROMPT) - 1


def test_memory_is_a_budget_and_the_oldest_text_goes_first(monkeypatch):
    engine, params = plain_engine("llama"), ModelParams(target_params("llama"))
    texts = [[first, *range(40, 70)] for first in range(3)]
    one = max(idle.num_bytes for idle in engine._idle)
    monkeypatch.setattr(engine, "_idle", [])
    monkeypatch.setattr(engine, "session_memory", 2 * one)
    cold = [answer(engine, params, text, 8)[0] for text in texts]
    assert len(engine._idle) == 2
    assert [answer(engine, params, text, 8)[1] for text in (texts[1], texts[2])] == [30, 30]
    assert answer(engine, params, texts[0], 8)[1] == 0 and len(engine._idle) == 2
    warm = [answer(engine, params, text, 8) for text in (texts[2], texts[0])]
    assert [cached for _, cached in warm] == [30, 30]
    assert [tokens_of(rounds) for rounds, _ in warm] == [tokens_of(cold[2]), tokens_of(cold[0])]


def test_a_shared_beginning_is_copied_where_there_is_room(monkeypatch):
    engine, params = plain_engine("llama"), ModelParams(target_params("llama"))
    system = [*range(70)]
    long, short = [*system, *[5, 6] * 60], [*system, 3]
    expected = answer(engine, params, short, 8)[0]
    monkeypatch.setattr(engine, "_idle", [])
    monkeypatch.setattr(engine, "session_memory", 2**30)
    answer(engine, params, long, 8)
    rounds, cached = answer(engine, params, short, 8)
    assert cached == 70 and tokens_of(rounds) == tokens_of(expected)
    assert answer(engine, params, long, 8)[1] == len(long) - 1


def test_an_older_text_goes_in_place_of_a_shared_beginning(monkeypatch):
    engine, params = plain_engine("llama"), ModelParams(target_params("llama"))
    old, long, short = [9, 8, 7] * 20, [*range(70), *[5, 6] * 60], [*range(70), 3]
    expected = answer(engine, params, short, 8)[0]
    monkeypatch.setattr(engine, "_idle", [])
    monkeypatch.setattr(engine, "session_memory", 2**30)
    answer(engine, params, old, 8)
    answer(engine, params, long, 8)
    monkeypatch.setattr(engine, "session_memory", sum(idle.num_bytes for idle in engine._idle))
    rounds, cached = answer(engine, params, short, 8)
    assert cached == 70 and tokens_of(rounds) == tokens_of(expected)
    assert answer(engine, params, long, 8)[1] == len(long) - 1


@pytest.mark.parametrize("slots", [64, 192, 576, 2048])
def test_chunks_after_what_is_kept_fit_into_the_cache(slots):
    for count in range(0, slots, 7):
        for common in range(0, count + 1, 5):
            kept = fit_kept(common, count, slots)
            assert common - min(CHUNKS) < kept <= common
            for most in (MOST_SMALL, MOST_SMALL_NATIVE):
                assert kept + sum(plan_chunks(count - kept, slots - kept, most)) <= slots
