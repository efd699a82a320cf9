"""Costs of rounds learned from the times of dispatches, against made-up machines."""

import dataclasses

import numpy as np
import pytest

from jaxspec.methods.auto.costs import AutoChoice
from jaxspec.methods.auto.online import DRAFT_CHEAPER, SCALE_OF, TAKEN_TOGETHER, CostFilter
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.round import StepOutput
from jaxspec.methods.core.timing import HOPE, LEAST_WAIT, Worth

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


def see_plain(costs, times=(4 * PLAIN_S,) * SCALE_OF):
    """Plain dispatches of four tokens, which took so many seconds each."""
    for seconds in times:
        costs.observe([StepOutput((1,) * 4, (0.0,) * 4)], seconds)


def decode(costs, true, dispatches=150, speed=1.0, seed=0, outliers=0.0):
    rng = np.random.default_rng(seed)
    for _ in range(dispatches):
        outputs = rounds_of(rng)
        seconds = time_of(outputs, true, speed) * rng.normal(1, 0.08)
        costs.observe(outputs, seconds * (20 if rng.random() < outliers else 1))
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
    see_plain(costs)
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
    see_plain(costs)
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
        took_in = costs.observe(outputs, time_of(outputs, true) * rng.normal(1, 0.08) if number != 100 else None)
        settled = 3 * SCALE_OF - 1  # the plain dispatch that sets the scale
        assert (took_in is not None) == (number <= settled or (number - settled) % TAKEN_TOGETHER == 0)
    np.testing.assert_allclose(costs.costs().passes[[3, 7]], true.passes[[3, 7]], rtol=0.06)


def test_short_drafts_do_not_make_passes_dear():
    """A draft costs 0.4 beyond its passes: as few of them are seen, a pass could seem to cost that."""
    costs, rng = CostFilter(BELIEVED), np.random.default_rng(0)
    plain, drafted = StepOutput((1,) * 4, (0.0,) * 4), StepOutput((1, 1), (0.0, 0.0), drafted=2, draft_passes=1)
    for number in range(300):
        outputs = [drafted, drafted] if number % 4 else [plain]
        dear = 0.4 * PLAIN_S * sum(output.draft_passes for output in outputs)
        costs.observe(outputs, (time_of(outputs, BELIEVED) + dear) * rng.normal(1, 0.08))
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
            costs.observe([plain], time_of([plain], true))
        late = true.draft * true.row * 4 * plain_rounds * PLAIN_S
        costs.observe([drafted], time_of([drafted], true) + late)
    assert costs.costs().spent(2, 1) == pytest.approx(BELIEVED.spent(2, 1), abs=0.02)


def dispatch(tokens, passes, drafted=None):
    return [
        StepOutput((1,) * tokens, (0.0,) * tokens, drafted=passes if drafted is None else drafted, draft_passes=passes)
    ]


def believing(gain, learned=(0, 0, 0, 0)):
    """A `Worth` by whose costs a chain of one token that is right in half of all places decodes so fast."""
    worth = Worth(learned)
    believe(worth, gain)
    return worth


def believe(worth, gain):
    worth.believe(CostModel(np.ones(2), draft=1.5 / gain - 1, round=0.0), 0.5, 1)
    return worth


def half_right(worth, rounds=1, seconds=None):
    """Drafts of a token, every second one of which is right; returns what they gained."""
    return [worth.note(dispatch(1 + n % 2, 1, 1), seconds, seconds and 1.0) for n in range(2 * rounds)]


def test_a_prompt_is_taken_where_drafts_were_measured_to_gain():
    worth = believing(1.2)
    assert worth.taking(10.0) == LEAST_WAIT  # it has paid for that long before a text ends
    assert worth.taking(4.0) == 1.0  # copies will not have brought so many
    believe(worth, 0.9)
    assert worth.taking(4.0) == 200.0
    believe(worth, 1.02)  # texts differ: without that it would wait for 200 tokens
    assert worth.taking(4.0) == LEAST_WAIT
    for _ in range(240):
        assert worth.note(dispatch(4, 0), 4.0, 1.0) == 0.0
        assert sum(half_right(worth, seconds=1.8)) == pytest.approx(-0.6, abs=0.01)
    believe(worth, 1.5)  # most of what is known was timed
    # It seems to be tried once in a while, and is not after it was.
    assert worth.taking(4.0) == 200.0
    # At once where the answer may have so many tokens: later, more than that would be lacking.
    assert worth.taking(2.0) == LEAST_WAIT and worth.taking(2.0, most=90) == 100.0
    worth.end_text(200, False, 0.0)
    assert worth.taking(4.0) == LEAST_WAIT
    worth.end_text(40, True, -1.0)
    assert worth.taking(4.0) == 400.0
    for _ in range(100):
        assert sum(half_right(worth, seconds=1.0)) == pytest.approx(1.0, abs=0.01)
    # One text in which they gained nothing is no reason to wait for longer, if they do on the whole.
    worth.end_text(40, True, -1.0)
    assert worth.taking(4.0) == 1.0
    believe(worth, 0.01)
    for _ in range(200):
        half_right(worth, seconds=1.8)
    assert worth.taking(4.0) == 200.0
    # Answers of a few tokens end before a draft has paid for a long prompt.
    worth = believing(1.5)
    for _ in range(40):
        worth.end_text(6, False, 0.0)
    assert 20 < worth.taking(8.0) < 26


def test_a_draft_that_is_always_wrong_takes_no_more_prompts():
    """Its rounds are so few that their times say little; what they brought says it."""
    worth = believing(1.2)
    for _ in range(6):
        worth.note(dispatch(1, 1), None, None)
    assert worth.gain < 1 and worth.taking(4.0) == 200.0
    # What was learned earlier counts as more than a few drafts do.
    worth = believing(1.2, (40, 20, 40, 40))
    for _ in range(6):
        worth.note(dispatch(1, 1), None, None)
    assert worth.gain == pytest.approx(HOPE * 1.2 * (1 + 22 / 50) / 1.5, rel=0.01)
    # A draft none of whose tokens was worth a row brought nothing, though plain decoding went on in its round.
    worth = believing(1.2)
    for _ in range(6):
        worth.note(dispatch(8, 1, 0), None, None)
    assert worth.gain < 1


def test_passes_that_take_in_tokens_are_not_those_of_a_draft():
    """A draft that was not asked for long begins with many of them."""
    worth, usual = believing(1.2), believing(1.2)
    worth.note([dataclasses.replace(dispatch(2, 13, 1)[0], depth=1)], None, None)
    usual.note(dispatch(2, 1), None, None)
    assert worth.gain == usual.gain > HOPE * 1.2


def test_what_one_long_text_taught_is_forgotten_too():
    worth = believing(1.3, (1000, 600, 1000, 1000))
    for _ in range(200):
        worth.note(dispatch(1, 1), None, None)
    assert worth.gain < 1


def test_trials_of_a_draft_that_loses_a_little_grow_rare():
    worth = believing(0.995)
    assert worth.gain > 1 and worth.taking(4.0) == 200.0
    worth.end_text(250, False, 0.0)
    worth.end_text(40, True, -1.0)
    assert worth.taking(4.0) > 270.0


def test_the_best_chain_is_as_long_as_it_pays():
    costs = CostModel(np.ones(9), draft=0.3, round=0.0)
    assert costs.best_chain(0.5, 8) == (0.5, 1.0, 1.0)  # 1.5 / 1.3 is more than 1.75 / 1.6
    assert costs.best_chain(0.9, 3)[1:] == (3.0, 3.0)
    assert dataclasses.replace(costs, one_pass=True).best_chain(0.5, 8)[1:] == (8.0, 1.0)
    assert CostModel(1 + np.arange(9.0), one_pass=True, draft=0.3, round=0.0).best_chain(0.5, 8)[1:] == (1.0, 1.0)


def test_copies_and_interruptions_say_nothing_of_drafts():
    worth = believing(1.2)
    before = worth.taking(50.0)
    for outputs in (dispatch(9, 0, 8), dispatch(9, 1, 8), dispatch(4, 0) + dispatch(9, 0, 8)):
        assert worth.note(outputs, 9.0, 1.0) == 0.0 and worth.taking(50.0) == before
    assert worth.note(dispatch(2, 1), None, 1.0) == worth.note(dispatch(2, 1), 9.0, None) == 0.0
    assert worth.note(dispatch(2, 1), 1e4, 1.0) == -4.0


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_slower_moment_changes_no_ratio(speed):
    costs = CostFilter(BELIEVED)
    before = decode(costs, BELIEVED)
    after = decode(costs, BELIEVED, 30, speed, seed=1)
    np.testing.assert_allclose(after.rounds, before.rounds, rtol=0.2)
    assert costs.plain_s == pytest.approx(PLAIN_S / speed, rel=0.2)


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_a_stalled_reader_at_the_beginning_ruins_no_ratio(stalled):
    """One of the first dispatches took twenty times as long."""
    costs, times = CostFilter(BELIEVED), [4 * PLAIN_S] * SCALE_OF
    times[stalled] *= 20
    see_plain(costs, times)
    found = decode(costs, BELIEVED, 30)
    np.testing.assert_allclose(found.rounds, BELIEVED.rounds, rtol=0.2)
    assert costs.plain_s == pytest.approx(PLAIN_S, rel=0.2)


def test_nothing_is_corrected_before_plain_decoding_was_seen():
    costs = CostFilter(BELIEVED)
    costs.observe([StepOutput((1, 1), (0.0, 0.0), drafted=3, draft_passes=3)], 1.0)
    see_plain(costs, [4 * PLAIN_S] * (SCALE_OF - 1))
    assert costs.costs() is BELIEVED and costs.plain_s is None


def test_drafts_alone_are_believed_cheaper():
    costs = CostFilter(BELIEVED)
    see_plain(costs)
    decode(costs, BELIEVED, TAKEN_TOGETHER)
    likely, hoped = costs.costs(), costs.costs(DRAFT_CHEAPER)
    assert hoped.draft < likely.draft and hoped.draft_overhead <= likely.draft_overhead
    assert hoped.round == likely.round and (hoped.passes == likely.passes).all()
    for _ in range(TAKEN_TOGETHER):
        used = costs.observe([StepOutput((1,), (0.0,))], None)
    assert used.draft == pytest.approx(hoped.draft)


def test_figures_stay_possible():
    costs = CostFilter(BELIEVED)
    see_plain(costs, (PLAIN_S, 1e-9, 1e3))
    for seconds in (PLAIN_S, 1e-9, 1e3, 0.0, *[1e-7] * 50):
        costs.observe(rounds_of(np.random.default_rng(3)), seconds)
        costs.observe([StepOutput((1,), (0.0,))], seconds)
        found = costs.costs()
        assert np.isfinite(found.passes).all() and (np.diff(found.passes) >= 0).all()
        assert found.draft > 0 and found.round >= 0 and costs.plain_s > 0
