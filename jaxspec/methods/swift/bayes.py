"""Bayesian proposals of the search for layers to skip, with the `bayesian-optimization` package.

Sets are 0/1 vectors throughout: those that were observed and those that are proposed. (SWIFT's code observes its own
proposals as the continuous points that the optimiser gave, of which the largest coordinates became the set.)
"""

import collections
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

# Weight of the deviation in the upper confidence bound.
KAPPA = 2.5
# Noise of a score relative to the variance of all scores: 32 tokens say little about one set. The paper's 1e-2 would
# take every lucky score for the truth.
NOISE = 0.3
# Distance over which sets are alike, relative to the diagonal of the cube. Not fitted: that would take seconds.
LENGTH_SCALE = 1.0
# Observations that a proposal looks at, the latest ones.
OBSERVATIONS = 128
# Random sets that a proposal starts from, then how often the best one's neighbours are looked at, and how many.
POOL, CLIMBS, NEIGHBOURS = 256, 12, 64


def propose_bayesian(
    observed: Sequence[tuple[np.ndarray, float]], best: np.ndarray, count: int, seed: int
) -> tuple[np.ndarray, float]:
    """The set of highest upper confidence bound under a Gaussian process, and the seconds of CPU that it took.

    The package would look for a point of the whole cube. Here it is shown sets of the right size only: random ones, the
    incumbent and what was observed, and then the neighbours of the best of them, again and again.

    Args:
      observed: skipped units bool [U] and score, of each observation.
      best: the incumbent's.
      count: units to skip.
      seed: of the random sets.
    """
    start = time.thread_time()
    from bayes_opt.acquisition import UpperConfidenceBound
    from bayes_opt.target_space import TargetSpace
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    class Shown(TargetSpace):
        """A space whose random points are those that it was told to show."""

        points = np.zeros((0, len(best)))

        def random_sample(self, n_samples: int = 0, random_state: Any = None) -> np.ndarray:
            return self.points[:n_samples]

    rng = np.random.default_rng(seed)
    space = Shown(None, {f"unit_{index:04d}": (0.0, 1.0) for index in range(len(best))})
    for skipped, score in _average(observed):
        space.register(skipped.astype(float), score)
    kernel = Matern(nu=2.5, length_scale=LENGTH_SCALE * len(best) ** 0.5)
    as_it_is: Any = None  # instead of an optimiser of the kernel
    process = GaussianProcessRegressor(kernel, alpha=NOISE, optimizer=as_it_is, normalize_y=True)
    acquisition = UpperConfidenceBound(KAPPA)

    def choose(sets: np.ndarray, fit: bool) -> np.ndarray:
        space.points = sets.astype(float)
        return acquisition.suggest(process, space, n_random=len(sets), n_smart=0, fit_gp=fit, random_state=0) > 0.5

    # The incumbent may be of another size: the uniform start is.
    near = [_resize(best, count, rng), *(skipped for skipped, _ in observed if skipped.sum() == count)]
    pool = np.zeros((POOL, len(best)), bool)
    for row in pool:
        row[rng.permutation(len(best))[:count]] = True
    chosen = choose(np.concatenate([pool, near[-POOL:]]), True)
    known = {skipped.tobytes() for skipped, _ in observed}
    for _ in range(CLIMBS):
        sets = _neighbours(chosen, NEIGHBOURS, rng)
        fresh = [row for row in (chosen, *sets) if row.tobytes() not in known]
        chosen = choose(np.array(fresh) if fresh else sets, False)
    return chosen, time.thread_time() - start


def _average(observed: Sequence[tuple[np.ndarray, float]]) -> list[tuple[np.ndarray, float]]:
    """One observation of each set, the mean of its scores; the latest `OBSERVATIONS` sets."""
    scores: dict[bytes, list[float]] = collections.defaultdict(list)
    for skipped, score in reversed(observed):
        scores[skipped.tobytes()].append(score)
    latest = list(scores.items())[:OBSERVATIONS]
    return [(np.frombuffer(key, bool), float(np.mean(values))) for key, values in latest]


def _neighbours(skipped: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` sets that differ from one in one skipped unit each."""
    moved = np.repeat(skipped[None], count, axis=0)
    place = np.arange(count)
    moved[place, rng.choice(np.flatnonzero(skipped), count)] = False
    moved[place, rng.choice(np.flatnonzero(~skipped), count)] = True
    return moved


def _resize(skipped: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """A set of `count` units, as like another one as can be."""
    order = rng.permutation(len(skipped))
    # Skipped ones first, in random order.
    chosen = order[np.argsort(~skipped[order], kind="stable")][:count]
    resized = np.zeros(len(skipped), bool)
    resized[chosen] = True
    return resized
