"""When drafting pauses, on a clock that the test moves."""

import pytest

from jaxspec.methods.core import timing
from jaxspec.methods.core.round import StepOutput
from jaxspec.methods.core.timing import RoundTimer

PLAIN, DRAFTED = StepOutput((1,) * 4, (0.0,) * 4), StepOutput((1,) * 2, (0.0,) * 2, 1, 1, 1, 1)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def run(timer, clock, rounds, drafted_s, plain_s=1.0, output=DRAFTED):
    """So many rounds; returns whether each one could draft. A plain token takes `plain_s`."""
    allowed = []
    for _ in range(rounds):
        allowed.append(timer.may_draft())
        clock.seconds += drafted_s if allowed[-1] else plain_s * len(PLAIN.tokens)
        timer.observe(output if allowed[-1] else PLAIN, allowed=allowed[-1])
    return allowed


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    timer = RoundTimer(clock)
    timer.begin_text()
    return timer


def test_plain_rounds_come_first_and_again(timer, clock):
    allowed = run(timer, clock, 300, drafted_s=1.0)
    assert [place for place, drafts in enumerate(allowed) if not drafts] == [0, 3, 8, 17, 34, 67, 132, 197, 262]


def test_no_plain_round_is_asked_for_where_some_come_by_themselves(timer, clock):
    run(timer, clock, 40, drafted_s=1.0)
    for _ in range(10):
        assert all(run(timer, clock, 20, drafted_s=1.0))
        clock.seconds += 8.0
        timer.observe(PLAIN, allowed=True)
    assert timer.plain_s == 2.0


@pytest.mark.parametrize(("counts", "taken"), [([3], False), ([1, 1, 1, 4], False), ([4], True), ([3, 8], True)])
def test_a_plain_dispatch_counts_if_its_rounds_have_many_tokens(timer, clock, counts, taken):
    timer.observe(PLAIN, allowed=True)  # the first one of a text is not timed
    clock.seconds += 11.0
    timer.observe(*(StepOutput((1,) * count, (0.0,) * count) for count in counts), allowed=True)
    assert timer.plain_s == (11.0 / sum(counts) if taken else None)


def test_a_slow_start_is_forgotten(timer, clock):
    """A process that has just started is slow, and what it took then would make every draft seem to pay."""
    run(timer, clock, 5, drafted_s=6.0, plain_s=3.0)
    assert sum(run(timer, clock, 200, drafted_s=2.5)[60:]) < 20 and timer.plain_s == 1.0


def test_gain_is_tokens_per_time(timer, clock):
    run(timer, clock, 40, drafted_s=1.25)
    assert timer.plain_s == 1.0
    assert timer.gain == pytest.approx(2 / 1.25)
    assert timer.total_gain == pytest.approx(2 / 1.25)


def test_drafts_that_lose_pause_and_are_tried_again(timer, clock):
    allowed = run(timer, clock, 200, drafted_s=2.5)
    tried = timing.ENOUGH_ROUNDS + 3  # and three plain ones between them
    assert sum(allowed[:tried]) == timing.ENOUGH_ROUNDS
    paused = allowed[tried : tried + timing.FIRST_PAUSE]
    assert not any(paused)
    assert any(allowed[tried + timing.FIRST_PAUSE :])
    # The next pause is twice as long: few rounds draft in all.
    assert sum(allowed[tried:]) <= 2 * timing.ENOUGH_ROUNDS


def test_another_text_ends_a_pause(timer, clock):
    run(timer, clock, timing.ENOUGH_ROUNDS + 3 + 5, drafted_s=2.5)
    assert not timer.may_draft()
    timer.begin_text()
    assert timer.may_draft()


def test_the_first_round_of_a_text_and_pauses_of_the_caller_are_not_counted(timer, clock):
    run(timer, clock, 20, drafted_s=1.0)
    clock.seconds += 500
    timer.begin_text()
    run(timer, clock, 1, drafted_s=300.0)
    assert timer.gain == pytest.approx(2.0)
    # Within a text a pause counts as an outlier at most.
    run(timer, clock, 1, drafted_s=10_000.0)
    assert timer.total_s < 100


def test_a_round_after_one_that_is_left_out_is_not_timed(timer, clock):
    for expected in (None, 3.0):
        clock.seconds += 3.0
        if expected is None:
            timer.leave_out()
        timer.observe(DRAFTED, allowed=True)
        assert timer.latest_s == expected


def test_a_pass_beside_a_round_is_not_the_rounds(timer, clock):
    run(timer, clock, 20, drafted_s=1.0)
    gain = timer.gain
    timer.may_draft()
    clock.seconds += 1.0 + 3.0
    timer.observe(DRAFTED, allowed=True, delayed=True)
    assert timer.gain == gain
    assert timer.pass_s == timer.spent_s == pytest.approx(3.0)


def test_rounds_of_one_dispatch_share_its_time(timer, clock):
    """Its rounds without a draft take the time of plain decoding."""
    for seconds, outputs, allowed in (
        (4.0, [PLAIN], False),
        (4.0, [PLAIN], False),
        (9.0, [DRAFTED, PLAIN, DRAFTED], True),
    ):
        clock.seconds += seconds
        timer.observe(*outputs, allowed=allowed)
    assert timer.plain_s == 1.0 and timer.drafted_s == 2.5
    assert timer.gain == pytest.approx(4 / 5)


def test_the_first_turn_warms_up_and_is_dropped():
    turns = iter([9.0, 1.0, 5.0, 2.0])
    assert timing.time_turns(lambda: {"pass": next(turns)}, 3) == {"pass": 2.0}
