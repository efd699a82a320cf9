"""How often drafted tokens are accepted: learned while decoding, by what proposed a token and how sure it was.

A token has a *kind*. Those of a draft model are classes of its probability, apart for first choices and others, and for
tokens that a copy of earlier text proposes, too. Those of copies are lengths of the match. Where the draft proposes
other tokens than the copy, the copy is contradicted. docs/algorithms.md, "Cost model", explains the estimate.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

# Bounds between classes of draft probability, and what is believed of each class before anything is known, worth so
# many observations. Drafts are a little too sure of themselves.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_RATE = (0.05, 0.14, 0.23, 0.32, 0.41, 0.5, 0.59, 0.69, 0.79, 0.88, 0.95)
CLASSES = len(PRIOR_RATE)
PRIOR_WEIGHT = 4.0
# The chance of any first choice, before its probability is known.
PRIOR_MEAN = 0.5
# Chance that a refused token which a copy proposes, too, is right after all; of a token that a copy alone proposes,
# by the length of its match (longer ones count as the longest), and a factor where the draft contradicts it.
AGREEMENT = 0.4
PRIOR_COPY = (0.0, 0.25, 0.45, 0.6, 0.7, 0.78, 0.83, 0.87, 0.9)
CONTRADICTION = 0.25
# Observations lose weight with each token, so that a change of subject is noticed.
FORGETTING = 0.98

# Kinds: first choices, other choices, both again where a copy agrees; then copies, and contradicted copies.
OTHERS, AGREED, COPIES, CONTRADICTED = CLASSES, 2 * CLASSES, 4 * CLASSES, len(PRIOR_COPY)
KINDS = COPIES + 2 * CONTRADICTED


def _priors() -> np.ndarray:
    model = np.array(PRIOR_RATE * 2)
    copies = np.array(PRIOR_COPY)
    return np.concatenate([model, model + AGREEMENT * (1 - model), copies, CONTRADICTION * copies]).astype(np.float32)


@struct.dataclass
class AcceptanceStats:
    """Observations of tokens of each kind."""

    tried: Array  # float32 [KINDS], tokens that the verified text confirmed or refuted, with forgetting
    accepted: Array  # float32 [KINDS], those that it confirmed

    def update(self, kind: Array, tried: Array, accepted: Array) -> "AcceptanceStats":
        """Count what became of drafted tokens: their kinds, int32 [n], and which were confirmed, bool [n].

        `tried`, float32 or bool [n], is how much each counts that the verified text could confirm or refute.
        """
        tried = tried.astype(jnp.float32)
        kept = FORGETTING ** (accepted.sum() + (tried > 0).any())
        return AcceptanceStats(
            tried=(self.tried * kept).at[kind].add(tried),
            accepted=(self.accepted * kept).at[kind].add(accepted.astype(jnp.float32)),
        )

    def rates(self) -> Array:
        """Estimated chance that a token of each kind is accepted, once the walk comes to it; float32 [KINDS]."""
        rates = (self.accepted + PRIOR_WEIGHT * jnp.array(_priors())) / (self.tried + PRIOR_WEIGHT)
        model, copies = jnp.split(jnp.minimum(rates, 1.0), [COPIES])
        # A longer match is never worth less.
        return jnp.concatenate([model, jax.lax.cummax(copies.reshape(2, -1), axis=1).reshape(-1)])

    def rate(self, kind: Array) -> Array:
        """`rates` of some kinds, of their shape."""
        return self.rates()[kind]

    def mean_rate(self) -> Array:
        """Estimated chance of a first choice whose probability is not known yet, float32 []."""
        first = np.r_[0:CLASSES, AGREED : AGREED + CLASSES]
        tried, accepted = self.tried[first].sum(), self.accepted[first].sum()
        return (accepted + PRIOR_WEIGHT * PRIOR_MEAN) / (tried + PRIOR_WEIGHT)


def init_acceptance() -> AcceptanceStats:
    """Nothing observed."""
    return AcceptanceStats(jnp.zeros(KINDS), jnp.zeros(KINDS))


def class_of(logprob: Array) -> Array:
    """The kind of a first choice by a draft's log-probability of it, int32, of any shape."""
    return jnp.searchsorted(jnp.array(EDGES), jnp.exp(logprob), side="right").astype(jnp.int32)


def copy_kind(length: Array) -> Array:
    """The kind of a copy after a match of so many tokens, int32, of any shape."""
    return COPIES + jnp.minimum(length, CONTRADICTED - 1)
