"""Times measured on the host: of passes in turn, and of rounds, for what drafting gains and when it should pause.

The decision about pauses follows a clock, which is that of process 0 where there are several: `hosts.clock`.
"""

import collections
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.methods.core.round import StepOutput
from jaxspec.runtime import hosts

# A plain dispatch is asked for first, and then after 2, 4, 8, ... dispatches without one, at most so many: the first
# times of a process are too long. Plain dispatches and drafted rounds that are remembered.
PLAIN_EVERY, PLAIN_REMEMBERED, REMEMBERED = 64, 9, 64
# Drafted rounds after which the measured gain counts (half as many once it was too low), and rounds without drafts
# while it is too low: the first time, and at most.
ENOUGH_ROUNDS, FIRST_PAUSE, LONGEST_PAUSE = 12, 32, 1024
# Rounds slower than this many times the expected time are outliers, such as a paused consumer.
OUTLIER = 10


def time_turns(turn: Callable[[], dict[Any, float]], samples: int) -> list[dict[Any, float]]:
    """Samples of `turn`, which times each kind of pass once, in seconds by name; those of its first call are dropped.

    Passes are timed in turn because a machine's speed drifts, and the first ones warm up.
    """
    turn()
    return [turn() for _ in range(samples)]


def medians(samples: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """The median of each name, which all samples have."""
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


class RoundTimer:
    """Times of rounds of all texts, and what follows from them.

    The time of a dispatch of one round or several is the time from the read of the dispatch before it to its own read:
    one runs while the one before is read. The first one of a text has none before it and is not timed.
    """

    def __init__(self, now: Any = hosts.clock):
        """Nothing measured; `now` is the clock."""
        self.now = now  # tells the time in seconds; tests give their own
        self.total_s = 0.0  # seconds of timed rounds
        # Seconds of one pass that ran beside a round, such as a step of a search; and of all such passes.
        self.pass_s: float | None = None
        self.spent_s = 0.0
        self.latest_s: float | None = None  # of the latest dispatch, as timed; None where it was not
        self._last: float | None = None
        self._plain: collections.deque[float] = collections.deque(maxlen=PLAIN_REMEMBERED)
        self._drafted: collections.deque[tuple[int, float]] = collections.deque(maxlen=REMEMBERED)
        self._ever = [0, 0.0]  # tokens and seconds of drafted rounds
        self._rounds = self._paused_until = 0
        self._plain_until, self._plain_wait = 0, 1  # no plain dispatch is asked for up to this one
        self._pause, self._enough = FIRST_PAUSE, ENOUGH_ROUNDS

    @property
    def plain_s(self) -> float | None:
        """Seconds of a token without a draft; the median of the latest rounds."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def drafted_s(self) -> float | None:
        """Seconds of a round with a draft; the median of the latest ones."""
        return statistics.median(seconds for _, seconds in self._drafted) if self._drafted else None

    @property
    def gain(self) -> float | None:
        """Speed of the latest drafted rounds over that of plain decoding; None before both were measured."""
        tokens, seconds = (sum(column) for column in zip(*self._drafted, strict=True)) if self._drafted else (0, 0.0)
        return tokens / seconds * self.plain_s if seconds and self.plain_s is not None else None

    def begin_text(self) -> None:
        """Another text starts: the time until its first round is not attributed, and a pause ends."""
        self._last = None
        self._paused_until = 0

    def leave_out(self) -> None:
        """A round was read that is not to be timed, nor is the one after it."""
        self._last = self.latest_s = None

    def forget_drafts(self) -> None:
        """Drafts are made in another way from now on: what was measured of them says nothing."""
        self._drafted.clear()
        self._paused_until = 0
        self._pause, self._enough = FIRST_PAUSE, ENOUGH_ROUNDS

    def may_draft(self) -> bool:
        """Whether the next round may: not while plain decoding is measured, nor while drafts were found not to pay."""
        self._rounds += 1
        if self._rounds > self._plain_until:
            self._plain_wait = min(2 * self._plain_wait, PLAIN_EVERY)
            self._plain_until = self._rounds + self._plain_wait
            return False
        if self._rounds > self._paused_until and len(self._drafted) >= self._enough and (self.gain or 1.0) < 1.0:
            self._paused_until, self._pause = self._rounds + self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._drafted.clear()
            self._enough = ENOUGH_ROUNDS // 2
        elif len(self._drafted) == REMEMBERED:
            self._pause, self._enough = FIRST_PAUSE, ENOUGH_ROUNDS
        return self._rounds > self._paused_until

    def observe(self, *outputs: StepOutput, allowed: bool, delayed: bool = False) -> None:
        """The rounds of one dispatch were read; `allowed` says whether they could draft.

        `delayed` says whether a pass that is none of theirs ran before them, on the same devices.
        """
        now = self.now()
        last, self._last, self.latest_s = self._last, now, None
        drafted = [len(output.tokens) for output in outputs if output.draft_passes > 0 or output.drafted > 0]
        if last is None:
            return
        tokens = sum(len(output.tokens) for output in outputs)
        rest = tokens - sum(drafted)  # of the rounds without a draft
        usual = len(drafted) * self._usual(1, True) + (self._usual(rest, False) if rest else 0.0)
        seconds = now - last
        expected = usual + (self.pass_s or 0.0) * delayed
        if usual and seconds > OUTLIER * expected:
            seconds = expected if delayed else OUTLIER * expected
        self.total_s += seconds
        self.latest_s = None if delayed else seconds
        if delayed:
            spent = max(0.0, seconds - usual)
            self.spent_s += spent
            self.pass_s = spent if self.pass_s is None else 0.8 * self.pass_s + 0.2 * spent
        elif drafted and allowed:
            # Rounds without a draft take as long as usual; the others share the rest.
            share = max(0.0, seconds - rest * self.plain_s) if self.plain_s else seconds * sum(drafted) / tokens
            self._drafted.extend((count, share / len(drafted)) for count in drafted)
            self._ever[0] += sum(drafted)
            self._ever[1] += share
        elif not drafted and len(outputs) == 1 and tokens > 1:
            # Several rounds without a draft hold the other costs of each.
            self._plain.append(seconds / tokens)
            self._plain_until = self._rounds + self._plain_wait

    @property
    def total_gain(self) -> float | None:
        """Speed of all drafted rounds so far over that of plain decoding; None before both were measured."""
        tokens, seconds = self._ever
        return tokens / seconds * self.plain_s if seconds and self.plain_s is not None else None

    def _usual(self, tokens: int, drafted: bool) -> float:
        plain_s = None if self.plain_s is None else self.plain_s * (1 if drafted else tokens)
        return (drafted and self.drafted_s) or plain_s or 0.0
