"""Costs of passes and rounds, acceptance and predictions, by hand."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.config import SamplingParams
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import StepOutput
from jaxspec.tune import costs as module
from jaxspec.tune.costs import (
    LONGEST_CHAIN,
    Costs,
    measure_acceptance,
    measure_rounds,
    predict_chain,
    time_dispatches,
)

COSTS = Costs({1: 0.01, 2: 0.011, 4: 0.013, 8: 0.0125, 16: 0.033}, 0.002, 0.25, 0.1)


def quiet(*_):
    """No progress."""


def test_costs_between_the_rows_that_were_timed():
    """Straight lines between them, and never less for more rows: 8 rows were timed below 4 by chance."""
    expected = [1, 1.1, 1.2, 1.3, 1.3, 1.3, 1.3, 1.3, *(1.3 + 0.25 * n for n in range(1, 9))]
    assert COSTS.pass_cost() == pytest.approx(expected)
    assert COSTS.draft_cost == 0.2
    assert Costs({1: 0.01, 2: 0.02}, 0.0).draft_cost == 0
    assert len(Costs(dict.fromkeys(module.ROWS, 0.5), 0.0).pass_cost()) == 16
    assert COSTS.auto() == Auto(pass_cost=COSTS.pass_cost(), draft_cost=0.2, round_cost=0.25)
    unseen = dataclasses.replace(COSTS, round_cost=None)
    assert unseen.auto() == Auto(pass_cost=COSTS.pass_cost(), draft_cost=0.2)


def test_predictions_of_chains():
    """Expected length, 1 + 0.8 + 0.8 * 0.5 + ..., over a target pass, draft passes and the rest of a round."""
    acceptance = (0.8, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for tokens, length, cost in ((1, 1.8, 1.1 + 0.2), (2, 2.2, 1.2 + 0.4), (3, 2.6, 1.3 + 0.6), (8, 2.6, 1.55 + 1.6)):
        assert predict_chain(COSTS, acceptance, tokens) == pytest.approx(length * 1.1 / (cost + 0.25), abs=1e-3)


def output(tokens, drafted=0, passes=0):
    return StepOutput(tuple(tokens), (0.0,) * len(tokens), len(tokens) - 1 if drafted else 0, drafted, drafted, passes)


@pytest.mark.parametrize("enough", [True, False])
def test_what_rounds_cost_besides_their_passes(monkeypatch, enough):
    """On a machine that became half as fast since the passes were timed."""
    prompts = [BenchPrompt(n, "words", ("w1",)) for n in range(20)]
    methods, asked = [], []

    def with_method(method):
        methods.append(method)
        return SimpleNamespace(method=method, encode=lambda prompt: [1], tokenizer=SimpleNamespace(has_chat_template=0))

    def rounds(model, ids, sampling):
        asked.append(sampling.max_tokens)
        if model.method == Autoregressive():
            # Four tokens a round, one pass each.
            return [([output([1, 2, 3, 4])], 0.08 * (1 + rest)) for rest in (0.1, 0.125, 3.0)]
        plain = [([output([1])], seconds) for seconds in (0.1, 0.0, 0.0, 0.0)]
        drafted = [([output([1, 2], 3, 2)] * n, n * 0.02 * (1.3 + 2 * 0.2 + rest)) for n, rest in ((1, 0.5), (4, 0.25))]
        drafted += [([output([1, 2], 3, 2), output([1])], 9.0)]  # of two kinds
        copied = [([output([1, 2, 3], 15)], 0.02 * (3.3 + rest)) for rest in (0.0, -1.0, 1.5)]
        return plain + drafted + (copied if enough else [])

    monkeypatch.setattr(module, "time_target_pass", lambda *_: lambda passes: 0.02 * passes)
    monkeypatch.setattr(module, "time_dispatches", rounds)
    monkeypatch.setattr(module, "ROUND_PROMPTS", 2)
    llm = SimpleNamespace(with_method=with_method, params={}, engine=SimpleNamespace(models=SimpleNamespace(target=0)))
    before = Costs(COSTS.target_s, COSTS.draft_s)
    found = measure_rounds(llm, before, prompts, SamplingParams(max_tokens=20), quiet)
    assert methods == [Autoregressive(), dataclasses.replace(COSTS.auto(), round_cost=0.0)] and asked == [20] * 4
    # Two prompts: ten rounds with drafts, or four, which are too few.
    assert found == dataclasses.replace(before, plain_cost=0.125, round_cost=0.25 if enough else None)
    assert not found.quicker and "less time" not in "".join(found.lines(()))


def test_costs_are_never_negative(monkeypatch):
    """Where passes take less time in a round than alone, the cost is 0 and a line says so."""
    engine = SimpleNamespace(models=SimpleNamespace(target=0))
    llm = SimpleNamespace(
        encode=lambda p: [1], tokenizer=SimpleNamespace(has_chat_template=0), params={}, engine=engine
    )
    llm.with_method = lambda method: llm
    monkeypatch.setattr(module, "time_target_pass", lambda *_: lambda passes: 0.02 * passes)
    monkeypatch.setattr(module, "time_dispatches", lambda *_: [([output([1, 2], 1)], 0.01)] * 8)
    prompts = [BenchPrompt(1, "words", ("w1",))]
    found = measure_rounds(llm, Costs(COSTS.target_s, 0.0), prompts, SamplingParams(max_tokens=200), quiet)
    assert (found.round_cost, found.plain_cost, found.quicker) == (0, 0, True)
    assert "-" not in found.lines(())[1].partition(":")[2] and "counts as 0" in found.lines(())[-1]


class FakeSession:
    """Gives the rounds of some dispatches; its limit is the number of their tokens."""

    def __init__(self, answer, closed):
        self.answer, self.closed, self.done, self.ready = [list(rounds) for rounds in answer], closed, False, []

    def step(self):
        self.ready = self.ready or self.answer.pop(0)
        first = self.ready.pop(0)
        self.done = not self.answer and not self.ready
        return first

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.append("closed")


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_rounds_are_timed_from_one_to_the_next(monkeypatch, ignore_eos):
    """Neither the first nor the last, which may be cut; nothing after the end of a text."""
    drafted, ended = [output([3, 4], 4, 2)] * 4, [output([3]), output([9, 6], 4, 2)]
    answer = [[output([1])], drafted, [output([5])], ended, [output([7])], [output([8])]]
    times, events = iter([10.0, 10.5, 11.5, 13.5, 17.5, 25.5]), []
    engine = SimpleNamespace(
        check_request=lambda ids, sampling: None, token_limit=lambda ids, sampling: sampling.max_tokens,
        prepare=events.append, open=lambda *_: FakeSession(answer, events), settle=lambda: events.append("settled"),
    )  # fmt: skip
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    llm = SimpleNamespace(engine=engine, model_params=None, eos_ids=(9,))
    found = list(time_dispatches(llm, [1, 2], SamplingParams(max_tokens=8, ignore_eos=ignore_eos)))
    expected = list(zip(answer[1:5], (0.5, 1.0, 2.0, 4.0), strict=True))
    assert found == (expected if ignore_eos else expected[:2])
    assert events == [10, "closed", "settled"]


def test_acceptance_by_depth_counts_what_the_target_looked_at():
    counters = {"per_step_drafted": [3, 3, 0, 2], "per_step_accepted": [3, 1, 0, 0]}
    completion = SimpleNamespace(stats=SimpleNamespace(speculative_decoding=counters))
    chain = SimpleNamespace(
        tokenizer=SimpleNamespace(has_chat_template=True), encode=lambda prompt: [1], generate=lambda *_: completion
    )
    # Depth 1 was tried three times and accepted twice, depth 2 twice and once, depth 3 once.
    expected = [2 / 3, 1 / 2, 1.0, *[0.0] * (LONGEST_CHAIN - 3)]
    prompts = [BenchPrompt(1, "words", ("w1",)), BenchPrompt(2, "words", ("w2", "w3"))]
    llm = SimpleNamespace(with_method=lambda method: chain)
    assert measure_acceptance(llm, prompts, SamplingParams(), quiet) == pytest.approx(expected)
