"""How many draft passes a round has: what is chosen from times, and the lengths that a perfect draft then reaches."""

import itertools
import logging

import pytest
from marks import fast_part
from method_cases import PROMPT
from swiftspec_cases import BASIC, Case, Rounds, engine_of, models_of, params_of

from jaxspec.engine import Engine
from jaxspec.methods.swiftspec import runner as runners
from jaxspec.methods.swiftspec.runner import SwiftSpecChoice
from jaxspec.methods.swiftspec.schedule import choose_schedule, longest_mean, waited_passes
from jaxspec.methods.swiftspec.settings import SwiftSpec

ROUNDS = 9
BS = 8


def perfect(**settings):
    """A chain of the target itself, with room for eight passes."""
    return Case("llama", 1, 1, "same", SwiftSpec(BS - 1, 1, branch=1, depth=8, **settings))


PERFECT = [
    perfect(),
    perfect(reuse=False),
    perfect(leaves=False),
    perfect(refill=2),
    perfect(reuse=False, leaves=False),
    perfect(reuse=False, refill=3),
]


def expected_rounds(method, depth):
    """Tokens of each round, by the levels that the tree has below its root (docs/algorithms.md, "Re-rooting")."""
    lengths, levels = [], 0
    for _ in range(ROUNDS):
        # A root that is no node is run, which gives one level; a hit brings its own.
        levels = levels or 1 + (method.refill or 0)
        if not method.leaves:
            # A batch of nodes grows until it is full, and proposals lie one level deeper.
            levels = max(levels, BS)
        accepted = min(levels if method.leaves else levels - 1, BS - 1)
        lengths.append(accepted + 1)
        levels = levels + depth - (accepted + 1) if method.reuse else 0
    return lengths


FAST = fast_part([(case,) for case in PERFECT], lambda case: case in PERFECT[:3])


@pytest.mark.thorough
@pytest.mark.parametrize("case", FAST)
def test_a_perfect_draft_reaches_the_bound_of_its_schedule(case, monkeypatch):
    method, drafter = case.method, engine_of(case).runner.drafter
    for depth in range(1, 9):

        def expand(params, state, request, depth=depth):
            for _ in range(depth):
                state, size = drafter.expand_once(params, state, request)
            return state, size

        monkeypatch.setattr(drafter, "expand", expand)
        rounds = Rounds(case, "copy", PROMPT)
        lengths = []
        for _ in range(ROUNDS):
            rounds.step()
            lengths.append(len(rounds.sent))
        assert lengths == expected_rounds(method, depth)
        if method.leaves:
            bound = longest_mean(BS, depth, method.refill or 0)
            # Without reuse every round is the first one of a stretch.
            reached = lengths[1:] if method.reuse else lengths
            steady = 2 + (method.refill or 0) if not method.reuse or depth < 2 else bound
            assert set(reached) == {steady} or depth < 2 + (method.refill or 0) <= bound
            assert sum(lengths) / ROUNDS <= bound


def test_growth_beside_a_verification_takes_what_fits():
    limits = {"most_depth": 8, "most_refill": 6, "overlap": True}
    depths = [choose_schedule(ratio, None, None, **limits).depth for ratio in (0.4, 1.0, 2.9, 3.0, 7.5, 8.0, 1000.0)]
    assert depths == [1, 1, 2, 3, 7, 8, 8]
    assert choose_schedule(5.5, 3, None, **limits).depth == 3
    assert choose_schedule(5.5, None, 4, **limits).refill == 4


def test_passes_that_are_waited_for_have_to_pay():
    waited = [waited_passes(ratio, 6) for ratio in (0.5, 2, 4, 10, 30, 1000)]
    assert waited == sorted(waited) and waited[0] == 0 and waited[-1] == 6
    # The next pass adds 1/4 to 3/2 tokens: it pays where it lengthens the round by less than a sixth.
    assert (waited_passes(4.9, 6), waited_passes(5.1, 6)) == (0, 1)
    in_turn = choose_schedule(30, None, None, most_depth=8, most_refill=6, overlap=False)
    assert (in_turn.depth, in_turn.refill) == (waited_passes(30, 8), 0)


@pytest.mark.thorough
def test_a_depth_is_measured_where_none_is_given(monkeypatch):
    engine = Engine(models_of(BASIC), SwiftSpec(7, 4), 128)
    engine.prepare()
    assert not engine.runner.calibrated and engine.runner.report() is None
    monkeypatch.setattr(runners, "time_in_turn", lambda steps: {"verify": 5.5, "grow": runners.PROBE_PASSES * 1.0})
    engine.calibrate(params_of(BASIC))
    assert engine.runner.report() == SwiftSpecChoice(depth=5, refill=1, draft_passes_per_verification=5.5)
    with engine.open(params_of(BASIC), PROMPT, runners.SamplingParams(max_tokens=30), 0) as session:
        rounds = list(itertools.takewhile(lambda _: not session.done, (session.step() for _ in range(30))))
    later = [output.draft for output in rounds[1:]]
    assert {counts.passes - counts.exposed for counts in later} == {5}
    assert {counts.exposed for counts in later} <= {0, 2}


@pytest.mark.thorough
def test_a_depth_that_caps_the_length_is_said(caplog, monkeypatch):
    engine = Engine(models_of(BASIC), SwiftSpec(7, 4, depth=2), 128)
    engine.prepare()
    assert engine.runner.calibrated
    for ratio, warned in ((2.5, False), (6.5, True)):
        engine.runner.schedule = runners.Schedule(2, 0)
        monkeypatch.setattr(runners, "time_in_turn", lambda steps, ratio=ratio: {"verify": ratio, "grow": 2.0})
        with caplog.at_level(logging.WARNING):
            engine.calibrate(params_of(BASIC))
        assert ("depth 2 caps the acceptance length at 2 tokens" in caplog.text) == warned
    assert "6 draft passes fit" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{"leaves": False}, {"reuse": False}])
def test_a_depth_that_caps_nothing_is_not_warned_of(caplog, monkeypatch, settings):
    """Growth on demand fills a batch at any depth, and a tree that is dropped has no use for a larger one."""
    engine = Engine(models_of(BASIC), SwiftSpec(7, 4, depth=2, **settings), 128)
    engine.prepare()
    engine.runner.schedule = runners.Schedule(2, 0)
    monkeypatch.setattr(runners, "time_in_turn", lambda steps: {"verify": 6.5, "grow": 2.0})
    with caplog.at_level(logging.WARNING):
        engine.calibrate(params_of(BASIC))
    assert "caps the acceptance length" not in caplog.text
