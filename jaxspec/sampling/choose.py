"""Rule R4: each token is a function of its distribution and of the noise at its position (docs/algorithms.md)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.sampling.noise import gumbel_rows
from jaxspec.sampling.processors import Processors, clean, log_mass, penalise, score
from jaxspec.sampling.vocab import VocabShard

Case = Callable[[], tuple[jax.Array, jax.Array]]


def choose(
    logits: jax.Array,
    processors: Processors,
    seen: jax.Array,
    counts: jax.Array,
    key: jax.Array | np.ndarray,
    positions: jax.Array,
    vocab: VocabShard,
) -> tuple[jax.Array, jax.Array]:
    """Choose one token per row: the lowest-id argmax at temperature 0, else argmax(log p + Gumbel noise).

    Args:
      logits: float32 [T, V_local]
      processors: the knobs.
      seen: bool [T or 1, V_local], tokens in prompt, output or the row's own path.
      counts: int32 [T or 1, V_local], occurrences in output and path.
      key: uint32 [2], from `seed_key`.
      positions: int32 [T], absolute position of the token that each row chooses.
      vocab: the local columns.

    Returns:
      token: int32 [T], global ids.
      logprob: float32 [T], under the processed distribution; at temperature 0, which has none, under the softmax of the
        penalised logits. 0 where `processors.want_logprob` is False.
    """

    def greedy(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = vocab.argmax(z)
        return token, _logprob(z, token, processors, vocab)

    def draw() -> tuple[jax.Array, jax.Array]:
        scores = score(logits, processors, seen, counts, vocab, positions)
        # The barrier keeps XLA from computing the noise anew in each of the argmax's reductions.
        token = vocab.argmax(lax.optimization_barrier(scores + gumbel_rows(key, positions, vocab)))
        return token, _logprob(scores, token, processors, vocab)

    with jax.named_scope("sampling/choose"):
        return _by_case(
            processors,
            lambda: greedy(clean(logits, vocab)),
            lambda: greedy(penalise(logits, processors, seen, counts, vocab, positions)),
            draw,
        )


def choose_two(
    logits: jax.Array,
    processors: Processors,
    seen: jax.Array,
    counts: jax.Array,
    key: jax.Array | np.ndarray,
    positions: jax.Array,
    vocab: VocabShard,
) -> tuple[jax.Array, jax.Array]:
    """The token that `choose` takes, and the one that it would take if the first were ruled out.

    Args:
      As for `choose`.

    Returns:
      token: int32 [T, 2], global ids; the second is of no use where its log-probability is -inf.
      logprob: float32 [T, 2], under the processed distribution; at temperature 0 under the softmax of the penalised
        logits.
    """

    def best(scores: jax.Array, ranks: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = vocab.argmax(ranks)
        others = jnp.where(vocab.ids()[None] == first[:, None], -jnp.inf, ranks)
        second, possible = vocab.argmax(others), vocab.row_max(others)[:, 0] > -jnp.inf
        top = jnp.maximum(vocab.row_max(scores), jnp.finfo(jnp.float32).min)
        mass = (top + log_mass(scores - top, vocab))[:, 0]
        taken = [vocab.take(scores, first), jnp.where(possible, vocab.take(scores, second), -jnp.inf)]
        logprob = jnp.stack(taken, axis=1) - mass[:, None]
        return jnp.stack([first, second], axis=1), logprob

    def greedy(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        return best(z, z)

    def draw() -> tuple[jax.Array, jax.Array]:
        scores = score(logits, processors, seen, counts, vocab, positions)
        return best(scores, lax.optimization_barrier(scores + gumbel_rows(key, positions, vocab)))

    with jax.named_scope("sampling/choose_two"):
        return _by_case(
            processors,
            lambda: greedy(clean(logits, vocab)),
            lambda: greedy(penalise(logits, processors, seen, counts, vocab, positions)),
            draw,
        )


def choose_ranked(
    logits: jax.Array,
    processors: Processors,
    seen: jax.Array,
    counts: jax.Array,
    key: jax.Array | np.ndarray,
    positions: jax.Array,
    vocab: VocabShard,
    count: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token that `choose` takes, and those that it would take in turn if the ones before were ruled out.

    Args:
      As for `choose`.
      count: k, at most the real vocabulary.

    Returns:
      token: int32 [T, k], global ids, distinct.
      possible: bool [T, k]; False where the processed distribution has no further token.
      confidence: float32 [T], probability of the first one under the logits as they are: no penalty, no temperature.
    """

    def best(ranks: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, token = vocab.top_k(ranks, count)
        return token, value > -jnp.inf

    def draw() -> tuple[jax.Array, jax.Array]:
        scores = score(logits, processors, seen, counts, vocab, positions)
        return best(lax.optimization_barrier(scores + gumbel_rows(key, positions, vocab)))

    with jax.named_scope("sampling/choose_ranked"):
        raw = clean(logits, vocab)
        token, possible = _by_case(
            processors,
            lambda: best(raw),
            lambda: best(penalise(logits, processors, seen, counts, vocab, positions)),
            draw,
        )
        top = jnp.maximum(vocab.row_max(raw), jnp.finfo(jnp.float32).min)
        logprob = vocab.take(raw, token[:, 0]) - (top + log_mass(raw - top, vocab))[:, 0]
        return token, possible, jnp.exp(logprob)


def rank_tokens(
    logits: jax.Array,
    processors: Processors,
    seen: jax.Array,
    counts: jax.Array,
    positions: jax.Array,
    vocab: VocabShard,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """The most probable tokens under the distribution that `choose` draws from; zeros where nothing asks for them.

    Args:
      As for `choose`.
      count: k, at most the real vocabulary.

    Returns:
      token: int32 [T, k], global ids, most probable first.
      logprob: float32 [T, k], as in `choose`; -inf where no further token is possible.
    """

    def compute() -> tuple[jax.Array, jax.Array]:
        scores = lax.cond(
            jnp.asarray(processors.temperature) > 0,
            lambda: score(logits, processors, seen, counts, vocab, positions),
            lambda: penalise(logits, processors, seen, counts, vocab, positions),
        )
        value, token = vocab.top_k(scores, count)
        top = jnp.maximum(vocab.row_max(scores), jnp.finfo(jnp.float32).min)
        return token, value - (top + log_mass(scores - top, vocab))

    def nothing() -> tuple[jax.Array, jax.Array]:
        shape = (logits.shape[0], count)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    with jax.named_scope("sampling/rank"):
        return lax.cond(jnp.asarray(processors.num_logprobs) > 0, compute, nothing)


def _by_case(processors: Processors, plain: Case, penalised: Case, draw: Case) -> tuple[jax.Array, jax.Array]:
    """Run one of three: greedy as the logits are, greedy after penalties, or with noise."""
    # The cheap case first and alone: its branch reads the logits and nothing else.
    branch = jnp.where(jnp.asarray(processors.temperature) > 0, 2, jnp.asarray(processors.penalised, jnp.int32))
    return lax.switch(branch, [plain, penalised, draw])


def _logprob(scores: jax.Array, token: jax.Array, processors: Processors, vocab: VocabShard) -> jax.Array:
    """Log-probability of a token under the softmax of `scores`, float32 [T]; 0 if it is not wanted."""

    def compute() -> jax.Array:
        top = jnp.maximum(vocab.row_max(scores), jnp.finfo(jnp.float32).min)
        return vocab.take(scores, token) - (top + log_mass(scores - top, vocab))[:, 0]

    return lax.cond(processors.want_logprob, compute, lambda: jnp.zeros(token.shape[0], jnp.float32))
