"""How often a draft's tokens are accepted, by how sure the draft was: learned while decoding."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

# Bounds between classes of draft probability, and what is believed of each class before anything is known, worth so
# many observations. Drafts are a little too sure of themselves.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_CHANCE = (0.05, 0.14, 0.23, 0.32, 0.41, 0.5, 0.59, 0.69, 0.79, 0.88, 0.95)
PRIOR_WEIGHT = 4.0
# Of any token, before its probability is known.
PRIOR_MEAN = 0.5
# What was observed loses weight with each token tried, so that a change of subject is noticed.
FORGETTING = 0.98


@struct.dataclass
class Gauge:
    """Observations.

    Attributes:
      tried: float32 [C], drafted tokens of each class that the target looked at, with forgetting.
      accepted: float32 [C], those that it accepted.
    """

    tried: jax.Array
    accepted: jax.Array


def init_gauge() -> Gauge:
    """Nothing observed."""
    return Gauge(jnp.zeros(len(PRIOR_CHANCE)), jnp.zeros(len(PRIOR_CHANCE)))


def class_of(logprob: jax.Array) -> jax.Array:
    """Class of a draft's log-probability, int32, of any shape."""
    return jnp.searchsorted(jnp.array(EDGES), jnp.exp(logprob), side="right").astype(jnp.int32)


def chance_of(gauge: Gauge, kind: jax.Array) -> jax.Array:
    """Estimated chance that a token of a class is accepted."""
    prior = jnp.array(PRIOR_CHANCE)
    return ((gauge.accepted + PRIOR_WEIGHT * prior) / (gauge.tried + PRIOR_WEIGHT))[kind]


def mean_chance(gauge: Gauge) -> jax.Array:
    """Estimated chance that a token is accepted whose probability is not known yet, float32 []."""
    return (gauge.accepted.sum() + PRIOR_WEIGHT * PRIOR_MEAN) / (gauge.tried.sum() + PRIOR_WEIGHT)


def observe_chain(gauge: Gauge, kind: jax.Array, drafted: jax.Array, accepted: jax.Array) -> Gauge:
    """Learn what became of a chain.

    Args:
      gauge: so far.
      kind: int32 [n], classes of its tokens.
      drafted: int32 [], how many of them the target had; 0 for no chain.
      accepted: int32 [], how many of these it accepted.
    """
    place = jnp.arange(kind.shape[0])
    good, looked_at = place < accepted, place < jnp.minimum(accepted + 1, drafted)
    classes = gauge.tried.shape[0]
    kept = FORGETTING ** looked_at.sum()
    return dataclasses.replace(
        gauge,
        tried=(gauge.tried * kept).at[jnp.where(looked_at, kind, classes)].add(1.0, mode="drop"),
        accepted=(gauge.accepted * kept).at[jnp.where(good, kind, classes)].add(1.0, mode="drop"),
    )
