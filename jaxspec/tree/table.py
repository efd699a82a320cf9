"""The best prefixes of a table: the tree of a draft that fills a block of places in one pass.

Source: DDTree (arXiv 2604.12989), whose heap these few top-k's replace.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.tree.tree import Candidates

# (prefixes as ranks of their tokens, int32 [n, d]; log-probabilities of the tokens below each, float32 [n, k]) -> those
# that prefixes are ranked by, at most 0, and what is to be kept of each token, a tree of arrays [n, k]
Correct = Callable[[Array, Array], tuple[Array, Any]]


def best_prefixes(
    token: Array, logprob: Array, count: int, min_score: float = -math.inf, correct: Correct | None = None
) -> tuple[Candidates, Any]:
    """The prefixes among which the `count` of highest score lie, up to `count` of each depth.

    A prefix scores the sum of its tokens' log-probabilities. One among the best `count` has its parent among them, and
    is among the best of its own depth, so each depth extends the best prefixes of the one above.

    Args:
      token: int32 [D, k], the likeliest tokens of each place; every prefix has the same ones below it.
      logprob: at most 0, -inf where there is no token: float32 [D, k], or [D, k, k] where they depend on the token
        before, whose rank is the second axis; of the first place its first row counts.
      count: K.
      min_score: nothing lies below prefixes that score less.
      correct: see `Correct`; None ranks by the table.

    Returns:
      The candidates, `num_prefixes` of them, and what `correct` keeps of them.
    """
    above, ranks = jnp.zeros(1), jnp.zeros((1, 0), jnp.int32)
    levels, kept = [], []
    start, branch = 0, token.shape[1]
    for depth in range(token.shape[0]):
        below = logprob[depth] if depth and logprob.ndim == 3 else logprob[depth].reshape(-1, branch)[:1]
        last = ranks[:, -1] if depth and logprob.ndim == 3 else jnp.zeros(ranks.shape[0], jnp.int32)
        below, notes = below[last], None
        if correct is not None:
            below, notes = correct(ranks, below)
        open_above = jnp.where(above >= min_score, above, -jnp.inf)
        score = (open_above[:, None] + below).reshape(-1)
        best, chosen = jax.lax.top_k(score, min(count, score.shape[0]))
        chosen = chosen.astype(jnp.int32)
        parent = jnp.full_like(chosen, -1) if depth == 0 else start + chosen // branch
        levels.append(Candidates(token[depth, chosen % branch], parent, jnp.full_like(chosen, depth + 1), best))
        kept.append(jax.tree.map(lambda note, chosen=chosen: note.reshape(-1)[chosen], notes))
        start += 0 if depth == 0 else above.shape[0]
        ranks = jnp.concatenate([ranks[chosen // branch], (chosen % branch)[:, None]], axis=1)
        above = best
    levels = jax.tree.map(lambda *parts: jnp.concatenate(parts), *levels)
    return levels, jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept)


def num_prefixes(places: int, branch: int, count: int) -> int:
    """Candidates that `best_prefixes` gives for a table of `places` (D) and `branch` (k)."""
    total, level = 0, 1
    for _ in range(places):
        level = min(count, level * branch)
        total += level
    return total


def pick_distinct(token: Array, score: Array, count: int) -> tuple[Array, Array]:
    """The `count` tokens of highest score among int32 [n] with float32 [n], each once, with their scores.

    The first one is kept of equal tokens with equal scores. Where there are fewer, the rest scores -inf.
    """
    place = jnp.arange(token.shape[0])
    better = (score[None] > score[:, None]) | ((score[None] == score[:, None]) & (place[None] < place[:, None]))
    again = ((token[None] == token[:, None]) & better).any(axis=1)
    best, chosen = jax.lax.top_k(jnp.where(again, -jnp.inf, score), count)
    return token[chosen], best
