"""Costs of rounds learned from the times of dispatches, against made-up machines, and what follows from them."""

import dataclasses

import numpy as np
import pytest

from jaxspec.methods.auto.costs import AutoChoice
from jaxspec.methods.core import timing
from jaxspec.methods.core.cost_model import PRIOR_MEAN, CostModel
from jaxspec.methods.core.round import StepOutput
from jaxspec.methods.core.timing import (
    FIRST_SCALES,
    LEAST_WAIT,
    TAKEN_TOGETHER,
    CostFilter,
    Dispatch,
    Worth,
    differ,
    own_drafts,
)

BELIEVED = CostModel(1 + 0.1 * np.arange(16.0), draft=0.07, round=0.05, source="measured")
PLAIN_S = 0.005


def rounds_of(rng):
    """The rounds of a dispatch: plain ones, or four, of which most have drafts; some of these are worth no row."""
    if rng.random() < 0.2:
        return [StepOutput((1,) * 4, (0.0,) * 4)]
    drafted = rng.integers(0, 16, 4)
    return [
        StepOutput((1,) * (1 + int(n) // 3 if n else 4), (0.0,), drafted=int(n), draft_passes=int(min(n, 8) + (n == 0)))
        for n in drafted
    ]


def time_of(outputs, true, speed=1.0):
    """Seconds of a dispatch on a machine of the costs `true`."""
    total = 0.0
    for output in outputs:
        plain = 1 if output.drafted else len(output.tokens)
        total += plain + true.passes[output.drafted] - 1 + true.round + true.draft * output.draft_passes
    return PLAIN_S * total / speed


def decode(costs, true, dispatches=150, speed=1.0, seed=0, outliers=0.0):
    rng = np.random.default_rng(seed)
    for _ in range(dispatches):
        outputs = rounds_of(rng)
        seconds = time_of(outputs, true, speed) * rng.normal(1, 0.08)
        costs.observe(Dispatch(outputs, seconds * (20 if rng.random() < outliers else 1)))
    return costs.costs()


@pytest.mark.parametrize("outliers", [0.0, 0.02])
@pytest.mark.parametrize(
    "true",
    [
        CostModel(1 + 0.2 * np.arange(16.0), draft=0.15, round=0.4),
        CostModel(1 + 0.05 * np.arange(16.0), draft=0.03, round=0.0),
        BELIEVED,
    ],
)  # fmt: skip
def test_it_finds_the_costs_of_the_machine(true, outliers):
    costs = CostFilter(BELIEVED)
    costs.observe(Dispatch([StepOutput((1,) * 4, (0.0,) * 4)], 4 * PLAIN_S))
    found = decode(costs, true, outliers=outliers)
    rows = np.array([2, 4, 8, 16]) - 1
    chains = lambda model: model.passes[rows] + model.round + model.draft * np.minimum(rows, 8)  # noqa: E731
    np.testing.assert_allclose(chains(found), chains(true), rtol=0.15)
    assert found.source == "measured" and found.passes[0] == 1
    assert "round_cost" in repr(AutoChoice(**found.report()))


def test_a_measurement_of_a_wrong_form_is_corrected():
    """Two to eight rows were measured alike, as among other programs."""
    flat = CostModel(1 + 0.3 * (np.arange(16.0) > 0), draft=0.07, round=0.05, source="measured")
    costs, true = CostFilter(flat), CostModel(1 + 0.2 * np.arange(16.0), draft=0.07, round=0.05)
    costs.observe(Dispatch([StepOutput((1,) * 4, (0.0,) * 4)], 4 * PLAIN_S))
    found = decode(costs, true)
    np.testing.assert_allclose(found.passes[[3, 7, 15]], true.passes[[3, 7, 15]], rtol=0.15)


def test_rows_that_are_never_seen_leave_the_others_alone():
    """Two rows were measured as dear as many, and drafts have three or seven tokens."""
    flat = CostModel(np.array([1.0, *[1.6] * 14, 1.75]), draft=0.07, round=0.05, source="measured")
    true = CostModel(np.interp(np.arange(16), [0, 1, 3, 7, 15], [1, 1.05, 1.15, 1.35, 1.75]), draft=0.07, round=0.05)
    costs, rng = CostFilter(flat), np.random.default_rng(0)
    for number in range(400):
        drafted = [3, 7, 0][number % 3]
        outputs = [StepOutput((1,) * 4, (0.0,) * 4, drafted=drafted, draft_passes=min(drafted, 1))]
        took_in = costs.observe(
            Dispatch(outputs, time_of(outputs, true) * rng.normal(1, 0.08) if number != 100 else None)
        )
        assert (took_in is not None) == (number < FIRST_SCALES or (number - FIRST_SCALES + 1) % TAKEN_TOGETHER == 0)
    np.testing.assert_allclose(costs.costs().passes[[3, 7]], true.passes[[3, 7]], rtol=0.06)


def test_short_drafts_do_not_make_passes_dear():
    """A draft costs 0.4 beyond its passes: as few of them are seen, a pass could seem to cost that."""
    costs, rng = CostFilter(BELIEVED), np.random.default_rng(0)
    plain, drafted = StepOutput((1,) * 4, (0.0,) * 4), StepOutput((1, 1), (0.0, 0.0), drafted=2, draft_passes=1)
    for number in range(300):
        outputs = [drafted, drafted] if number % 4 else [plain]
        dear = 0.4 * PLAIN_S * sum(output.draft_passes for output in outputs)
        costs.observe(Dispatch(outputs, (time_of(outputs, BELIEVED) + dear) * rng.normal(1, 0.08)))
    found = costs.costs()
    assert found.draft < 1.5 * BELIEVED.draft
    assert found.draft + found.draft_overhead + found.rounds[2] == pytest.approx(0.47 + BELIEVED.rounds[2], abs=0.12)


@pytest.mark.parametrize(("plain_rounds", "draft"), [(10, BELIEVED.draft), (40, 0.5)])
def test_a_draft_after_other_rounds_takes_what_it_lacks_first(plain_rounds, draft):
    """These tokens are no part of what a draft costs; of very many it is not certain how many were taken."""
    plain, drafted = StepOutput((1,) * 4, (0.0,) * 4), StepOutput((1, 1), (0.0, 0.0), drafted=2, draft_passes=1)
    costs, true = CostFilter(BELIEVED), dataclasses.replace(BELIEVED, draft=draft)
    for _ in range(20):
        for _ in range(plain_rounds):
            costs.observe(Dispatch([plain], time_of([plain], true)))
        late = true.draft * true.row * 4 * plain_rounds * PLAIN_S
        costs.observe(Dispatch([drafted], time_of([drafted], true) + late))
    assert costs.costs().spent(2, 1) == pytest.approx(BELIEVED.spent(2, 1), abs=0.02)


def test_a_prompt_is_taken_where_drafts_are_believed_to_gain():
    worth = Worth()
    assert worth.taking(4.0, 1.2) == LEAST_WAIT  # 24 tokens are fewer than a text has
    # It seems to be tried once in a while, and is not after it was.
    assert worth.taking(4.0, 0.9) == 200.0
    # At once where the answer may have so many tokens: later, more than that would be lacking.
    assert worth.taking(2.0, 0.9) == LEAST_WAIT and worth.taking(2.0, 0.9, most=90) == 100.0
    worth.end_text(200, taken=False, gained=False)
    assert worth.taking(4.0, 0.9) == LEAST_WAIT
    worth.end_text(40, taken=True, gained=False)
    assert worth.taking(4.0, 0.9) == 400.0
    worth.end_text(40, taken=True, gained=True)
    assert worth.taking(4.0, 0.9) == 200.0
    # Answers of a few tokens end before a draft has paid for a long prompt.
    for _ in range(40):
        worth.end_text(6, taken=False, gained=False)
    assert worth.taking(8.0, 2.0) == 16.0


def test_what_recent_drafts_brought_says_whether_they_gain():
    worth, first = Worth(), Worth().gain(BELIEVED, 8)
    assert first > BELIEVED.gain(*BELIEVED.best_chain(PRIOR_MEAN, 8)), "what is not known is hoped for"
    vain, right = (own_drafts([StepOutput((1,) * (1 + n), (0.0,) * (1 + n), n, 3, 3, 3)]) for n in (0, 3))
    assert vain.tolist() == [1, 0, 3, 3] and right.tolist() == [1, 3, 3, 3]
    for _ in range(200):
        worth.note(vain)
    assert worth.gain(BELIEVED, 8) < 0.8
    for _ in range(400):
        worth.note(right)
    assert worth.gain(BELIEVED, 8) == pytest.approx(BELIEVED.gain(3, 3, 3), rel=0.1)
    # An earlier process saw thousands; they count as some of this one.
    known = Worth(np.array([5000.0, 0.0, 15000.0, 15000.0]))
    assert known.gain(BELIEVED, 8) < 0.8
    for _ in range(400):
        known.note(right)
    assert known.gain(BELIEVED, 8) == pytest.approx(worth.gain(BELIEVED, 8), rel=0.1)


def test_copies_and_plain_rounds_are_no_drafts():
    for tokens, accepted, drafted, passes in ((9, 8, 8, 0), (9, 8, 8, 1), (4, 0, 0, 0)):
        assert not own_drafts([StepOutput((1,) * tokens, (0.0,) * tokens, accepted, drafted, 0, passes)]).any()


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_slower_moment_changes_no_ratio(speed):
    costs = CostFilter(BELIEVED)
    before = decode(costs, BELIEVED)
    after = decode(costs, BELIEVED, 30, speed, seed=1)
    np.testing.assert_allclose(after.rounds, before.rounds, rtol=0.2)
    assert costs.plain_s == pytest.approx(PLAIN_S / speed, rel=0.2)


PLAIN, DRAFTED = StepOutput((1,) * 4, (0.0,) * 4), StepOutput((1,) * 2, (0.0,) * 2, 1, 1, 1, 1)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def times(clock):
    """A filter that has read the first dispatch of a text."""
    times = CostFilter(BELIEVED, clock, together=1)
    times.read([PLAIN])
    return times


def read(times, clock, outputs, extra_s=0.0, **how):
    clock.seconds += time_of(outputs, BELIEVED) + extra_s
    times.read(outputs, **how)


def test_the_first_dispatches_set_the_scale_by_their_median(times, clock):
    read(times, clock, [PLAIN], 500)
    read(times, clock, [DRAFTED, PLAIN])
    assert times.plain_s is None and times.costs() is BELIEVED
    read(times, clock, [PLAIN])
    # A draft has to take what plain rounds decoded.
    assert times.plain_s == pytest.approx(PLAIN_S, rel=0.02) and not differ(times.costs(), BELIEVED)


def test_the_time_before_a_text_or_beside_one_that_is_not_settled_is_no_dispatchs(times, clock):
    for _ in range(FIRST_SCALES):
        read(times, clock, [PLAIN])
    total = times.total_s
    clock.seconds += 500
    times.begin_text()
    read(times, clock, [PLAIN], 500)
    read(times, clock, [PLAIN], 500, settled=False)
    read(times, clock, [PLAIN], 500)
    assert times.plain_s == pytest.approx(PLAIN_S) and times.total_s == total
    # A paused consumer counts as an outlier.
    read(times, clock, [PLAIN], 10_000)
    assert times.total_s - total == pytest.approx(timing.OUTLIER * time_of([PLAIN], BELIEVED))


def test_a_pass_before_rounds_is_not_theirs(times, clock):
    for _ in range(FIRST_SCALES):
        read(times, clock, [PLAIN])
    before = times.costs()
    read(times, clock, [DRAFTED], 3 * PLAIN_S, delayed=True)
    assert times.passes == 1 and times.spent_s == pytest.approx(3 * PLAIN_S, rel=0.05)
    assert not differ(times.costs(), before) and times.gain is None


def test_a_draft_made_in_another_way_costs_in_proportion(times, clock):
    times.rescale_draft(2.0)
    assert times.costs().draft == pytest.approx(2 * BELIEVED.draft)
    for _ in range(FIRST_SCALES):
        read(times, clock, [PLAIN])
    times.rescale_draft(0.5)
    assert times.costs().draft == pytest.approx(BELIEVED.draft) and times.plain_s == pytest.approx(PLAIN_S)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_lose_are_found_out(seed):
    """A slow machine looks like dear drafts, unless plain dispatches are timed: some are asked for."""
    believed = CostModel(BELIEVED.passes, draft=0.2, round=0.3)
    true, times, rng = dataclasses.replace(believed, draft=0.9), CostFilter(believed), np.random.default_rng(seed)
    asked = 0
    for _ in range(200):
        plain = times.asks_plain()
        asked += plain
        tokens = int(rng.integers(3, 5))
        outputs = [PLAIN] if plain else [StepOutput((1,) * 3, (0.0,) * 3, 2, tokens, tokens, tokens)] * 3
        times.observe(Dispatch(outputs, time_of(outputs, true) * rng.normal(1, 0.08)))
    assert 4 <= asked < 10
    assert times.costs().gain(2, 4, 4) < 1 < believed.gain(2, 4, 4) and times.costs().source == "corrected"


def test_gain_is_tokens_per_time(times, clock):
    for _ in range(60):
        for outputs, seconds in (([PLAIN], time_of([PLAIN], BELIEVED)), ([DRAFTED], 1.25 * PLAIN_S)):
            clock.seconds += seconds
            times.read(outputs)
    assert times.gain == pytest.approx(2 / 1.25 * BELIEVED.rounds[0], rel=0.05)


def test_the_first_turn_warms_up_and_is_dropped():
    turns = iter([9.0, 1.0, 5.0, 2.0])
    samples = timing.time_turns(lambda: {"pass": next(turns)}, 3)
    assert samples == [{"pass": 1.0}, {"pass": 5.0}, {"pass": 2.0}]
    assert timing.medians(samples) == {"pass": 2.0}


def test_figures_stay_possible():
    costs = CostFilter(BELIEVED)
    costs.observe(Dispatch([PLAIN], 4 * PLAIN_S))
    for seconds in (PLAIN_S, 1e-9, 1e3, 0.0, *[1e-7] * 50):
        costs.observe(Dispatch(rounds_of(np.random.default_rng(3)), seconds))
        costs.observe(Dispatch([StepOutput((1,), (0.0,))], seconds))
        found = costs.costs()
        assert np.isfinite(found.passes).all() and (np.diff(found.passes) >= 0).all()
        assert found.draft > 0 and found.round >= 0 and costs.plain_s > 0


def test_what_differs():
    assert not differ(BELIEVED, BELIEVED)
    assert differ(BELIEVED, CostModel(BELIEVED.passes, 0.12, 0.05)) and differ(
        BELIEVED, CostModel(1.1 * BELIEVED.passes, 0.07, 0.05)
    )
