"""Where the time of rounds goes: plain ones, drafted ones, and passes of a search beside them; measured on the host."""

import collections
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

# Rounds without a draft that are measured to begin with, and again after so many rounds, and the rounds of each kind
# that are remembered.
PLAIN_ROUNDS, PLAIN_EVERY, REMEMBERED = 3, 192, 64
# Draft rounds after which the measured gain counts, and rounds without drafts while it is too low: the first time,
# and at most.
ENOUGH_ROUNDS, FIRST_PAUSE, LONGEST_PAUSE = 12, 64, 1024
# Rounds in a row that were allowed to draft and did not, by their own reckoning, after which only every so many are.
DECLINED, ASKED_EVERY = 3, 8
# What takes so many times as long as it should is not ours: whoever reads the text had something else to do.
LONGEST = 10


class Clock:
    """Time, and what has finished by now. Tests have one that does not depend on the machine's load."""

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def is_ready(self, array: jax.Array) -> bool:
        """Whether reading an array would not wait."""
        return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


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


class RoundTimer:
    """Times of rounds, whatever texts they are of, and what follows from them: when to draft, and when to search.

    Attributes:
      clock: tells the time.
      pass_cost: of a search pass, in plain rounds, until one was measured.
      total_s: seconds of decoding.
      search_s: of these, seconds that rounds were late behind search passes.
      passes: such passes.
    """

    def __init__(self, clock: Clock | None = None):
        """Nothing measured."""
        self.clock = clock or Clock()
        self.pass_cost = 1.0
        self.total_s = self.search_s = 0.0
        self.passes = 0
        self._last = 0.0
        self._plain: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._drafted: collections.deque[tuple[int, float]] = collections.deque(maxlen=REMEMBERED)
        self._ever = [0, 0.0]  # tokens and seconds of drafted rounds
        self._forgotten_s: float | None = None  # of a drafted round, made in another way than now
        self._waiting_s = 0.0
        self._declined = 0
        self._rounds = self._paused_until = 0
        self._pause = FIRST_PAUSE

    @property
    def plain_s(self) -> float | None:
        """Seconds of a token without a draft; the median of the latest rounds."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def gain(self) -> float | None:
        """Speed of the latest drafted rounds over that of plain decoding; None before both were measured."""
        tokens, seconds = (sum(column) for column in zip(*self._drafted, strict=True)) if self._drafted else (0, 0.0)
        return tokens / seconds * self.plain_s if seconds and self.plain_s is not None else None

    @property
    def pass_s(self) -> float | None:
        """Seconds that a search pass takes, by those so far, else by its expected cost; None before anything ran."""
        if self.passes:
            return self.search_s / self.passes
        # Where every round drafts, one of them is the nearest that is known to a plain one.
        usual = self.plain_s or self._drafted_s or self._forgotten_s
        return None if usual is None else self.pass_cost * usual

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
        self._forgotten_s = self._drafted_s or self._forgotten_s
        self._drafted.clear()
        self._declined = 0
        self._paused_until, self._pause = 0, FIRST_PAUSE

    def lap(self, rounds: Sequence[Finished], *, first: bool) -> None:
        """A round is about to be launched; `rounds` have finished since one was launched before, of any text.

        The time before the `first` round of a text is nobody's.
        """
        now = self.clock.now()
        if not first:
            self.add(now - self._last, rounds)
        self._last = now

    def add(self, seconds: float, rounds: Sequence[Finished]) -> None:
        """Rounds that finished within the last `seconds`."""
        for round_ in rounds:
            if round_.allowed:
                self._declined = 0 if round_.drafted else self._declined + 1
        self._waiting_s += seconds
        if not rounds:
            return
        each_usual = [self._usual(round_) for round_ in rounds]
        usual, passes = sum(each_usual), sum(round_.delayed for round_ in rounds)
        seconds, self._waiting_s = self._waiting_s, 0.0
        expected = usual + passes * (self.pass_s or 0.0)
        if usual and seconds > LONGEST * expected:
            # Rounds that really became so slow are learned step by step; of a pass such a time says nothing.
            seconds = expected if passes else LONGEST * expected
        self.total_s += seconds
        if passes:
            self.passes += passes
            self.search_s += max(0.0, seconds - usual)
            return
        for round_, own in zip(rounds, each_usual, strict=True):
            each = seconds * own / usual if usual else seconds / len(rounds)
            if round_.drafted:
                self._drafted.append((round_.tokens, each))
                self._ever[0] += round_.tokens
                self._ever[1] += each
            elif not round_.allowed:
                self._plain.append(each / round_.tokens)

    def report(self) -> dict[str, Any]:
        """For the statistics of a generation."""
        tokens, seconds = self._ever
        gain = tokens / seconds * self.plain_s if seconds and self.plain_s is not None else None
        return {"search_passes": self.passes, "gain": gain}

    @property
    def _drafted_s(self) -> float | None:
        return statistics.median(seconds for _, seconds in self._drafted) if self._drafted else None

    def _usual(self, round_: Finished) -> float:
        plain_s = None if self.plain_s is None else self.plain_s * (1 if round_.drafted else round_.tokens)
        return (round_.drafted and self._drafted_s) or plain_s or self._forgotten_s or 0.0
