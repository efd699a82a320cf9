"""The best prefixes of a table of marginals: the tree of a draft that fills a block of places in one pass.

Source: DDTree (arXiv 2604.12989), whose heap these few top-k's replace.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.tree.select import Candidates


def best_prefixes(token: Array, logprob: Array, count: int, min_score: float = -math.inf) -> Candidates:
    """The prefixes among which the `count` of highest score lie, up to `count` of each depth.

    A prefix scores the sum of its tokens' log-probabilities. One among the best `count` has its parent among them, and
    is among the best of its own depth, so each depth extends the best prefixes of the one above.

    Args:
      token: int32 [D, k], the likeliest tokens of each place; every prefix has the same ones below it.
      logprob: float32 [D, k], at most 0; -inf where there is no token.
      count: K.
      min_score: nothing lies below prefixes that score less.
    """
    above, levels = jnp.zeros(1), []
    start, branch = 0, token.shape[1]
    for depth in range(token.shape[0]):
        open_above = jnp.where(above >= min_score, above, -jnp.inf)
        score = (open_above[:, None] + logprob[depth]).reshape(-1)
        best, chosen = jax.lax.top_k(score, min(count, score.shape[0]))
        chosen = chosen.astype(jnp.int32)
        parent = jnp.full_like(chosen, -1) if depth == 0 else start + chosen // branch
        levels.append(Candidates(token[depth, chosen % branch], parent, jnp.full_like(chosen, depth + 1), best))
        start += 0 if depth == 0 else above.shape[0]
        above = best
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *levels)
