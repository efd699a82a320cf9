"""How often a draft's tokens are accepted, by how sure the draft was: learned while decoding."""

import jax
import jax.numpy as jnp
from flax import struct

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
    """Observations; first choices are of the first `CLASSES` classes, second ones of those after them.

    Attributes:
      tried: float32 [2 * CLASSES], drafted tokens that the verified text confirmed or refuted, with forgetting.
      accepted: float32 [2 * CLASSES], those that it confirmed.
    """

    tried: jax.Array
    accepted: jax.Array

    def update(self, kind: jax.Array, tried: jax.Array, accepted: jax.Array) -> "AcceptanceStats":
        """Count what became of drafted tokens.

        Args:
          kind: int32 [n], class of each.
          tried: bool [n], those that the verified text could confirm or refute.
          accepted: bool [n], those that it confirmed.
        """
        kept = FORGETTING ** (tried & (kind < CLASSES)).sum()
        return AcceptanceStats(
            tried=(self.tried * kept).at[jnp.where(tried, kind, 2 * CLASSES)].add(1.0, mode="drop"),
            accepted=(self.accepted * kept).at[jnp.where(accepted, kind, 2 * CLASSES)].add(1.0, mode="drop"),
        )

    def rate(self, kind: jax.Array) -> jax.Array:
        """Estimated chance that a token of a class is accepted, once the walk comes to it."""
        prior = jnp.array(PRIOR_RATE + PRIOR_SECOND)
        return ((self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT))[kind]

    def mean_rate(self) -> jax.Array:
        """Estimated chance of a first choice whose probability is not known yet, float32 []."""
        tried, accepted = self.tried[:CLASSES].sum(), self.accepted[:CLASSES].sum()
        return (accepted + PRIOR_WEIGHT * PRIOR_MEAN) / (tried + PRIOR_WEIGHT)


def init_acceptance() -> AcceptanceStats:
    """Nothing observed."""
    return AcceptanceStats(jnp.zeros(2 * CLASSES), jnp.zeros(2 * CLASSES))


def class_of(logprob: jax.Array, second: bool = False) -> jax.Array:
    """Class of a draft's log-probability, int32, of any shape."""
    place = jnp.searchsorted(jnp.array(EDGES), jnp.exp(logprob), side="right")
    return (place + CLASSES * second).astype(jnp.int32)


def chain_outcome(first: jax.Array, count: jax.Array, tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """Which tokens of a drafted chain the verified text says something about, bool [n].

    Args:
      first: int32 [n], the chain.
      count: int32 [], how long it is.
      tokens: int32 [P], verified tokens.
      num_tokens: int32 [], how many they are.
    """
    n = first.shape[0]
    verified = jnp.pad(tokens, (0, max(0, n - tokens.shape[0])))[:n]
    hit = first == verified
    before = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(hit[:-1]).astype(bool)])
    return before & (jnp.arange(n) < jnp.minimum(count, num_tokens))
