"""Rule R4: each token is a function of its distribution and of the noise at its position (docs/algorithms.md).

All functions here take logits float32 [T, V_local]; `histories` of prompt, output and each row's own path; and
`positions`, int32 [T], the absolute position of the token that each row chooses. `key` is from `seed_key`.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, named_scope

from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.noise import gumbel_rows
from jaxspec.sampling.processors import Histories, Processors, clean, decide, penalise, score, tidy

Key = Array | np.ndarray


def choose(
    logits: Array, processors: Processors, histories: Histories, key: Key, positions: Array, vocab: VocabShard
) -> tuple[Array, Array]:
    """Choose one token per row, int32 [T]: the lowest-id argmax at temperature 0, else argmax(log p + Gumbel noise).

    The second result is its log-probability, float32 [T], under the processed distribution. At temperature 0, which has
    none, it is under the softmax of the penalised logits. It is 0 where `processors.want_logprob` is False.
    """

    def best(scores: Array, ranks: Array) -> tuple[Array, Array]:
        token = vocab.argmax(ranks)
        wanted, rows = processors.want_logprob, token.shape[0]
        return token, decide(
            processors.knows("logprob"), wanted,
            lambda: _logprob(scores, token, vocab), lambda: jnp.zeros(rows, jnp.float32),
        )  # fmt: skip

    with named_scope("sampling/choose"):
        return _rank(best, logits, processors, histories, key, positions, vocab)


def choose_ranked(
    logits: Array, processors: Processors, histories: Histories, key: Key, positions: Array, vocab: VocabShard,
    count: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The token that `choose` takes, and those that it would take in turn if the ones before were ruled out.

    Returns `count` (k, at most the real vocabulary) distinct ids int32 [T, k], and bool [T, k], False where the
    processed distribution has no further token. The last result is the probability of the first one, float32 [T], under
    the logits as they are: no penalty, no temperature.
    """

    def best(scores: Array, ranks: Array) -> tuple[Array, Array]:
        value, token = vocab.top_k(ranks, count)
        return token, value > -jnp.inf

    with named_scope("sampling/choose_ranked"):
        raw = clean(logits, vocab)
        token, possible = _rank(best, logits, processors, histories, key, positions, vocab, raw)
        return token, possible, jnp.exp(_logprob(raw, token[:, 0], vocab))


def rank_draws(
    logits: Array, processors: Processors, histories: Histories, key: Key, positions: Array, vocab: VocabShard,
    count: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Likely choices of another model with the same noise: the `count` (k) best ids, int32 [T, k], and their chances.

    The chances are logarithms, float32 [T, k], -inf where the processed distribution has no further token. They are the
    softmax of the logits plus temperature times noise, which order the tokens: exact if the other model's logits differ
    from these by independent standard Gumbel errors. At temperature 0 that is the softmax of the penalised logits.
    """
    temperature = jnp.asarray(processors.temperature)

    def best(scores: Array, ranks: Array) -> tuple[Array, Array]:
        ranks = ranks if ranks is scores else ranks * temperature
        value, token = vocab.top_k(ranks, count)
        return token, value - vocab.log_total(ranks)

    with named_scope("sampling/rank_draws"):
        return _rank(best, logits, processors, histories, key, positions, vocab)


def rank_tokens(
    logits: Callable[[], Array], processors: Processors, histories: Histories, positions: Array,
    vocab: VocabShard, count: int,
) -> tuple[Array, Array]:  # fmt: skip
    """The `count` (k) most probable tokens under the distribution that `choose` draws from; zeros where nothing asks.

    Returns ids int32 [T, k], most probable first, and log-probabilities float32 [T, k], as in `choose`; -inf where no
    further token is possible.
    """

    def compute() -> tuple[Array, Array]:
        rows = logits()
        scores = decide(
            processors.knows("draws"),
            jnp.asarray(processors.temperature) > 0,
            lambda: score(rows, processors, histories, vocab, positions),
            lambda: penalise(rows, processors, histories, vocab, positions),
        )
        value, token = vocab.top_k(scores, count)
        return token, value - vocab.log_total(scores)

    def nothing() -> tuple[Array, Array]:
        shape = (positions.shape[0], count)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    with named_scope("sampling/rank"):
        return decide(processors.knows("ranked"), jnp.asarray(processors.num_logprobs) > 0, compute, nothing)


def _rank(
    best: Callable[[Array, Array], tuple[Array, Array]], logits: Array, processors: Processors,
    histories: Histories, key: Key, positions: Array, vocab: VocabShard, cleaned: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Call `best` with scores [T, V_local] and with what orders the tokens: the scores, or scores and noise.

    `cleaned` are the logits after `clean`, where the caller has them.
    """

    def plain() -> tuple[Array, Array]:
        if cleaned is not None:
            return best(cleaned, cleaned)
        # The native library cleans what it reads.
        z = logits if vocab.is_native and not vocab.is_padded else clean(logits, vocab)
        return best(z, z)

    def penalised() -> tuple[Array, Array]:
        z = penalise(logits, processors, histories, vocab, positions)
        return best(z, z)

    def draw() -> tuple[Array, Array]:
        scores = score(logits, processors, histories, vocab, positions)
        # The barrier keeps XLA from computing the noise anew in each of the argmax's reductions.
        return best(scores, lax.optimization_barrier(scores + gumbel_rows(key, positions, vocab)))

    if processors.variant is not None:
        greedy = penalised if processors.variant.penalised else plain
        return draw() if processors.variant.draws else greedy()
    # The cheap case first and alone: its branch reads the logits and nothing else.
    branch = jnp.where(jnp.asarray(processors.temperature) > 0, 2, jnp.asarray(processors.penalised, jnp.int32))
    return lax.switch(branch, [plain, penalised, draw])


def _logprob(scores: Array, token: Array, vocab: VocabShard) -> Array:
    """Log-probability of a token, int32 [T], under the softmax of `scores`: float32 [T]."""
    return tidy(vocab.take(scores, token)) - vocab.log_total(scores)[:, 0]
