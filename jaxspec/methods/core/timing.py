"""Times measured on the host: of passes in turn, and of rounds, for what drafting gains, and when it should pause.

The decision about pauses follows a clock, which is that of process 0 where there are several: `hosts.make_clock`.
"""

import collections
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.methods.core.cost_model import PRIOR_WEIGHT, CostModel
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, StepOutput
from jaxspec.runtime import hosts

# A plain dispatch is asked for first, and then after 2, 4, 8, ... dispatches without one, at most so many: the first
# times of a process are too long. Plain dispatches and drafted rounds that are remembered.
PLAIN_EVERY, PLAIN_REMEMBERED, REMEMBERED = 64, 9, 64
# Drafted rounds after which the measured gain counts (half as many once it was too low), and rounds without drafts
# while it is too low: the first time, and at most.
ENOUGH_ROUNDS, FIRST_PAUSE, LONGEST_PAUSE = 12, 32, 1024
# Rounds slower than this many times the expected time are outliers, such as a paused consumer.
OUTLIER = 10
# Drafted rounds after which an earlier one counts a third. What is hoped for beyond the mean gain: texts differ, and in
# those where drafts do not pay, rounds soon draft nothing. A draft that seems not to pay takes a prompt, to see if it
# does now, where so many times what that costs are decoded without it: at first, and at most after vain trials.
USUAL_ROUNDS, HOPE, FIRST_WAIT, LONGEST_WAIT = 96, 1.02, 50.0, 800.0
# Tokens that a text is believed to have before any has ended, and texts after which an earlier one counts a third.
FIRST_LENGTH, USUAL_TEXTS = 128.0, 8
# Tokens of a text after which a draft takes its prompt at the earliest: till then copies may have begun to bring all.
# Where it has paid for the prompt after so few tokens, it takes it after the first one, which never waits for it.
LEAST_WAIT, AT_ONCE = 4.0, 32.0


def time_turns(turn: Callable[[], dict[Any, float]], samples: int) -> dict[Any, float]:
    """Median seconds of each kind of pass, of so many calls of `turn`, which times each once; a first one is dropped.

    Passes are timed in turn because a machine's speed drifts, and the first ones warm up.
    """
    turn()
    times = [turn() for _ in range(samples)]
    return {name: statistics.median(one[name] for one in times) for name in times[0]}


class RoundTimer:
    """Times of rounds of all texts, and what follows from them.

    The time of a dispatch of one round or several is the time from the read of the dispatch before it to its own read:
    one runs while the one before is read. The first one of a text has none before it and is not timed.
    """

    def __init__(self, now: Callable[[], float] | None = None):
        """Nothing measured; `now` tells the time in seconds, that of process 0 if None."""
        self.now = now or hosts.make_clock()
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
        elif not drafted and tokens >= STEPS_PER_DISPATCH * len(outputs):
            # Rounds of fewer tokens hold more of what each costs apart from its passes.
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


class Worth:
    """When a draft takes a prompt: by what drafts brought and what their rounds took of late, else now and then.

    Tokens are those that were not copied; costs are in tokens of plain decoding.
    """

    def __init__(self, learned: Sequence[float] = (0.0, 0.0, 0.0, 0.0)):
        """Of drafts of earlier processes the number, and the tokens that they brought, their rows and their passes."""
        self._drafts = np.array(learned) * min(1.0, USUAL_ROUNDS / max(1.0, learned[0]))
        self._gain: Callable[..., float] = lambda *_: 1.0
        self._chain: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._weight, self._timed = float(USUAL_ROUNDS), np.zeros(2)  # of the costs; tokens, and what they took
        self._wait, self._rested = FIRST_WAIT, 0.0
        self._length = FIRST_LENGTH  # of a usual text

    def believe(self, costs: CostModel, rate: float, length: int) -> None:
        """Weigh drafts with these costs; a few are believed to be chains whose tokens are right with a chance `rate`.

        `length` is that of the longest one.
        """
        self._gain, self._chain = costs.gain, costs.best_chain(rate, length)

    @property
    def gain(self) -> float:
        """Speed of drafted rounds over plain decoding that is hoped for, by costs and by what was timed of late."""
        number, *sums = self._drafts
        usual = (PRIOR_WEIGHT * np.array(self._chain) + sums) / (PRIOR_WEIGHT + number)
        tokens, spent = self._timed + self._weight * np.array([self._gain(*usual), 1.0])
        return float(HOPE * tokens / spent)

    def note(self, outputs: Sequence[StepOutput], seconds: float | None, plain_s: float | None) -> float:
        """Take in a dispatch; returns the tokens that drafts gained in it, `plain_s` each, if it was timed."""
        asked = [o for o in outputs if o.draft_passes]
        # A chain of so many passes brings no more: copies are among such tokens.
        drafts = [o for o in asked if len(o.tokens) <= 1 + o.draft_passes or not o.drafted]
        kept = (1 - 1 / USUAL_ROUNDS) ** len(asked)
        self._drafts = kept * self._drafts
        for o in drafts:
            # Further passes took in tokens that the draft lacked: `taking` counts these.
            brought = len(o.tokens) - 1 if o.drafted else 0
            self._drafts += 1, brought, o.drafted, min(o.draft_passes, max(1, o.depth))
        copied = len(drafts) < len(asked) or any(o.drafted and not o.draft_passes for o in outputs)
        if not seconds or not plain_s or copied or not asked:
            return 0.0
        # An interruption counts no more than a slow moment. Times correct what is wrong in the costs.
        tokens = sum(len(o.tokens) for o in outputs)
        spent = min(seconds / plain_s, 2.0 * tokens + 2.0 * len(outputs))
        self._weight, self._timed = kept * self._weight, kept * self._timed + np.array([tokens, spent])
        return tokens - spent

    def taking(self, cost: float, most: float = math.inf) -> float:
        """Tokens of an answer after which the draft takes what it lacks, at the cost of `cost` tokens.

        At once, if the answer is expected to have so many: as many as usual, but at most `most`. Later in a text, what
        the draft lacks may grow faster than what its trial may cost.
        """
        gain = self.gain
        pays = cost / (1 - 1 / gain) if gain > 1 else math.inf
        needed = min(pays, self._wait * cost - self._rested)
        # Of a text that is longer than usual, as many tokens may come as came already.
        wait = 0.0 if needed <= min(self._length, most) else needed
        return max(1.0 if pays <= AT_ONCE else LEAST_WAIT, wait)

    def end_text(self, decoded: int, taken: bool, gained: float) -> None:
        """A text of so many tokens has ended; was its prompt `taken`, and what did its drafts gain?"""
        self._length += (decoded - self._length) / USUAL_TEXTS
        if not taken:
            self._rested += decoded
            return
        self._rested = 0.0
        is_vain = gained <= 0 and self.gain <= HOPE
        self._wait = min(2 * self._wait, LONGEST_WAIT) if is_vain else FIRST_WAIT
