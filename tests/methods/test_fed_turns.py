"""Feature drafts beside plain rounds: when they take a prompt, what they lack meanwhile, and what later turns keep."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    LLAMA_AUTO,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    Case,
    Steps,
    case_id,
    decode,
    engine_of,
    forget_drafts,
    models_of,
    params_of,
    plain,
    rounds_of,
    run,
    tokens_of,
)
from test_draft_cache import assert_prefix
from test_fed_drafts import BLOCKS, FED_ASSISTANT, FED_AUTO
from test_prefix_reuse import answer

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.core.sequence import ModelSequence


class Turns:
    """In place of the timer: two rounds of plain decoding, then one that may draft."""

    latest_s = plain_s = None

    def __init__(self):
        self.rounds = 0

    def begin_text(self):
        return None

    def may_draft(self):
        self.rounds += 1
        return self.rounds % 3 == 0

    def observe(self, *outputs, allowed, delayed=False):
        return None

    def leave_out(self):
        return None

    def forget_drafts(self):
        return None


@pytest.mark.thorough
def test_plain_rounds_feed_the_draft_too(monkeypatch):
    """Rounds of plain decoding, of one and of several tokens, leave the draft where drafted ones do."""
    monkeypatch.setattr(engine_of(FED_AUTO).runner, "timer", Turns())
    monkeypatch.setattr(engine_of(FED_AUTO).runner, "worth_taking", lambda *_: 0.0)
    forget_drafts(FED_AUTO)
    for index, sampling in enumerate(("greedy", "T=1")):
        rounds = decode(FED_AUTO, (PROMPT, PROMPT[:1])[index], 30, "copy", index, **SAMPLINGS[sampling])
        expected = plain("llama", (PROMPT, PROMPT[:1])[index], 30, index, **SAMPLINGS[sampling])
        assert tokens_of(rounds) == tokens_of(expected)
        assert {bool(one.drafted) for one in rounds} == {False, True}
        assert max(len(one.tokens) for one in rounds if not one.drafted) > 1
    steps, asked = Steps(FED_AUTO, "copy", LONG_PROMPT, 3, **SAMPLINGS["T=1"]), []
    steps.step()  # the draft begins after the first token
    for turn in range(8):
        known = len(steps.text)
        steps.step()
        fresh = steps.prefilled(steps.text)
        draft = steps.state.draft
        assert int(draft.sequence.seen) + int(draft.unfed.count) == known
        if int(draft.unfed.count) == 0:
            asked.append(turn)
            lengthened = dataclasses.replace(steps.caches()["draft"], length=known - 1)
            assert_prefix(lengthened, fresh.draft.sequence.cache, known - 1)
        verified, count = steps.state.verified, int(steps.state.verified.count)
        np.testing.assert_allclose(
            np.asarray(verified.states)[count - 1], np.asarray(fresh.verified.states)[0], rtol=1e-4, atol=1e-4
        )
    assert len(asked) > 1


def counting_fills(monkeypatch, runner, worth):
    """Of each prompt that the draft takes, the tokens that were read of the answer by then, at least `worth`."""
    taken, fill, take = [], runner.drafter.fill, runner._take_prompt

    def note(params, state, *rest):
        monkeypatch.setattr(runner.drafter, "fill", lambda *given: (taken.append(state.host.read), fill(*given))[1])
        waits = state.host.read < worth
        monkeypatch.setattr(runner, "worth_taking", lambda *_: np.inf if waits else 0.0)
        return take(params, state, *rest)

    monkeypatch.setattr(runner, "_take_prompt", note)
    return taken


@pytest.mark.parametrize("case", [FED_AUTO, pytest.param(LLAMA_AUTO, marks=pytest.mark.thorough)], ids=case_id)
def test_the_draft_takes_a_prompt_once_that_is_little_beside_the_answer(case, monkeypatch):
    runner, params = engine_of(case).runner, params_of(case, "copy")
    forget_drafts(case)
    monkeypatch.setattr(runner, "timer", Turns())
    taken = counting_fills(monkeypatch, runner, 20.0)
    expected = tokens_of(plain("llama", LONG_PROMPT, 88, 2))
    assert tokens_of(run(engine_of(case), params, LONG_PROMPT, 12, 2)) == expected[:12] and not taken
    rounds = run(engine_of(case), params, LONG_PROMPT, 88, 2)
    assert tokens_of(rounds) == expected[:88]
    assert len(taken) == 1 and 20 <= taken[0] <= 60 and sum(one.draft_passes > 0 for one in rounds) > 1


def test_a_draft_lacks_what_is_decoded_meanwhile_as_far_as_it_is_kept(monkeypatch):
    runner, asked = engine_of(FED_AUTO).runner, []
    forget_drafts(FED_AUTO)
    monkeypatch.setattr(runner, "timer", Turns())
    monkeypatch.setattr(runner, "worth_taking", lambda *given: (asked.append(given), np.inf)[1])
    run(engine_of(FED_AUTO), params_of(FED_AUTO, "copy"), PROMPT[:3], 155, 2, temperature=1.0)
    laws, lacking, most = zip(*asked, strict=True)
    assert set(laws) == {1} and 2 < lacking[0] < lacking[-1] == 2 + runner.drafter.unfed_rows
    assert list(lacking) == sorted(lacking) and max(most) <= 155


@pytest.mark.parametrize("case", [BLOCKS[4], FED_ASSISTANT], ids=case_id)
def test_a_turn_of_one_token_leaves_no_gap(case, monkeypatch):
    """A draft that has no rest holds every token of the text, though the text ended with its first token."""
    engine, params, prompt = engine_of(case), params_of(case, "copy"), list(PROMPT)
    monkeypatch.setattr(engine, "session_memory", None)
    monkeypatch.setattr(engine, "_idle", [])
    for turn, count in enumerate((1, 8, 1, 8)):
        with engine.open(params, prompt, SamplingParams(max_tokens=count), turn) as session:
            rounds = list(rounds_of(session))
            draft, cached = session._state.draft, session.num_cached
        assert tokens_of(rounds) == tokens_of(plain(case.family, prompt, count, turn))
        length = int(draft.text.length) - int(draft.text.start)
        assert int(draft.sequence.seen) + (0 if draft.unfed is None else int(draft.unfed.count)) == length
        assert not turn or cached >= len(prompt) - 8
        prompt += [*tokens_of(rounds), *PROMPT[turn : turn + 4]]


@pytest.mark.parametrize("worth", [120, np.inf], ids=["late", "never"])
def test_a_draft_goes_on_without_what_it_missed(worth, monkeypatch):
    """It takes the prompt and the latest tokens, or neither in a text; what the target holds is kept in any case."""
    engine, params = engine_of(FED_AUTO), params_of(FED_AUTO, "copy")
    runner, prompt = engine.runner, PROMPT[:3]
    forget_drafts(FED_AUTO)
    monkeypatch.setattr(engine, "session_memory", None)
    missing, count_missing = [], runner.drafter.num_missing
    monkeypatch.setattr(
        runner.drafter, "num_missing", lambda state: (missing.append(count_missing(state)), missing[-1])[1]
    )
    taken = counting_fills(monkeypatch, runner, worth)
    monkeypatch.setattr("jaxspec.engine.CPU_PIECE", 9)
    for turn, count in enumerate((150, 120)):
        rounds, cached = answer(engine, params, prompt, count, turn, in_pieces=True)
        assert tokens_of(rounds) == tokens_of(plain("llama", prompt, count, turn))
        asked = [one for one in rounds if one.draft_passes > 0]
        # In the second turn it takes all pieces of what is new but the last, on which it waits.
        assert turn or len(taken) == bool(asked) == (worth == 120)
        assert turn == 0 or len(taken) == 1
        assert cached == 0 if turn == 0 else 20 <= cached < len(prompt) - 1 and min(missing) > 0
        prompt = [*prompt, *tokens_of(rounds)[:20], *PROMPT[-13:]]
        taken.clear()


@pytest.mark.parametrize("most", [5, 40])
def test_a_draft_takes_the_end_of_a_long_prompt(most, monkeypatch):
    """In pieces and in later turns, too; what the target holds is kept."""
    engine, params = engine_of(FED_AUTO), params_of(FED_AUTO, "copy")
    forget_drafts(FED_AUTO)
    monkeypatch.setattr(engine, "session_memory", None)
    monkeypatch.setattr("jaxspec.engine.CPU_PIECE", 30)
    monkeypatch.setattr(type(engine.runner), "most_taken", most)
    monkeypatch.setattr(engine.runner, "worth_taking", lambda *_: 0.0)
    taken, fill = [], engine.runner.drafter.fill

    def note(params, state, pending):
        taken.append((len(pending.tokens) - pending.known, pending.begins))
        return fill(params, state, pending)

    monkeypatch.setattr(engine.runner.drafter, "fill", note)
    prompt = LONG_PROMPT
    for turn in range(3):
        rounds, cached = answer(engine, params, prompt, 12, turn, in_pieces=turn == 1)
        assert tokens_of(rounds) == tokens_of(plain("llama", prompt, 12, turn))
        assert cached > 60 or turn == 0
        prompt = [*prompt, *tokens_of(rounds), *PROMPT[:8]]
    assert max(count for count, _ in taken) <= most and max(begins for _, begins in taken) > 30


def test_an_interrupted_prompt_that_another_one_shares_a_part_of(monkeypatch):
    """The part ends before the tokens whose states were kept for the draft."""
    engine, params = engine_of(FED_AUTO), params_of(FED_AUTO, "copy")
    forget_drafts(FED_AUTO)
    monkeypatch.setattr(engine, "session_memory", None)
    monkeypatch.setattr(type(engine.runner), "most_taken", 20)
    monkeypatch.setattr(engine.runner, "worth_taking", lambda *_: 0.0)
    with engine.open(params, [3, *LONG_PROMPT], SamplingParams(max_tokens=5), 0):
        pass
    prompt = [3, *LONG_PROMPT[:35], 1, 2, 3]
    rounds, cached = answer(engine, params, prompt, 40, 1)
    assert tokens_of(rounds) == tokens_of(plain("llama", prompt, 40, 1)) and 20 < cached <= 36


def test_a_copy_of_an_interrupted_prompt(monkeypatch):
    """No round has run on it, so that a part of its state is on the host."""
    engine, params = engine_of(FED_AUTO), params_of(FED_AUTO, "copy")
    forget_drafts(FED_AUTO)
    monkeypatch.setattr(engine, "_idle", [])
    monkeypatch.setattr(engine, "session_memory", 2**30)
    long = [3, *LONG_PROMPT, *LONG_PROMPT]
    with engine.open(params, long, SamplingParams(max_tokens=5), 0):
        pass
    rounds, cached = answer(engine, params, [*long[:70], 1], 20, 1)
    assert tokens_of(rounds) == tokens_of(plain("llama", [*long[:70], 1], 20, 1)) and cached >= 64


@pytest.mark.parametrize("before", [1, 3, 64, 66])
def test_states_of_the_last_tokens(before):
    """They give the rows of a prompt that begins there."""
    models, params = models_of(FED_AUTO), params_of(FED_AUTO, "copy")
    layers = models.draft.cfg.features.layers
    target = ModelSequence(models.target, 192, "target", layers=layers, path=4)
    draft = ModelSequence(models.draft, 192, "draft", keeps_text=False)
    text = np.array(LONG_PROMPT[:-1], np.int32)
    _, states = target.prefill(params.target, target.start(0, None), text)
    last, size = states.of_last(before), len(states.chunks[0])
    assert sum(len(chunk) for chunk in last.chunks) - last.first == 128 - before and last.first < size
    alone = np.concatenate(states.chunks)[before : before + 64]
    alone = states._replace(chunks=[jnp.asarray(np.pad(alone, ((0, 64 - len(alone)), (0, 0))))])
    kept = text[before : before + 64]
    part, whole = (
        draft.prefill(params.draft, draft.start(0, None), kept, states=each)[0] for each in (last, alone)
    )  # fmt: skip
    assert int(part.seen) == int(whole.seen) == len(kept)
    assert_prefix(part.cache, whole.cache, len(kept) - 1)


@pytest.mark.parametrize("case", [FED_AUTO, FED_ASSISTANT], ids=case_id)
def test_a_text_survives_the_growth_of_the_caches(case, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.FIRST_CAPACITY", 70)
    models, params = models_of(case), params_of(case, "copy")
    engine = Engine(models, case.method, session_memory=None)
    engine.prepare()
    monkeypatch.setattr(type(engine.runner), "worth_taking", lambda *_: 0.0)
    rounds, _ = answer(engine, params, PROMPT, 12)
    worths, slots = engine.runner.worths, engine.runner.slots
    prompt = [*PROMPT, *tokens_of(rounds), *PROMPT]
    engine.prepare(len(prompt) + 30)
    rounds, cached = answer(engine, params, prompt, 30)
    assert tokens_of(rounds) == tokens_of(plain(case.family, prompt, 30, 0)) and engine.runner.slots > slots
    assert any(one.draft_passes for one in rounds) and engine.runner.worths is worths
    assert cached == (0 if case == FED_ASSISTANT else len(PROMPT) + 11)


def test_states_of_an_odd_number_of_rows():
    """Rounds of 13 tokens keep 117."""
    case = Case("llama", 1, "fed", Auto(num_draft_tokens=12, draft_cost=1e-3))
    assert engine_of(case).runner.drafter.unfed_rows == 117
    rounds = run(engine_of(case), params_of(case, "copy"), PROMPT[:3], 130, 1)
    assert tokens_of(rounds) == tokens_of(plain("llama", PROMPT[:3], 130, 1))
