"""A draft with one parameter: texts whose tokens are drawn from what the draft says.

At each place the draft gives its first choice the probability a, and each further choice half of what is left. How sure
it is changes from place to place: a is drawn from a beta distribution with the mean `sureness` and the weight `SPREAD`.
The target's token is drawn from the draft's probabilities, so the draft is calibrated. Nothing else is assumed.
"""

import functools

import numpy as np

from swiftspec_sim.clock import Setting, Steps, Summary, replay, summarise
from swiftspec_sim.replay import make_table
from swiftspec_sim.trace import Trace

# Weight of the beta distribution: 1 spreads it widely, most places are sure or unsure, as in real text.
SPREAD = 1.0
TEXTS, TOKENS, KEEP = 3, 640, 16
# Room of the replay's table, for every text and setting.
NODES = TOKENS + 64


@functools.cache
def synthetic_traces(sureness: float, texts: int = TEXTS) -> tuple[Trace, ...]:
    """Texts of a draft with that sureness; the same numbers are drawn for every sureness."""
    return tuple(_make(sureness, seed) for seed in range(texts))


def simulate(sureness: float, setting: Setting, steps: Steps, room: int) -> Summary:
    """The texts under a setting; trees have room for `room` passes, so that settings share compiled functions."""
    traces = synthetic_traces(sureness)
    tables = [make_table(trace, NODES, TOKENS + 64) for trace in traces]
    return summarise([replay(table, TOKENS, setting, steps, room) for table in tables], setting, steps)


def _make(sureness: float, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    uniform = rng.random((2, TOKENS + 1))
    sure = _beta_quantiles(uniform[0], SPREAD * sureness, SPREAD * (1 - sureness))
    rest = (1 - sure)[:, None] * 0.5 ** np.arange(1, KEEP)
    probability = np.clip(np.concatenate([sure[:, None], rest], axis=1), 1e-9, 1.0)
    # Children by probability, as a real draft proposes them.
    probability = -np.sort(-probability, axis=1)
    rank = (uniform[1][:, None] > probability.cumsum(axis=1)).sum(axis=1)
    # The token of rank j is j; one that is not proposed is KEEP, which no context proposes.
    text = rank[:TOKENS].astype(np.int32)
    children = np.broadcast_to(np.arange(KEEP, dtype=np.int32), (TOKENS + 1, KEEP)).copy()
    chain = np.arange(-1, TOKENS, dtype=np.int32)
    token = np.concatenate([[-1], text]).astype(np.int32)
    return Trace(str(seed), "synthetic", text, chain, token, children, np.log(probability).astype(np.float32))


def _beta_quantiles(uniform: np.ndarray, first: float, second: float) -> np.ndarray:
    """Quantiles of a beta distribution, by interpolation in its distribution function; no package for one function."""
    # Fine steps at both ends, where the density is large for parameters below 1.
    grid = 1 / (1 + np.exp(-np.linspace(-14, 14, 4001)))
    log_density = (first - 1) * np.log(grid) + (second - 1) * np.log1p(-grid)
    density = np.exp(log_density - log_density.max())
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(grid))])
    return np.interp(uniform, mass / mass[-1], grid)
