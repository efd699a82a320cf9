"""The search for the layers to skip (SWIFT, arXiv 2410.06916, section 4.2): on the host, a step at a time.

A step scores one candidate on a *window*, tokens of the text at hand. The best set so far, the incumbent, is scored on
new windows too (ALGORITHMS B2). A candidate that does better there becomes a rival, and rivals are scored with the
incumbent from then on: the best by all that is known of it is the incumbent. One window says little, and the best of
hundreds of scores is a lucky one. Where windows get few scores each, half of all are candidates' nevertheless, and
those that have to be scored again take turns. Whoever runs the search asks `next_sets` for work and gives `tell` the
results.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import numpy as np

from jaxspec.methods.swift.bayes import propose_bayesian
from jaxspec.models.layer_set import (
    LayerSet,
    all_layers,
    count_skipped,
    from_skipped,
    num_units,
    parse_layers,
    uniform_layers,
)

# Observations that are kept, the latest ones.
MEMORY = 256
# Candidates on one window before the next one is taken.
WINDOW_STEPS = 8
# Windows on which a set must have been seen before it counts as good enough to stop.
CONFIRMING_WINDOWS = 2
# Sets that are scored on every window beside the incumbent, and the weight of the mean candidate in what is believed of
# a set, in windows.
RIVALS, PRIOR_WINDOWS = 3, 1.0
# What the first Bayesian proposal of a process is taken to cost, in seconds: it imports what it needs.
FIRST_PROPOSAL_S = 1.5


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """How layers are searched; see `Swift`.

    Attributes:
      ratio: r, share of the units that is skipped.
      window: gamma, tokens of a window.
      interval: beta, every how many steps a proposal is Bayesian.
      steps: S, most steps.
      tolerance: steps without a better set after which the search ends.
      max_score: matchness above which it ends.
    """

    ratio: float = 0.45
    window: int = 32
    interval: int = 25
    steps: int = 1000
    tolerance: int = 300
    max_score: float = 0.95


@dataclasses.dataclass
class Standing:
    """What a set reached on windows, since it became a rival of the incumbent.

    Attributes:
      layers: the set.
      matches: tokens that it predicted.
      tokens: tokens that it was scored on.
      here: matches on the present window; None where it was not scored on that yet.
    """

    layers: LayerSet
    matches: int = 0
    tokens: int = 0
    here: int | None = None

    @property
    def matchness(self) -> float | None:
        """Share of tokens that it predicted; None before any was scored."""
        return self.matches / self.tokens if self.tokens else None

    def add(self, matches: int, window: int) -> None:
        """Count a window."""
        self.matches += matches
        self.tokens += window
        self.here = matches


class Asked(NamedTuple):
    """Sets that are to be scored on one window; those that were candidates already with their standing."""

    window: int
    sets: tuple[tuple[LayerSet, Standing | None], ...]

    @property
    def layers(self) -> list[LayerSet]:
        """The sets alone."""
        return [layers for layers, _ in self.sets]


class LayerSearch:
    """One search, over as many generations as it takes.

    Attributes:
      incumbent: the best set so far.
      steps: candidates scored.
      stale: of these, since the incumbent last changed.
      stopped: why the search ended; None while it goes on.
      history: (step, matchness of the incumbent) whenever it was scored.
      adopted: (step, layer set as text), every incumbent so far.
      decoded_s: seconds of decoding beside which it ran, those of earlier processes included.
      spent_s: of these, seconds that it took.
    """

    def __init__(self, num_layers: int, settings: SearchSettings, executor: Executor | None = None, seed: int = 0):
        """Start at the uniform set.

        Args:
          num_layers: L.
          settings: how to search.
          executor: makes Bayesian proposals aside; None makes them at once.
          seed: of the random proposals.
        """
        self.settings = settings
        self._num_layers = num_layers
        self._units, self._skipped = num_units(num_layers), count_skipped(num_layers, settings.ratio)
        self.executor, self._seed = executor, seed
        self._rng = np.random.default_rng(seed)
        start = uniform_layers(num_layers) if self._skipped else all_layers(num_layers)
        self.incumbent = Standing(start)
        self.steps = self.stale = 0
        self.stopped: str | None = None if 0 < self._skipped < self._units else "there is nothing to choose"
        self.history: list[tuple[int, float]] = []
        self.adopted: list[tuple[int, str]] = [(0, str(start))]
        self.decoded_s = self.spent_s = 0.0
        self._rivals: list[Standing] = []
        self._judged = Standing(start)  # of all candidates together
        self._due: collections.deque[Standing] = collections.deque()
        self._window_number = 0
        self._on_window = 0
        self._proposed = self._again = 0  # scores that were asked for, of candidates and of what was one before
        self._num_bayesian, self._proposal_s = 0, FIRST_PROPOSAL_S
        self._seen: set[LayerSet] = {start}
        self._observed: collections.deque[tuple[np.ndarray, float]] = collections.deque(maxlen=MEMORY)
        self._thinking: Future[Any] | None = None
        self._bayesian = True  # until such a proposal fails

    @property
    def window_is_used_up(self) -> bool:
        """Whether the next candidates should be scored on other text."""
        return self._on_window >= WINDOW_STEPS

    def open_window(self) -> None:
        """What is asked for from now on is scored on other text than before; answers that are still out are ignored."""
        self._window_number += 1
        self._on_window = 0
        standings = [self.incumbent, *self._rivals]
        late = [due for due in self._due if any(due is standing for standing in standings)]
        others = [standing for standing in standings if all(standing is not due for due in late)]
        self._due = collections.deque([*late, *others])
        for standing in standings:
            standing.here = None

    def next_sets(self, count: int, spare_s: float = float("inf")) -> Asked:
        """`count` sets to be scored on the present window: what has to be scored again, and candidates.

        A Bayesian proposal has to cost no more than `spare_s` seconds.
        """
        chosen: list[tuple[LayerSet, Standing | None]] = []
        while len(chosen) < count:
            if self._due and (self._again <= self._proposed + RIVALS or self.incumbent.matchness is None):
                standing = self._due.popleft()
                chosen.append((standing.layers, standing))
                self._again += 1
            else:
                chosen.append((self._propose(spare_s), None))
                self._on_window += 1
        return Asked(self._window_number, tuple(chosen))

    def tell(self, asked: Asked, matches: Sequence[int]) -> None:
        """How many tokens of the window each of the sets predicted; in the order in which they were asked for."""
        if asked.window != self._window_number:
            return
        for (layers, standing), count in zip(asked.sets, matches, strict=True):
            if standing is None:
                self._judge(layers, int(count))
            else:
                standing.add(int(count), self.settings.window)
                self._observed.append((layers.skipped, standing.matchness or 0.0))
                self._choose()
                if standing is self.incumbent:
                    self._note()
        self._stop_if_done()

    def _judge(self, layers: LayerSet, matches: int) -> None:
        """A candidate's score, beside the incumbent's on the same window, or on others where it was not due."""
        assert self.incumbent.matchness is not None
        window = self.settings.window
        usual = self.incumbent.matchness * window
        here = usual if self.incumbent.here is None else self.incumbent.here
        # How hard this window is shows in the incumbent, whose average is known.
        self._observed.append((layers.skipped, (matches - here) / window + self.incumbent.matchness))
        self._judged.add(matches, window)
        self.steps += 1
        self.stale += 1
        if matches > here:
            self._rivals.append(Standing(layers, matches, window, matches))
            self._choose()

    def _choose(self) -> None:
        """The best of the incumbent and its rivals is the incumbent; the worst rivals go if they are too many."""
        # Equals keep their order: the incumbent stays.
        ranked = sorted([self.incumbent, *self._rivals], key=self._estimate, reverse=True)
        best, self._rivals = ranked[0], ranked[1 : 1 + RIVALS]
        if best is not self.incumbent:
            self.incumbent, self.stale = best, 0
            self.adopted.append((self.steps, str(best.layers)))
            self._note()

    def _estimate(self, standing: Standing) -> float:
        weight = PRIOR_WINDOWS * self.settings.window
        return (standing.matches + weight * (self._judged.matchness or 0.0)) / (standing.tokens + weight)

    def _note(self) -> None:
        self.history.append((self.steps, self.incumbent.matchness or 0.0))

    def _stop_if_done(self) -> None:
        settings, standing = self.settings, self.incumbent
        confirmed = standing.tokens >= CONFIRMING_WINDOWS * settings.window
        if confirmed and (standing.matchness or 0.0) > settings.max_score:
            self.stopped = f"matchness above {settings.max_score}"
        elif self.steps >= settings.steps:
            self.stopped = f"{settings.steps} steps"
        elif self.stale >= settings.tolerance:
            self.stopped = f"{settings.tolerance} steps without a better set"

    def _propose(self, spare_s: float) -> LayerSet:
        self._proposed += 1
        owed = self._proposed // self.settings.interval > self._num_bayesian
        due = self._bayesian and owed and len(self._observed) > 1 and self._proposal_s <= spare_s
        if due and self._thinking is None:
            self._num_bayesian += 1
            best = self.incumbent.layers.skipped
            arguments = ([*self._observed], best, self._skipped, int(self._rng.integers(2**31)))
            if self.executor is None:
                return self._take(lambda: propose_bayesian(*arguments))
            self._thinking = self.executor.submit(propose_bayesian, *arguments)
        elif self._thinking is not None and self._thinking.done():
            thought, self._thinking = self._thinking, None
            return self._take(thought.result)
        return self._random()

    def _take(self, propose: Callable[[], tuple[np.ndarray, float]]) -> LayerSet:
        """A Bayesian proposal, or a random one where that fails or is known already."""
        try:
            skipped, seconds = propose()
        except Exception as error:
            # The text at hand must not end because a package of the search has changed.
            self._bayesian = False
            logging.getLogger(__name__).warning("layer sets are proposed at random from here on: %s", error)
            return self._random()
        self.spent_s += seconds
        self._proposal_s = seconds
        layers = from_skipped(self._num_layers, skipped)
        if layers in self._seen:
            return self._random()
        self._seen.add(layers)
        return layers

    def _random(self) -> LayerSet:
        """A uniform set of the asked-for size, a new one if that is easily found."""
        layers = self.incumbent.layers
        for _ in range(20):
            skipped = np.zeros(self._units, bool)
            skipped[self._rng.choice(self._units, self._skipped, replace=False)] = True
            layers = from_skipped(self._num_layers, skipped)
            if layers not in self._seen:
                break
        self._seen.add(layers)
        return layers

    def save(self) -> dict[str, Any]:
        """What another process can go on from, as JSON."""
        standing = self.incumbent
        observed = [
            ["".join("01"[int(unit)] for unit in skipped), round(score, 5)] for skipped, score in self._observed
        ]
        return {
            "layers": str(standing.layers), "matches": standing.matches, "tokens": standing.tokens,
            "steps": self.steps, "stale": self.stale, "stopped": self.stopped,
            "settings": dataclasses.asdict(self.settings), "history": self.history[-MEMORY:], "observed": observed,
            "rivals": [[str(rival.layers), rival.matches, rival.tokens] for rival in self._rivals],
            "judged": [self._judged.matches, self._judged.tokens], "again": self._again, "proposed": self._proposed,
            "bayesian": self._num_bayesian, "decoded_s": self.decoded_s, "spent_s": self.spent_s,
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from `save`'s result; a search with other settings only takes the set to begin with.

        Raises:
          ValueError: it is none (`ConfigError` and `KeyError`, `TypeError` besides).
        """
        standing = self._standing(saved["layers"], saved["matches"], saved["tokens"])
        rivals = [self._standing(*rival) for rival in saved["rivals"]]
        judged = self._standing(saved["layers"], *saved["judged"])
        observed = [(np.array([c == "1" for c in bits], bool), float(score)) for bits, score in saved["observed"]]
        if any(len(skipped) != self._units for skipped, _ in observed):
            raise ValueError("observations of a model of another depth")
        steps, stale, stopped = int(saved["steps"]), int(saved["stale"]), saved["stopped"]
        history = [(int(step), float(score)) for step, score in saved["history"]]
        again, proposed, num_bayesian = (int(saved[name]) for name in ("again", "proposed", "bayesian"))
        decoded_s, spent_s = (float(saved[name]) for name in ("decoded_s", "spent_s"))
        if saved["settings"]["ratio"] != self.settings.ratio:
            # What another ratio found is no set of this one's size.
            return
        self.incumbent, self._rivals, self._judged = standing, rivals[:RIVALS], judged
        known = [standing, *self._rivals]
        self._seen.update(one.layers for one in known)
        # Who was scored least is the first: a process may be too short for more.
        self._due = collections.deque(sorted(known, key=lambda one: one.tokens))
        self._observed.extend(observed)
        self.adopted = [(steps, str(standing.layers))]
        if saved["settings"] == dataclasses.asdict(self.settings):
            self.steps, self.stale, self.history = steps, stale, history
            self._again, self._proposed, self._num_bayesian = again, proposed, num_bayesian
            self.decoded_s, self.spent_s = decoded_s, spent_s
            self.stopped = self.stopped or stopped
            # Not the same proposals again.
            self._rng = np.random.default_rng([self._seed, proposed])

    def _standing(self, layers: str, matches: Any, tokens: Any) -> Standing:
        standing = Standing(parse_layers(layers, self._num_layers), int(matches), int(tokens))
        if not 0 <= standing.matches <= standing.tokens:
            raise ValueError(f"{standing.matches} matches of {standing.tokens} tokens")
        return standing
