"""How often a draft's tokens are accepted, by how sure the draft was: learned while decoding."""

import jax.numpy as jnp
from flax import struct
from jax import Array

# Bounds between classes of draft probability, and what is believed of each class before anything is known, worth so
# many observations. Drafts are a little too sure of themselves.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_RATE = (0.05, 0.14, 0.23, 0.32, 0.41, 0.5, 0.59, 0.69, 0.79, 0.88, 0.95)
# Likewise of a second choice, where the first was refused.
PRIOR_SECOND = (0.08, 0.2, 0.3, 0.38, 0.44, 0.48, 0.5, 0.5, 0.5, 0.5, 0.5)
PRIOR_WEIGHT = 4.0
# Of any first choice, before its probability is known.
PRIOR_MEAN = 0.5
CLASSES = len(PRIOR_RATE)
# What was observed loses weight with each first choice tried, so that a change of subject is noticed.
FORGETTING = 0.98


@struct.dataclass
class AcceptanceStats:
    """Observations; first choices are of the first `CLASSES` classes, second ones of those after them."""

    # float32 [2 * CLASSES], drafted tokens that the verified text confirmed or refuted, with forgetting.
    tried: Array
    accepted: Array  # float32 [2 * CLASSES], those that it confirmed

    def update(self, kind: Array, tried: Array, accepted: Array) -> "AcceptanceStats":
        """Count what became of drafted tokens: their classes, int32 [n], and which were confirmed, bool [n].

        `tried`, bool [n], marks those that the verified text could confirm or refute.
        """
        kept = FORGETTING ** (tried & (kind < CLASSES)).sum()
        return AcceptanceStats(
            tried=(self.tried * kept).at[jnp.where(tried, kind, 2 * CLASSES)].add(1.0, mode="drop"),
            accepted=(self.accepted * kept).at[jnp.where(accepted, kind, 2 * CLASSES)].add(1.0, mode="drop"),
        )

    def rate(self, kind: Array) -> Array:
        """Estimated chance that a token of a class is accepted, once the walk comes to it."""
        prior = jnp.array(PRIOR_RATE + PRIOR_SECOND)
        return ((self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT))[kind]

    def mean_rate(self) -> Array:
        """Estimated chance of a first choice whose probability is not known yet, float32 []."""
        tried, accepted = self.tried[:CLASSES].sum(), self.accepted[:CLASSES].sum()
        return (accepted + PRIOR_WEIGHT * PRIOR_MEAN) / (tried + PRIOR_WEIGHT)


def init_acceptance() -> AcceptanceStats:
    """Nothing observed."""
    return AcceptanceStats(jnp.zeros(2 * CLASSES), jnp.zeros(2 * CLASSES))


def class_of(logprob: Array, second: bool = False) -> Array:
    """Class of a draft's log-probability, int32, of any shape."""
    place = jnp.searchsorted(jnp.array(EDGES), jnp.exp(logprob), side="right")
    return (place + CLASSES * second).astype(jnp.int32)


def chain_outcome(first: Array, count: Array, tokens: Array, num_tokens: Array) -> Array:
    """Which tokens of a drafted chain the verified text says something about, bool [n].

    `first`, int32 [n], is the chain, of length `count`; `tokens`, int32 [P], are `num_tokens` verified ones, and P is
    at least n.
    """
    n = first.shape[0]
    hit = first == tokens[:n]
    before = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(hit[:-1]).astype(bool)])
    return before & (jnp.arange(n) < jnp.minimum(count, num_tokens))
