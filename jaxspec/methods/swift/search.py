"""The search for the blocks to skip (SWIFT, arXiv 2410.06916, section 4.2), one step at a time.

A step scores one candidate by its matchness: the share of the latest verified tokens (the context) that the model
without the candidate's blocks predicts. The set with the best score so far drafts. It is not scored again.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.layer_set import (
    LayerSet,
    all_layers,
    count_skipped,
    from_skipped,
    num_units,
    parse_layers,
    uniform_layers,
)
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import clean

MEMORY = 128  # observed sets that are kept, the latest ones: Bayesian proposals rest on them
KAPPA = 2.5  # Bayesian proposals: weight of the deviation in the upper confidence bound, as in the paper's code
# Variance of a score's noise relative to that of all scores: the paper's code has 0.01, but 32 tokens say little.
NOISE = 0.3
# Random sets that a proposal starts from; how often the neighbours of the best one are looked at, and how many.
POOL, CLIMBS, NEIGHBOURS = 256, 12, 64


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """How layers are searched; the defaults are the paper's. `Swift` documents `ratio` and `steps`."""

    ratio: float = 0.45
    window: int = 32  # gamma, tokens on which a candidate is scored
    interval: int = 25  # beta; each proposal whose number it divides is Bayesian, the others are random
    steps: int = 1000
    tolerance: int = 300  # steps without a better set after which the search ends
    max_score: float = 0.95  # share of predicted tokens above which the search ends


class LayerSearch:
    """One search, over any number of texts and processes.

    `layers` is the best set, which drafts, and `matchness` its score (None before one was found). `steps` candidates
    were scored, `stale` of them since the best set changed. `decoded_s` are the seconds of decoding during the search,
    in all processes; scoring took `spent_s` of them. `history` has (step, matchness) of every best set.
    """

    def __init__(self, num_layers: int, settings: SearchSettings, seed: int = 0):
        """Start with the uniform set of a model of `num_layers` layers; `seed` is that of random sets."""
        self.settings, self.num_layers, self._seed = settings, num_layers, seed
        self._units, self._skipped = num_units(num_layers), count_skipped(num_layers, settings.ratio)
        self._rng = np.random.default_rng(seed)
        self.layers = uniform_layers(num_layers) if self._skipped else all_layers(num_layers)
        self.matchness: float | None = None
        self.has_choice = 0 < self._skipped < self._units  # whether there is more than one set of the size
        self.stopped = None if self.has_choice else "there is nothing to choose"  # None while the search goes on
        self.steps = self.stale = self._proposed = 0
        self.decoded_s = self.spent_s = 0.0
        self.history: list[tuple[int, float]] = []
        self._observed: collections.deque[tuple[np.ndarray, float]] = collections.deque(maxlen=MEMORY)

    def propose(self) -> LayerSet:
        """A set to score: Bayesian every `interval` proposals, else a random one."""
        self._proposed += 1
        if self._proposed % self.settings.interval == 0 and len(self._observed) > 1:
            skipped = propose_bayesian([*self._observed], self._skipped, self._rng)
        else:
            skipped = _random_sets(1, self._units, self._skipped, self._rng)[0]
        return from_skipped(self.num_layers, skipped)

    def tell(self, layers: LayerSet, score: float) -> None:
        """Take the matchness of a proposed set; those that arrive after the end are ignored."""
        if self.stopped is not None:
            return
        settings = self.settings
        self.steps, self.stale = self.steps + 1, self.stale + 1
        self._observed.append((layers.skipped, score))
        if score > (self.matchness or 0.0):
            self.layers, self.matchness, self.stale = layers, score, 0
            self.history.append((self.steps, score))
        if (self.matchness or 0.0) > settings.max_score:
            self.stopped = f"matchness above {settings.max_score}"
        elif self.steps >= settings.steps:
            self.stopped = f"{settings.steps} steps"
        elif self.stale >= settings.tolerance:
            self.stopped = f"{settings.tolerance} steps without a better set"

    def save(self) -> dict[str, Any]:
        """The state of the search as JSON, with which another process can go on."""
        bits = [("".join("01"[int(unit)] for unit in skipped), round(score, 5)) for skipped, score in self._observed]
        return {
            "layers": str(self.layers), "matchness": self.matchness, "steps": self.steps, "stale": self.stale,
            "decoded_s": self.decoded_s, "spent_s": self.spent_s, "observed": bits, "stopped": self.stopped,
            "history": self.history, "settings": dataclasses.asdict(self.settings),
        }  # fmt: skip

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from the result of `save`; a search with other settings takes its scores, and counts steps anew.

        ValueError, KeyError, TypeError or OverflowError: it is not such a result, or of a model of another depth.
        """
        layers, matchness = parse_layers(saved["layers"], self.num_layers), saved["matchness"]
        observed = [(np.array([bit == "1" for bit in bits], bool), float(score)) for bits, score in saved["observed"]]
        steps, stale, stopped = int(saved["steps"]), int(saved["stale"]), saved["stopped"]
        decoded_s, spent_s = float(saved["decoded_s"]), float(saved["spent_s"])
        history = [(int(step), float(score)) for step, score in saved["history"]]
        same = saved["settings"] == dataclasses.asdict(self.settings)
        if any(len(skipped) != self._units for skipped, _ in observed):
            raise ValueError(f"observations are not of {self._units} blocks")
        if not np.isfinite([decoded_s, spent_s, *(score for _, score in (*observed, *history))]).all():
            raise ValueError("a score or a time is no number")
        if matchness is not None and not 0 <= matchness <= 1:
            raise ValueError(f"matchness {matchness} is no share")
        self.layers, self.matchness = layers, matchness
        self._observed.extend(observed)
        if same:
            self.steps, self.stale, self.history, self.stopped = steps, stale, history, self.stopped or stopped
            self.decoded_s, self.spent_s, self._proposed = decoded_s, spent_s, steps
            self._rng = np.random.default_rng([self._seed, steps])  # not the earlier process's sets again


def propose_bayesian(observed: Sequence[tuple[np.ndarray, float]], size: int, rng: np.random.Generator) -> np.ndarray:
    """The set of `size` blocks with the highest upper confidence bound that a local search finds, bool [U].

    `observed` holds skipped blocks bool [U] and a score each. The candidates are random sets and observed ones, then,
    again and again, neighbours of the best: sets that differ from it in one skipped block. Observed sets themselves
    are proposed only if nothing else was looked at.
    """
    known = np.array([skipped for skipped, _ in observed])
    seen = {skipped.tobytes() for skipped in known}
    bound = fit_upper_bound(known, np.array([score for _, score in observed]), NOISE)
    sets = np.concatenate([_random_sets(POOL, known.shape[1], size, rng), known[known.sum(axis=1) == size]])
    best = sets[np.argmax(bound(sets))]
    for _ in range(CLIMBS):
        moved, place = np.repeat(best[None], NEIGHBOURS, axis=0), np.arange(NEIGHBOURS)
        moved[place, rng.choice(np.flatnonzero(best), NEIGHBOURS)] = False
        moved[place, rng.choice(np.flatnonzero(~best), NEIGHBOURS)] = True
        sets = np.array([row for row in (best, *moved) if row.tobytes() not in seen] or moved)
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


def matchness_program(target: Placement, state: SequenceState, window: int, branching: bool) -> Program:
    """Count the tokens that a layer set predicts on a `window` of gamma verified tokens, in one parallel pass.

    The pass runs in the cache of the generation at hand, on top of the keys and values before those tokens. What it
    overwrites is put back. Blocks are skipped by `branching` on the device; else all is computed.
    Returns a program (params, state, tokens, start, units) -> (state, matches), which leaves the state unchanged:
      tokens: int32 [gamma + 1], verified ones in order; the first is given, the others are predicted.
      start: int32 [], position of the first one. The cache has gamma slots from there on.
      units: bool [L, 2], blocks that run; matches: int32 [], at most gamma.
    """

    def count(params: Params, state: SequenceState, tokens: jax.Array, start: jax.Array, units: jax.Array) -> tuple:
        step, cache = jnp.arange(window, dtype=jnp.int32), state.cache
        mask = step[None, :] <= step[:, None]
        layers = (cache.key, cache.value)

        def save(_: tuple) -> tuple:
            saved = jax.tree.map(lambda layer: jax.lax.dynamic_slice_in_dim(layer, start, window, axis=1), layers)
            return jnp.bool_(False), start, saved

        # A loop of one turn, which the compiler does not know, that says where to write. Fused with the restoring, or
        # not ordered before the writing, the saving would copy the whole cache.
        nothing = jax.tree.map(lambda layer: jnp.zeros((layer.shape[0], window, layer.shape[2]), layer.dtype), layers)
        _, begin, (key, value) = jax.lax.while_loop(lambda carry: carry[0], save, (start >= 0, jnp.int32(0), nothing))
        scratch = dataclasses.replace(cache, length=begin)
        runs = units if branching else jnp.repeat(units[:, :, None], window, axis=2)  # [L, 2] or [L, 2, gamma]
        with jax.named_scope("matchness"):
            hidden, scratch = forward(params, target.cfg, tokens[:-1], start + step, scratch, mask, units=runs)
            said = target.vocab.argmax(clean(vocab_logits(params, target.cfg, hidden), target.vocab))
            matches = (said == tokens[1:]).sum(dtype=jnp.int32)

        def restore(layer: jax.Array, held: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(layer, held, begin, axis=1)

        key, value = tuple(map(restore, scratch.key, key)), tuple(map(restore, scratch.value, value))
        return dataclasses.replace(state, cache=dataclasses.replace(cache, key=key, value=value)), matches

    tokens, units = target.array((window + 1,), jnp.int32), target.array((target.cfg.num_layers, 2), jnp.bool_)
    args = [target.params(), state, tokens, target.array((), jnp.int32), units]
    return Program("matchness", count, target.plan, args, (state, target.array((), jnp.int32)), donate=[1])
