"""Where the time of rounds goes: plain ones, drafted ones, and passes of a search beside them; measured on the host."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

# Rounds without a draft that are measured to begin with, and again after so many rounds, and the rounds of each kind
# that are remembered.
PLAIN_ROUNDS, PLAIN_EVERY, REMEMBERED = 3, 192, 64
# Drafted rounds after which the measured gain counts, and rounds without drafts while it is too low: the first time,
# and at most.
ENOUGH_ROUNDS, FIRST_PAUSE, LONGEST_PAUSE = 12, 64, 1024
# Rounds in a row that were allowed to draft and did not, by their own reckoning, after which only every so many are.
DECLINED, ASKED_EVERY = 3, 8


@dataclasses.dataclass(frozen=True)
class Finished:
    """A round that the host has read.

    Attributes:
      tokens: new ones.
      allowed: whether it could draft.
      drafted: whether it did.
      delayed: whether a search pass came before it.
    """

    tokens: int
    allowed: bool
    drafted: bool
    delayed: bool


class Meter:
    """Measures; asked before each round whether it may draft.

    Attributes:
      total_s: seconds of decoding.
      search_s: of these, seconds that rounds were late behind search passes.
      passes: such passes.
    """

    def __init__(self):
        """Nothing measured."""
        self.total_s = self.search_s = 0.0
        self.passes = 0
        self._plain: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._drafted: collections.deque[tuple[int, float]] = collections.deque(maxlen=REMEMBERED)
        self._ever = [0, 0.0]  # tokens and seconds of drafted rounds
        self._waiting_s = 0.0
        self._declined = 0
        self._rounds = self._paused_until = 0
        self._pause = FIRST_PAUSE

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain round, which gives one token; the median of the latest ones."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def gain(self) -> float | None:
        """Speed of the latest drafted rounds over that of plain decoding; None before both were measured."""
        tokens, seconds = (sum(column) for column in zip(*self._drafted, strict=True)) if self._drafted else (0, 0.0)
        return tokens / seconds * self.plain_s if seconds and self.plain_s is not None else None

    def may_draft(self) -> bool:
        """Whether the next round may: not while plain decoding is measured, nor while drafts were found not to pay."""
        self._rounds += 1
        if (self._rounds - 1) % PLAIN_EVERY < PLAIN_ROUNDS:
            return False
        if self._rounds > self._paused_until and len(self._drafted) >= ENOUGH_ROUNDS and (self.gain or 1.0) < 1.0:
            self._paused_until, self._pause = self._rounds + self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._drafted.clear()
        elif len(self._drafted) == REMEMBERED:
            self._pause = FIRST_PAUSE
        if self._declined >= DECLINED and self._rounds % ASKED_EVERY:
            return False
        return self._rounds > self._paused_until

    def forget_drafts(self) -> None:
        """Drafts are made in another way now: what was measured of them says nothing."""
        self._drafted.clear()
        self._declined = 0
        self._paused_until, self._pause = 0, FIRST_PAUSE

    def add(self, seconds: float, rounds: Sequence[Finished]) -> None:
        """Rounds that finished within the last `seconds`."""
        for round_ in rounds:
            if round_.allowed:
                self._declined = 0 if round_.drafted else self._declined + 1
        self.total_s += seconds
        self._waiting_s += seconds
        if not rounds:
            return
        seconds, self._waiting_s = self._waiting_s, 0.0
        if any(round_.delayed for round_ in rounds):
            self.passes += sum(round_.delayed for round_ in rounds)
            self.search_s += max(0.0, seconds - sum(self._usual(round_) for round_ in rounds))
            return
        for round_ in rounds:
            each = seconds / len(rounds)
            if round_.drafted:
                self._drafted.append((round_.tokens, each))
                self._ever[0] += round_.tokens
                self._ever[1] += each
            else:
                self._plain.append(each)

    def pass_s(self, relative: float) -> float | None:
        """Seconds that a search pass takes, by those so far, else from its cost relative to a plain round."""
        if self.passes:
            return self.search_s / self.passes
        return None if self.plain_s is None else relative * self.plain_s

    def report(self, more_search_s: float = 0.0) -> dict[str, Any]:
        """For the statistics of a generation; `more_search_s` was spent beside the passes."""
        tokens, seconds = self._ever
        gain = tokens / seconds * self.plain_s if seconds and self.plain_s is not None else None
        share = (self.search_s + more_search_s) / self.total_s if self.total_s else 0.0
        return {"search_share": share, "search_passes": self.passes, "gain": gain}

    def _usual(self, round_: Finished) -> float:
        if round_.drafted and self._drafted:
            return statistics.median(seconds for _, seconds in self._drafted)
        return self.plain_s or 0.0
