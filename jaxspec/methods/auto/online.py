"""What rounds cost, learned from their times while decoding (`CostFilter`)."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from jaxspec.methods.auto.profiles import measured_rows
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.round import StepOutput

# Standard deviations before anything was observed. Those of a plain token and of a draft pass are relative. Those of a
# round's other costs and of a draft beyond its passes are in plain tokens. What a number of further rows costs has one
# of its own, a part in plain tokens and a relative one. All numbers of rows share two: for each row, in plain tokens,
# and relatively. The last one, relative, is that of the machine's speed, which all parts share.
PLAIN, ROUND, DRAFT, OVERHEAD, ROWS, ROWS_TOGETHER, SPEED = 0.1, 0.25, 0.3, 0.15, (0.1, 0.2), (0.05, 0.4), 1.0
# The same of what changes from one dispatch to the next, and of the time of a dispatch.
DRIFT, DRIFT_TOGETHER, NOISE = 0.004, 0.05, 0.12
# A dispatch that is off by more than so many standard deviations counts as one that is off by as many.
MOST_OFF = 2.0
# Tokens that a draft has to take after a round with a draft, and so many that such a draft says nothing of others.
USUALLY_LACKING, MOST_LACKING = 2, 64
# Plain dispatches whose median sets the scale: a single one may have waited for the reader of a stream.
SCALE_OF = 3
# Dispatches that are taken in together, once the scale is known: each alone takes several times as long, on a core that
# computes a round meanwhile.
TAKEN_TOGETHER = 8
# Drafts are believed so many standard deviations cheaper: what is not tried is not learned.
DRAFT_CHEAPER = 0.5


class CostFilter:
    """A Kalman filter of the parts of a dispatch's time: plain tokens, rounds, draft passes, drafts and further rows.

    It begins with costs that were measured or built in. The machine's speed is a part of its own, so that a slower
    moment does not count against what happened to run in it. Of further rows, 1, 3, 7, ... are a part each, and others
    lie between: a short measurement among other programs may be wrong for some of them.
    """

    def __init__(self, costs: CostModel, plain_s: float | None = None):
        """`costs` are corrected; a plain token takes about `plain_s` seconds, where that is known."""
        self._costs = costs
        self._lacks = 0  # tokens that the draft has not taken yet
        size = costs.passes.size
        self._knots = np.unique([*measured_rows(size), size]) - 1
        # Of rounds with 0, 1, 2, ... drafted rows, how much of each of these parts they hold.
        shares = [np.interp(np.arange(size), self._knots, part) for part in np.eye(self._knots.size)[1:]]
        self._shares = np.reshape(shares, (-1, size)).T
        self._spread = np.zeros((0, 0))
        # Of a plain token, a round, a draft pass, a draft, and of as many further rows as the knots say.
        self._seconds = None if plain_s is None else self._begin(plain_s)
        self._scales: list[float] = []  # seconds of a plain token by the first plain dispatches
        self._kept: list[tuple[Sequence[StepOutput], float | None]] = []

    def observe(self, outputs: Sequence[StepOutput], seconds: float | None) -> CostModel | None:
        """Keep the rounds of a dispatch and what it took, if it was timed; `costs` where what was kept is taken in."""
        self._kept.append((outputs, seconds))
        return None if self._seconds is not None and len(self._kept) < TAKEN_TOGETHER else self.costs(DRAFT_CHEAPER)

    def _take_in(self, outputs: Sequence[StepOutput], seconds: float | None) -> None:
        """Correct the parts by a dispatch; first ones without drafts set the scale.

        Drafts that took very many tokens first are left out: how many these were is not certain.
        """
        amounts, lacking = np.zeros(3 + self._knots.size), 0
        for output in outputs:
            amounts += self._amounts(output)
            lacking = max(lacking, self._lacks if output.draft_passes else 0)
            self._lacks = len(output.tokens) + (0 if output.draft_passes else self._lacks)
        if not seconds or lacking > MOST_LACKING:
            return
        each = self._seconds
        if each is None:
            if amounts[2:].any() or not amounts[0]:
                return
            self._scales.append(seconds / (amounts[0] + self._costs.round * amounts[1]))
            if len(self._scales) < SCALE_OF:
                return
            each = self._begin(statistics.median(self._scales))
        drift = DRIFT * np.array([each[0], each[0], each[2], each[0], *each[4:]])
        self._spread += DRIFT_TOGETHER**2 * np.outer(each, each) + np.diag(drift**2)
        expected = float(amounts @ each)
        variance = float(amounts @ self._spread @ amounts) + (NOISE * expected) ** 2
        most = MOST_OFF * variance**0.5
        gain = self._spread @ amounts / variance
        least = each * [0.1, 0.0, 0.1, 0.0, *np.full(each.size - 4, 0.1)]
        each = each + gain * np.clip(seconds - expected, -most, most)
        self._spread -= np.outer(gain, amounts @ self._spread)
        # A part is never free, but for what rounds, rows and drafts cost beyond their other parts.
        self._seconds = np.maximum(each, least)

    def costs(self, optimism: float = 0.0) -> CostModel:
        """The costs, corrected by all that was kept; those that it began with while nothing was observed.

        Drafts are believed `optimism` standard deviations cheaper.
        """
        kept, self._kept = self._kept, []
        for dispatch in kept:
            self._take_in(*dispatch)
        if self._seconds is None:
            return self._costs
        plain_s, spread, drafts = self._seconds[0], self._spread, slice(2, 4)
        each = self._seconds / plain_s
        variance = np.diag(spread) - 2 * each * spread[0] + each**2 * spread[0, 0]
        cheaper = each - optimism * np.sqrt(np.maximum(0.0, variance)) / plain_s
        each[drafts] = np.maximum(cheaper, 0.1 * each)[drafts]
        round_, draft, overhead, *rows = each[1:].tolist()
        # Fewer rows never cost more than more.
        passes = self._costs.passes[0] + self._shares @ np.minimum.accumulate(rows[::-1])[::-1]
        return dataclasses.replace(self._costs, passes=passes, draft=draft, draft_overhead=overhead, round=round_)

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain token by what was taken in; None while nothing was."""
        return None if self._seconds is None else float(self._seconds[0])

    def _begin(self, plain_s: float) -> np.ndarray:
        costs, knots = self._costs, self._knots[1:]
        rows = costs.passes[knots] - costs.passes[0]
        begun = np.array([1.0, costs.round, costs.draft, costs.draft_overhead, *rows])
        apart = [PLAIN, ROUND * max(1.0, costs.round), DRAFT * costs.draft, OVERHEAD, *(ROWS[0] + ROWS[1] * rows)]
        each, all_ = (np.append(np.zeros(4), part) for part in (ROWS_TOGETHER[0] * knots, ROWS_TOGETHER[1] * rows))
        together = (np.outer(part, part) for part in (SPEED * begun, each, all_))
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
