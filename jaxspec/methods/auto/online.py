"""What rounds say while decoding: what they cost (`CostFilter`), and whether drafts are worth a prompt (`Worth`)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.round import StepOutput

# Standard deviations before anything was observed, of each part over what it is believed to be: a plain token, a
# round's other costs (over a plain token), what further rows cost, what each of them costs beyond that (over a plain
# token), a draft pass, a draft beyond its passes (over a plain token). All of them are wrong together where the machine
# is faster or slower than it was.
PRIOR, TOGETHER = np.array([0.1, 0.25, 0.4, 0.05, 0.3, 0.15]), 1.0
# The same of what changes from one dispatch to the next, and of the time of a dispatch.
DRIFT, DRIFT_TOGETHER, NOISE = 0.004, 0.05, 0.12
# A dispatch that is off by more than so many standard deviations counts as one that is off by as many.
MOST_OFF = 2.0
# Figures are used once a round of some rows would cost so much more or less by them.
WORTH_USING = 0.03
# Drafts after which an earlier one counts a third. A draft that seems not to pay takes a prompt, to see whether it does
# now, once so many times what that costs were decoded without it: at first, and at most after it was found not to pay.
REMEMBERED, FIRST_WAIT, LONGEST_WAIT = 32, 30.0, 960.0


class CostFilter:
    """A Kalman filter of the parts of a dispatch's time: plain tokens, rounds, further rows and draft passes.

    It begins with costs that were measured or built in. The machine's speed is a part of its own, so that a slower
    moment does not count against what happened to run in it. What rows cost keeps the form that it began with, and a
    part that grows with their number: a measurement among other programs may have a wrong form.
    """

    def __init__(self, costs: CostModel):
        """`costs` are corrected; nothing was observed."""
        self._costs = costs
        self._lags = False  # whether the draft lacks tokens of plain rounds
        self._rows = np.maximum(costs.passes - costs.passes[0], 0.0)
        # Of a plain token, a round, the unit of further rows, each of them beyond that, a draft pass, a draft.
        self._seconds: np.ndarray | None = None
        self._spread = np.zeros((6, 6))

    def observe(self, outputs: Sequence[StepOutput], seconds: float | None) -> None:
        """Take in the rounds of a dispatch and what it took, if it was timed; first ones without drafts set the scale.

        A draft after plain rounds takes what it lacks first, so that it says nothing of drafts in a row.
        """
        plain = [not output.drafted and not output.draft_passes for output in outputs]
        lagged, self._lags = self._lags or any(plain), plain[-1]
        if seconds is None or (lagged and any(output.draft_passes for output in outputs)):
            return
        amounts = sum((self._amounts(output) for output in outputs), np.zeros(6))
        each = self._seconds
        if each is None:
            if amounts[2:].any() or not amounts[0]:
                return
            each = self._begin(seconds / (amounts[0] + self._costs.round * amounts[1]))
        drift = DRIFT * each[[0, 0, 2, 0, 4, 0]] * [1, 1, 1, 0.1, 1, 1]
        self._spread += DRIFT_TOGETHER**2 * np.outer(each, each) + np.diag(drift**2)
        expected = float(amounts @ each)
        variance = float(amounts @ self._spread @ amounts) + (NOISE * expected) ** 2
        most = MOST_OFF * variance**0.5
        gain = self._spread @ amounts / variance
        least = each * [0.1, 0.0, 0.1, 0.0, 0.1, 0.0]
        each = each + gain * np.clip(seconds - expected, -most, most)
        self._spread -= np.outer(gain, amounts @ self._spread)
        # A part is never free, but for what rounds, rows and drafts cost beyond their other parts.
        self._seconds = np.maximum(each, least)

    def costs(self) -> CostModel:
        """The corrected costs; those that it began with while nothing was observed."""
        if self._seconds is None:
            return self._costs
        round_, rows, row, draft, overhead = (self._seconds[1:] / self._seconds[0]).tolist()
        passes = self._costs.passes[0] + rows * self._rows + row * np.arange(self._rows.size)
        return dataclasses.replace(self._costs, passes=passes, draft=draft, draft_overhead=overhead, round=round_)

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain token; None while nothing was observed."""
        return None if self._seconds is None else float(self._seconds[0])

    def _begin(self, plain_s: float) -> np.ndarray:
        costs = self._costs
        begun = plain_s * np.array([1.0, costs.round, 1.0, 0.0, costs.draft, costs.draft_overhead])
        apart = PRIOR * plain_s * np.array([1.0, max(1.0, costs.round), 1.0, 1.0, costs.draft, 1.0])
        self._spread = TOGETHER**2 * np.outer(begun, begun) + np.diag(apart**2)
        return begun

    def _amounts(self, output: StepOutput) -> np.ndarray:
        """Of each part, what a round holds."""
        if not output.drafted and not output.draft_passes:
            return np.array([len(output.tokens), 1.0, 0.0, 0.0, 0.0, 0.0])
        rows = min(output.drafted, self._rows.size - 1)
        passes = output.draft_passes
        return np.array([1.0, 1.0, self._rows[rows], rows, passes, passes > 0])


class Worth:
    """When a draft takes a prompt: by what recent drafts brought, and else now and then. Tokens are plain ones."""

    def __init__(self, gain: float):
        """`gain` is believed of drafts: their speed over plain decoding."""
        self._brought = REMEMBERED * np.array([gain, 1.0])  # tokens, and what they cost
        self._wait, self._rested = FIRST_WAIT, 0.0

    def note(self, output: StepOutput, spent: float) -> float:
        """Take in a round with a draft, which cost as much as `spent` tokens; returns what it gained."""
        # A chain of so many passes and rows brings no more; the others are of copies, or were decoded plainly.
        tokens = min(len(output.tokens), 1 + min(output.drafted, output.draft_passes))
        self._brought = (1 - 1 / REMEMBERED) * self._brought + np.array([tokens, spent])
        return tokens - spent

    def taking(self, cost: float) -> float:
        """Tokens of an answer after which the draft takes its prompt, which costs as much as `cost` tokens."""
        tokens, spent = self._brought
        # As many tokens may come as came already.
        pays = cost / (1 - spent / tokens) if spent < tokens else math.inf
        return min(pays, self._wait * cost - self._rested)

    def end_text(self, decoded: int, taken: bool, gained: float) -> None:
        """A text of so many tokens has ended; was its prompt `taken`, and what did its drafts gain?"""
        if not taken:
            self._rested += decoded
            return
        self._rested = 0.0
        self._wait = FIRST_WAIT if gained > 0 else min(2 * self._wait, LONGEST_WAIT)


def differ(one: CostModel, other: CostModel) -> bool:
    """Whether rounds of some rows, or drafts, cost noticeably more by one of two models."""
    passes = abs(one.rounds / other.rounds - 1).max(initial=0.0)
    drafts = abs(one.draft - other.draft), abs(one.draft_overhead - other.draft_overhead)
    return bool(max(passes, *drafts) > WORTH_USING)
