"""What rounds cost, learned from their times while decoding (`CostFilter`), and when a draft takes a prompt (`Worth`).

Times follow a clock, which is that of process 0 where there are several: `hosts.clock`.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.methods.core.cost_model import OPTIMISM, PRIOR_MEAN, CostModel, expect_draft
from jaxspec.methods.core.round import StepOutput
from jaxspec.runtime import hosts

# Verified rows that are timed, as far as a batch has so many.
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Standard deviations before anything was observed. Those of a plain token and of a draft pass are relative. Those of a
# round's other costs and of a draft beyond its passes are in plain tokens. What a number of further rows costs has one
# of its own, a part in plain tokens and a relative one. All numbers of rows share two: for each row, in plain tokens,
# and relatively. The last one, relative, is that of the machine's speed, which all parts share.
PLAIN, ROUND, DRAFT, OVERHEAD, FURTHER, FURTHER_TOGETHER, TOGETHER = 0.1, 0.25, 0.3, 0.15, (0.1, 0.2), (0.05, 0.4), 1.0
# The same of what changes from one dispatch to the next, and of the time of a dispatch.
DRIFT, DRIFT_TOGETHER, NOISE = 0.004, 0.05, 0.12
# A dispatch that is off by more than so many standard deviations counts as one that is off by as many. In sums of
# seconds, one that takes more than so many times what is expected counts as that long, such as a paused consumer's.
MOST_OFF, OUTLIER = 2.0, 10.0
# Dispatches whose median sets the scale: each alone may be a paused consumer's, or the one after it. A plain dispatch
# is asked for after 8, 16, 32, ... and at most so many without one: drafts alone do not say what they cost beside plain
# decoding, since a slow machine looks like dear drafts.
FIRST_SCALES, FIRST_PLAIN, PLAIN_EVERY = 3, 8, 64
# Tokens that a draft has to take after a round with a draft, and so many that such a draft says nothing of others.
USUALLY_LACKING, MOST_LACKING = 2, 64
# Dispatches that are taken in together, once the scale is known: each alone takes several times as long, on a core that
# computes a round meanwhile.
TAKEN_TOGETHER = 8
# Figures are used once a round of some rows would cost so much more or less by them.
WORTH_USING = 0.03
# Drafts after which an earlier one counts a third. A draft that seems not to pay takes a prompt, to see if it does now,
# where so many times what that costs are decoded without it: at first, and at most after vain trials.
USUAL_DRAFTS, FIRST_WAIT, LONGEST_WAIT = 96, 50.0, 800.0
# Tokens that a text is believed to have before any has ended, and texts after which an earlier one counts a third.
FIRST_LENGTH, USUAL_TEXTS = 128.0, 8
# Tokens of a text after which a draft takes its prompt at the earliest: till then copies may have begun to bring all.
LEAST_WAIT = 4.0


def time_turns(turn: Callable[[], dict[Any, float]], samples: int) -> list[dict[Any, float]]:
    """Samples of `turn`, which times each kind of pass once, in seconds by name; those of its first call are dropped.

    Passes are timed in turn because a machine's speed drifts, and the first ones warm up.
    """
    turn()
    return [turn() for _ in range(samples)]


def medians(samples: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """The median of each name, which all samples have."""
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def measured_rows(num_rows: int) -> list[int]:
    """Verified rows that are timed for batches of `num_rows` rows."""
    return sorted({rows for rows in ROWS if rows < num_rows} | {min(num_rows, ROWS[-1])})


class Dispatch(NamedTuple):
    """A dispatch that was read."""

    outputs: Sequence[StepOutput]
    seconds: float | None  # None where they say nothing
    delayed: bool = False  # whether another pass ran before its rounds, on the same devices


class CostFilter:
    """A Kalman filter of the parts of a dispatch's time: plain tokens, rounds, draft passes, drafts and further rows.

    It begins with costs that were measured or built in. The machine's speed is a part of its own, so that a slower
    moment does not count against what happened to run in it. Of further rows, 1, 3, 7, ... are a part each, and others
    lie between: a short measurement among other programs may be wrong for some of them.

    A dispatch runs while the one before it is read, so it takes the time between the two reads. The first one of a text
    has none before it and is not timed.
    """

    def __init__(
        self, costs: CostModel, now: Callable[[], float] = hosts.clock, *, together: int = TAKEN_TOGETHER,
        catches_up: bool = True, asks: bool = True,
    ):  # fmt: skip
        """`costs` are corrected; nothing was observed. So many dispatches are taken in `together`.

        `catches_up`: a draft first takes the tokens of the rounds without it. `asks`: plain dispatches may be asked
        for. `now` tells the time in seconds; tests give their own.
        """
        self.now, self._together, self._catches_up, self._asks = now, together, catches_up, asks
        self.total_s = 0.0  # seconds of timed dispatches
        # Seconds of passes that ran before rounds and are none of theirs, such as steps of a search; their number.
        self.spent_s, self.passes = 0.0, 0
        self._drafted = np.zeros(2)  # tokens and seconds of dispatches with drafts
        self._last: float | None = None
        self._kept: list[Dispatch] = []
        self._without_plain, self._plain_wait = 0, FIRST_PLAIN  # dispatches, and after how many one is asked for
        self._scales: list[float] = []  # seconds of a plain token by the first dispatches
        self._costs = costs
        self._lacks = 0  # tokens that the draft has not taken yet
        size = costs.passes.size
        self._knots = np.unique([*measured_rows(size), size]) - 1
        # Of rounds with 0, 1, 2, ... drafted rows, how much of each of these parts they hold.
        shares = [np.interp(np.arange(size), self._knots, part) for part in np.eye(self._knots.size)[1:]]
        self._shares = np.reshape(shares, (-1, size)).T
        # Of a plain token, a round, a draft pass, a draft, and of as many further rows as the knots say.
        self._seconds: np.ndarray | None = None
        self._spread = np.zeros((0, 0))

    def begin_text(self) -> None:
        """Another text starts: the time until its first read is not a dispatch's, and its draft lacks nothing."""
        self._last, self._lacks = None, 0

    def rescale_draft(self, factor: float) -> None:
        """Drafts are made in another way from now on, by which a pass costs `factor` times as much."""
        self._costs = dataclasses.replace(self.costs(), draft=self.costs().draft * factor)
        if self._seconds is not None:
            self._seconds[2] *= factor

    def asks_plain(self) -> bool:
        """Whether the next dispatch should be one of plain decoding, to be timed; counts it."""
        self._without_plain += 1
        if not self._asks or self._without_plain <= self._plain_wait:
            return False
        self._without_plain, self._plain_wait = 0, min(2 * self._plain_wait, PLAIN_EVERY)
        return True

    def read(self, outputs: Sequence[StepOutput], *, settled: bool = True, delayed: bool = False) -> CostModel | None:
        """A dispatch was read now; not `settled`, its time says nothing, nor that of the next. See `observe`."""
        last, self._last = self._last, self.now()
        seconds = self._last - last if settled and last is not None else None
        if not settled:
            self._last = None
        return self.observe(Dispatch(outputs, seconds, delayed))

    def observe(self, dispatch: Dispatch) -> CostModel | None:
        """Keep a dispatch; `costs` where what was kept is taken in."""
        self._kept.append(dispatch)
        return None if self._seconds is not None and len(self._kept) < self._together else self.costs()

    def _take_in(self, outputs: Sequence[StepOutput], seconds: float | None, delayed: bool) -> None:
        """Correct the parts by a dispatch; the first ones set the scale.

        Drafts that took very many tokens first are left out: how many these were is not certain.
        """
        amounts, lacking = np.zeros(3 + self._knots.size), 0
        for output in outputs:
            amounts += self._amounts(output)
            lacking = max(lacking, self._lacks if output.draft_passes else 0)
            if self._catches_up:
                self._lacks = len(output.tokens) + (0 if output.draft_passes else self._lacks)
        if not seconds or lacking > MOST_LACKING or not amounts.any():
            return
        each = self._seconds
        if each is None:
            if not delayed:
                self._scales.append(seconds / float(amounts @ self._relative()))
            if len(self._scales) < FIRST_SCALES:
                return
            each = self._begin(statistics.median(self._scales))
        expected = float(amounts @ each)
        self.total_s += min(seconds, OUTLIER * expected)
        if delayed:
            self.spent_s += min(max(0.0, seconds - expected), OUTLIER * expected)
            self.passes += 1
            self._seconds = each
            return
        if not amounts[2:].any():
            self._without_plain = 0
        else:
            self._drafted += sum(len(output.tokens) for output in outputs), min(seconds, OUTLIER * expected)
        drift = DRIFT * np.array([each[0], each[0], each[2], each[0], *each[4:]])
        self._spread += DRIFT_TOGETHER**2 * np.outer(each, each) + np.diag(drift**2)
        variance = float(amounts @ self._spread @ amounts) + (NOISE * expected) ** 2
        most = MOST_OFF * variance**0.5
        gain = self._spread @ amounts / variance
        least = each * [0.1, 0.0, 0.1, 0.0, *np.full(each.size - 4, 0.1)]
        each = each + gain * np.clip(seconds - expected, -most, most)
        self._spread -= np.outer(gain, amounts @ self._spread)
        # A part is never free, but for what rounds, rows and drafts cost beyond their other parts.
        self._seconds = np.maximum(each, least)

    def costs(self, optimism: float = OPTIMISM) -> CostModel:
        """The costs, corrected by all that was kept; those that it began with while nothing was observed.

        Further rows cost so many standard deviations less: numbers of rows of which little is known are tried.
        """
        kept, self._kept = self._kept, []
        for dispatch in kept:
            self._take_in(*dispatch)
        if self._seconds is None:
            return self._costs
        seconds = self._seconds.copy()
        seconds[4:] = np.maximum(seconds[4:] - optimism * self._spread.diagonal()[4:] ** 0.5, 0.1 * seconds[4:])
        # Rounded, so that hosts of unlike processors, whose sums end otherwise, use the same figures.
        round_, draft, overhead, *rows = np.round(seconds[1:] / seconds[0], 4).tolist()
        # Fewer rows never cost more than more.
        passes = self._costs.passes[0] + self._shares @ np.minimum.accumulate(rows[::-1])[::-1]
        source = self._costs.source.replace("built in", "corrected")
        return dataclasses.replace(
            self._costs, passes=passes, draft=draft, draft_overhead=overhead, round=round_, source=source
        )

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain token by what was taken in; None while nothing was."""
        return None if self._seconds is None else float(self._seconds[0])

    @property
    def gain(self) -> float | None:
        """Speed of all dispatches with drafts over that of plain decoding; None before any was timed."""
        tokens, seconds = self._drafted.tolist()
        plain_s = self.plain_s and self.plain_s * float(self.costs().rounds[0])
        return tokens / seconds * plain_s if seconds and plain_s else None

    def _relative(self) -> np.ndarray:
        """The parts by the costs that it began with, in plain tokens."""
        costs = self._costs
        rows = costs.passes[self._knots[1:]] - costs.passes[0]
        return np.array([1.0, costs.round, costs.draft, costs.draft_overhead, *rows])

    def _begin(self, plain_s: float) -> np.ndarray:
        costs, knots, begun = self._costs, self._knots[1:], self._relative()
        rows = begun[4:]
        apart = [PLAIN, ROUND * max(1.0, costs.round), DRAFT * costs.draft, OVERHEAD, *(FURTHER[0] + FURTHER[1] * rows)]
        each, all_ = (
            np.append(np.zeros(4), part) for part in (FURTHER_TOGETHER[0] * knots, FURTHER_TOGETHER[1] * rows)
        )
        together = (np.outer(part, part) for part in (TOGETHER * begun, each, all_))
        self._spread = plain_s**2 * (np.diag(np.square(apart)) + sum(together))
        return plain_s * begun

    def _amounts(self, output: StepOutput) -> np.ndarray:
        """Of each part, what a round holds; one without drafted rows decodes all of its tokens plainly."""
        # What rounds without the draft brought costs it as further rows the target, each over its own pass.
        late = max(0, self._lacks - USUALLY_LACKING) * self._costs.row if output.draft_passes else 0.0
        passes = output.draft_passes + late
        plain = 1 if output.drafted else len(output.tokens)
        near = self._shares[min(output.drafted, len(self._shares) - 1)]
        return np.array([plain, 1.0, passes, passes > 0, *near])


def differ(one: CostModel, other: CostModel) -> bool:
    """Whether rounds of some rows, or drafts, cost noticeably more by one of two models."""
    passes = abs(one.rounds / other.rounds - 1).max(initial=0.0)
    drafts = abs(one.draft - other.draft), abs(one.draft_overhead - other.draft_overhead)
    return bool(max(passes, *drafts) > WORTH_USING)


def own_drafts(outputs: Sequence[StepOutput]) -> np.ndarray:
    """Of a model's drafts, float64 [4]: their number, the tokens that they brought, their rows and their passes."""
    found = np.zeros(4)
    for output in outputs:
        # A chain of so many passes brings no more; the others are of copies.
        if 0 < output.draft_passes >= output.accepted:
            found += 1, output.accepted, output.drafted, output.draft_passes
    return found


class Worth:
    """When a draft takes a prompt: by what recent drafts brought, else now and then.

    Tokens are those that were not copied; costs are in tokens of plain decoding.
    """

    def __init__(self, asked: np.ndarray | None = None):
        """`asked` is what is known of earlier drafts, as `own_drafts` gives it."""
        asked = np.zeros(4) if asked is None else asked
        self._asked = min(1.0, USUAL_DRAFTS / max(1.0, asked[0])) * asked
        self._wait, self._rested = FIRST_WAIT, 0.0
        self._length = FIRST_LENGTH  # of a usual text

    def note(self, drafts: np.ndarray) -> None:
        """Take in `own_drafts` of a dispatch."""
        self._asked = (1 - 1 / USUAL_DRAFTS) ** drafts[0] * self._asked + drafts

    def gain(self, costs: CostModel, length: int) -> float:
        """Speed of drafted rounds over plain decoding that is hoped for; of chains of at most `length` at first."""
        return float(costs.gain(*expect_draft(self._asked, costs.best_chain(PRIOR_MEAN, length))))

    def taking(self, cost: float, gain: float, most: float = math.inf) -> float:
        """Tokens of an answer after which the draft takes what it lacks, at the cost of `cost` tokens.

        At once, if the answer is expected to have so many: as many as usual, but at most `most`. Later in a text, what
        the draft lacks may grow faster than what its trial may cost.
        """
        pays = cost / (1 - 1 / gain) if gain > 1 else math.inf
        needed = min(pays, self._wait * cost - self._rested)
        # Of a text that is longer than usual, as many tokens may come as came already.
        return max(LEAST_WAIT, 0.0 if needed <= min(self._length, most) else needed)

    def end_text(self, decoded: int, *, taken: bool, gained: bool) -> None:
        """A text of so many tokens has ended; was its prompt `taken`, and did its drafts gain?"""
        self._length += (decoded - self._length) / USUAL_TEXTS
        if not taken:
            self._rested += decoded
            return
        self._rested = 0.0
        self._wait = FIRST_WAIT if gained else min(2 * self._wait, LONGEST_WAIT)
