"""The search for the blocks to skip (SWIFT, arXiv 2410.06916, section 4.2): on the host, one step at a time.

A step scores one candidate on a *window*: consecutive verified tokens. The score is the number of these tokens that
the model without the candidate's blocks predicts. Two rules decide which candidate becomes the *incumbent*, the set
that drafts:
- "paper": every step has a new window. A candidate replaces the incumbent if its score exceeds the incumbent's, which
  is never measured again. One score above `max_score` ends the search.
- "budget": one window says little, and the best of hundreds of scores is a lucky one. So several candidates share a
  window, and the incumbent is scored there too. A candidate that does better becomes a rival. Rivals and incumbent are
  scored on the next windows as well, and the best of them by all scores is the incumbent.
A search that has ended scores its incumbent now and then. It is resumed when the score falls below what was stored.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxspec.models.layer_set import (
    LayerSet,
    all_layers,
    count_skipped,
    from_skipped,
    num_units,
    parse_layers,
    uniform_layers,
)

MEMORY = 256  # observations that are kept, the latest ones
# "budget": candidates per window, windows that must confirm a set before it can end the search, rivals, and the weight
# of the mean candidate in the estimate of a set, in windows.
WINDOW_STEPS, CONFIRMING_WINDOWS, RIVALS, PRIOR_WINDOWS = 8, 2, 3, 1.0
COUNTERS = ("steps", "stale", "since", "proposed", "again", "unwatched", "decoded_s", "spent_s")  # outlive a process
# A search that has ended is resumed when the incumbent's matchness on so many windows is lower by this much.
WATCHED_WINDOWS, FALL = 4, 0.15
KAPPA = 2.5  # Bayesian proposals: weight of the deviation in the upper confidence bound, as in the paper's code
# Variance of a score's noise relative to that of all scores: the paper's code has 0.01, but 32 tokens say little.
NOISE = {"paper": 0.01, "budget": 0.3}
# Observed sets that a proposal rests on; random sets that it starts from; then how often the neighbours of the best
# one are looked at, and how many.
OBSERVATIONS, POOL, CLIMBS, NEIGHBOURS = 128, 256, 12, 64

SearchRule = Literal["budget", "paper"]


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """How layers are searched; `Swift` documents the fields. `rule` is its `search`."""

    ratio: float = 0.45
    window: int = 32
    interval: int = 25
    steps: int = 1000
    tolerance: int = 300
    max_score: float = 0.95
    rule: SearchRule = "budget"


@dataclasses.dataclass(eq=False)
class Standing:
    """Scores of one set."""

    layers: LayerSet
    matches: int = 0  # tokens that it predicted
    tokens: int = 0  # tokens that it was scored on
    here: int | None = None  # matches on the present window; None before it was scored there

    @property
    def matchness(self) -> float | None:
        """Share of tokens that the set predicted; None before any was scored."""
        return self.matches / self.tokens if self.tokens else None

    def add(self, matches: int, window: int) -> None:
        self.matches, self.tokens, self.here = self.matches + matches, self.tokens + window, matches


class Asked(NamedTuple):
    """Sets to score on one window, and the standing of those that are scored again (None for candidates)."""

    window: int
    sets: tuple[tuple[LayerSet, Standing | None], ...]

    @property
    def layers(self) -> list[LayerSet]:
        return [layers for layers, _ in self.sets]


class LayerSearch:
    """One search, over any number of texts and processes.

    Candidates are counted: `steps` were scored, `stale` of them since the incumbent last changed, `proposed` were
    asked for. `since` is `steps` when the search was last resumed. `again` counts sets asked for that had been scored
    before, `unwatched` the tokens since a search that has ended last scored its set. `decoded_s` are the seconds of
    decoding during the search, in all processes; scoring took `spent_s` of them.
    """

    def __init__(self, num_layers: int, settings: SearchSettings, seed: int = 0):
        """Start with the uniform set of a model of `num_layers` layers; `seed` is that of random sets."""
        self.settings, self.num_layers, self._seed = settings, num_layers, seed
        self._units, self._skipped = num_units(num_layers), count_skipped(num_layers, settings.ratio)
        self._rng = np.random.default_rng(seed)
        start = uniform_layers(num_layers) if self._skipped else all_layers(num_layers)
        self.has_choice = 0 < self._skipped < self._units  # whether there is more than one set of the size
        self.stopped = None if self.has_choice else "there is nothing to choose"  # None while the search goes on
        self.steps = self.stale = self.since = self.proposed = self.again = self.unwatched = 0
        self.decoded_s = self.spent_s = 0.0
        self.history: list[tuple[int, float]] = []  # (step, matchness of the incumbent) whenever one of them changed
        self.adopted = [(0, str(start))]  # (step, layer set as text) of every incumbent
        self._ranked = [Standing(start)]  # the incumbent, then its rivals
        self._candidates, self._watched = Standing(start), Standing(start)  # of all candidates, and after the end
        self._due: list[Standing] = []
        self._window = self._on_window = 0  # number of the window; candidates proposed for it
        self._seen = {start}
        self._observed: collections.deque[tuple[np.ndarray, float]] = collections.deque(maxlen=MEMORY)

    @property
    def incumbent(self) -> Standing:
        """The set that drafts."""
        return self._ranked[0]

    @property
    def window_is_used_up(self) -> bool:
        """Whether the next sets should be scored on other tokens."""
        return self.settings.rule == "paper" or self.stopped is not None or self._on_window >= WINDOW_STEPS

    def open_window(self) -> None:
        """Sets asked for from now on are scored on other tokens; answers that are still to come are ignored."""
        if self.settings.rule == "paper":
            return  # a score says the same on any window
        self._window, self._on_window = self._window + 1, 0
        # The set with the fewest scores comes first: short texts have room for a few scores only.
        self._due = sorted(self._ranked, key=lambda standing: standing.tokens)
        for standing in self._ranked:
            standing.here = None

    def next_sets(self, count: int) -> Asked:
        """`count` sets to score on the present window."""
        if self.stopped is not None:
            return Asked(self._window, ((self.incumbent.layers, self.incumbent),) * count)
        chosen: list[tuple[LayerSet, Standing | None]] = []
        while len(chosen) < count:
            # At least about half of all scores are those of candidates.
            if self._due and (self.again <= self.proposed + RIVALS or not self.incumbent.tokens):
                standing = self._due.pop(0)
                chosen.append((standing.layers, standing))
                self.again += 1
            else:
                chosen.append((self._propose(), None))
                self._on_window += 1
        return Asked(self._window, tuple(chosen))

    def tell(self, asked: Asked, matches: Sequence[int]) -> None:
        """Take the scores of the sets that `next_sets` asked for: how many tokens of the window each predicted."""
        for (layers, standing), count in zip(asked.sets, map(int, matches), strict=True):
            if asked.window != self._window:
                return
            if self.stopped is not None:
                return self._watch(count) if standing is self.incumbent else None
            if standing is None:
                self._judge(layers, count)
            elif standing in self._ranked:
                standing.add(count, self.settings.window)
                self._observed.append((layers.skipped, standing.matchness or 0.0))
                self._rank(changed=standing is self.incumbent)
            self._stop_if_done()

    def _judge(self, layers: LayerSet, matches: int) -> None:
        """Compare a candidate with the incumbent on this window, or with its usual score where it has none here."""
        window, usual = self.settings.window, self.incumbent.matchness or 0.0
        here = usual * window if self.incumbent.here is None else self.incumbent.here
        # The incumbent's score here beside its usual one shows how hard this window is.
        self._observed.append((layers.skipped, (matches - here) / window + usual))
        self._candidates.add(matches, window)
        self.steps, self.stale = self.steps + 1, self.stale + 1
        if matches > here and self.settings.rule == "paper":
            self._ranked = [Standing(layers, matches, window)]
            self._note(adopted=True)
        elif matches > here:
            self._ranked.append(Standing(layers, matches, window, matches))
            self._rank()

    def _rank(self, changed: bool = False) -> None:
        """Make the best set the incumbent, and drop the worst of too many rivals."""
        # Sorting is stable: the incumbent wins a tie.
        before, self._ranked = self.incumbent, sorted(self._ranked, key=self._estimate, reverse=True)[: 1 + RIVALS]
        self._due = [standing for standing in self._due if standing in self._ranked]
        if changed or self.incumbent is not before:
            self._note(adopted=self.incumbent is not before)

    def _estimate(self, standing: Standing) -> float:
        """Expected matchness: few scores count less than the mean candidate."""
        weight = PRIOR_WINDOWS * self.settings.window
        return (standing.matches + weight * (self._candidates.matchness or 0.0)) / (standing.tokens + weight)

    def _note(self, adopted: bool = False) -> None:
        self.history.append((self.steps, self.incumbent.matchness or 0.0))
        if adopted:
            self.stale = 0
            self.adopted.append((self.steps, str(self.incumbent.layers)))

    def _stop_if_done(self) -> None:
        settings, standing = self.settings, self.incumbent
        windows = CONFIRMING_WINDOWS if settings.rule == "budget" else 1
        if standing.tokens >= windows * settings.window and (standing.matchness or 0.0) > settings.max_score:
            self.stopped = f"matchness above {settings.max_score}"
        elif self.steps - self.since >= settings.steps:
            self.stopped = f"{settings.steps} steps"
        elif self.stale >= settings.tolerance:
            self.stopped = f"{settings.tolerance} steps without a better set"

    def _watch(self, matches: int) -> None:
        """Resume a search that has ended where its set has become worse, as with texts of another kind."""
        found = self._watched
        found.add(matches, self.settings.window)
        if found.tokens < WATCHED_WINDOWS * self.settings.window:
            return
        layers = self.incumbent.layers
        self._watched = Standing(layers)
        if (found.matchness or 0.0) < self._estimate(self.incumbent) - FALL:
            # Old scores are those of other texts.
            self._ranked, self._candidates = [Standing(layers, found.matches, found.tokens)], Standing(layers)
            self._seen = {layers}
            self._due.clear()
            self._observed.clear()
            self.since, self.stale, self.stopped = self.steps, 0, None
            self._note()

    def _propose(self) -> LayerSet:
        """A candidate, a new one if that is easily found: Bayesian every `interval` steps, else a uniform set."""
        self.proposed += 1
        layers = self.incumbent.layers
        if self.proposed % self.settings.interval == 0 and len(self._observed) > 1:
            observed, noise = [*self._observed], NOISE[self.settings.rule]
            layers = from_skipped(self.num_layers, propose_bayesian(observed, self._skipped, self._rng, noise))
        for _ in range(20):
            if layers not in self._seen:
                break
            layers = from_skipped(self.num_layers, _random_sets(1, self._units, self._skipped, self._rng)[0])
        self._seen.add(layers)
        return layers

    def save(self) -> dict[str, Any]:
        """What another process needs to go on, as JSON."""

        def row(standing: Standing) -> list[Any]:
            return [str(standing.layers), standing.matches, standing.tokens]

        bits = [("".join("01"[int(unit)] for unit in skipped), round(score, 5)) for skipped, score in self._observed]
        return {name: getattr(self, name) for name in COUNTERS} | {
            "sets": [row(each) for each in (self._candidates, self._watched, *self._ranked)],
            "observed": bits, "stopped": self.stopped, "history": self.history[-MEMORY:],
            "settings": dataclasses.asdict(self.settings),
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from the result of `save`; a search with other settings takes its scores, and counts steps anew.

        ValueError, KeyError or TypeError: it is not such a result, or of a model of another depth.
        """
        sets = [Standing(parse_layers(text, self.num_layers), int(m), int(n)) for text, m, n in saved["sets"]]
        observed = [(np.array([bit == "1" for bit in bits], bool), float(score)) for bits, score in saved["observed"]]
        counters = {name: type(getattr(self, name))(saved[name]) for name in COUNTERS}
        history, stopped = [(int(step), float(score)) for step, score in saved["history"]], saved["stopped"]
        same = saved["settings"] == dataclasses.asdict(self.settings)
        if any(len(skipped) != self._units for skipped, _ in observed):
            raise ValueError(f"observations are not of {self._units} blocks")
        if len(sets) < 3 or any(not 0 <= each.matches <= each.tokens for each in sets):
            raise ValueError("there is no set, or one predicted more tokens than it was scored on")
        self._candidates, self._watched, *self._ranked = sets
        self._observed.extend(observed)
        self._seen |= {each.layers for each in sets}
        if same:
            vars(self).update(counters)
            self.history, self.stopped = history, self.stopped or stopped
            self._rng = np.random.default_rng([self._seed, self.proposed])  # not the earlier process's sets again
        self.adopted = [(self.steps, str(self.incumbent.layers))]


def propose_bayesian(
    observed: Sequence[tuple[np.ndarray, float]], size: int, rng: np.random.Generator, noise: float
) -> np.ndarray:
    """The set of `size` blocks with the highest upper confidence bound that a local search finds, bool [U].

    `observed` holds skipped blocks bool [U] and a score each; equal sets count once, with their mean. The candidates
    are random sets and observed ones, then, again and again, neighbours of the best: sets that differ from it in one
    skipped block. Observed sets themselves are proposed only if nothing else was looked at.
    """
    scores: dict[bytes, list[float]] = collections.defaultdict(list)
    for skipped, score in reversed(observed):
        scores[skipped.tobytes()].append(score)
    latest = [*scores][:OBSERVATIONS]
    known = np.array([np.frombuffer(key, bool) for key in latest])
    bound = fit_upper_bound(known, np.array([np.mean(scores[key]) for key in latest]), noise)
    units = known.shape[1]
    sets = np.concatenate([_random_sets(POOL, units, size, rng), known[known.sum(axis=1) == size]])
    best = sets[np.argmax(bound(sets))]
    for _ in range(CLIMBS):
        moved, place = np.repeat(best[None], NEIGHBOURS, axis=0), np.arange(NEIGHBOURS)
        moved[place, rng.choice(np.flatnonzero(best), NEIGHBOURS)] = False
        moved[place, rng.choice(np.flatnonzero(~best), NEIGHBOURS)] = True
        sets = np.array([row for row in (best, *moved) if row.tobytes() not in scores] or moved)
        best = sets[np.argmax(bound(sets))]
    return best


def fit_upper_bound(known: np.ndarray, scores: np.ndarray, noise: float) -> Callable[[np.ndarray], np.ndarray]:
    """Upper confidence bound of a Gaussian process with a Matern-5/2 kernel: mean + `KAPPA` deviations.

    It is returned as a function from sets bool [m, U] to float64 [m]. `known` are observed sets, bool [n, U], with
    their `scores` [n]; `noise` is the variance of a score's noise relative to that of the scores. The kernel's length
    is that of the cube's diagonal. It is not fitted: hundreds of noisy scores do not determine it.
    """

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # The squared distance of two 0/1 vectors is the number of places in which they differ.
        differ = a.sum(axis=1)[:, None] + b.sum(axis=1)[None, :] - 2.0 * (a.astype(float) @ b.astype(float).T)
        scaled = np.sqrt(5 * differ / known.shape[1])
        return (1 + scaled + scaled**2 / 3) * np.exp(-scaled)

    mean, spread = scores.mean(), scores.std() or 1.0
    whiten = np.linalg.inv(np.linalg.cholesky(kernel(known, known) + noise * np.eye(len(known))))
    weights = whiten.T @ (whiten @ ((scores - mean) / spread))

    def bound(sets: np.ndarray) -> np.ndarray:
        across = kernel(sets, known)
        variance = 1 - ((across @ whiten.T) ** 2).sum(axis=1)
        return mean + spread * (across @ weights + KAPPA * np.sqrt(np.maximum(variance, 0)))

    return bound


def _random_sets(count: int, units: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform sets of `size` blocks, bool [count, units]."""
    return rng.permuted(np.tile(np.arange(units) < size, (count, 1)), axis=1)
