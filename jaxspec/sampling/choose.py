"""Rule R4: each token is a function of its distribution and of the noise at its position (docs/algorithms.md).

The functions of a choice take logits float32 [T, V_local]; `histories` of prompt, output and each row's own path; and
`positions`, int32 [T], the absolute position of the token that each row chooses. `key` is from `seed_key`.

The noise of a token at a position is a hash of seed, position and token id, so it is the same for any vocabulary
sharding, any number of rows and any method; drawing from it twice is the same draw.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, named_scope

from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.processors import Histories, Processors, Result, adjust, clean, cut, decide, shift, tidy

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Key = Array | np.ndarray


def choose(
    logits: Array, processors: Processors, histories: Histories, key: Key, positions: Array, vocab: VocabShard
) -> tuple[Array, Array]:
    """Choose one token per row, int32 [T]: the lowest-id argmax at temperature 0, else argmax(log p + Gumbel noise).

    The second result is its log-probability, float32 [T], under the processed distribution. At temperature 0, which has
    none, it is under the softmax of the penalised logits. It is 0 where `processors.want_logprob` is False.
    """
    return choose_and_rank(logits, processors, histories, key, positions, vocab, 0)[:2]


def choose_and_rank(
    logits: Array, processors: Processors, histories: Histories, key: Key, positions: Array, vocab: VocabShard,
    count: int,
) -> tuple[Array, Array, tuple[Array, Array]]:  # fmt: skip
    """`choose`, and the `count` (k) most probable tokens under the distribution that it draws from.

    At temperature 0 that is the softmax of the penalised logits. Ids are int32 [T, k], most probable first,
    log-probabilities float32 [T, k], -inf where no further token is possible. All are zeros where `num_logprobs` is 0.
    """
    rows = logits.shape[0]

    def best(scores: Array, ranks: Array) -> tuple[Array, Array, tuple[Array, Array]]:
        token = vocab.argmax(ranks)

        def asked() -> tuple[Array, tuple[Array, Array]]:
            total = vocab.log_total(scores)
            ranked = rank_tokens(scores, total, processors, vocab, count)
            return tidy(vocab.take(scores, token)) - total[:, 0], ranked

        unasked = jnp.zeros(rows, jnp.float32), _unranked(rows, count)
        return token, *decide(processors.knows("logprob"), processors.want_logprob, asked, lambda: unasked)

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
        return token, possible, jnp.exp(tidy(vocab.take(raw, token[:, 0])) - vocab.log_total(raw)[:, 0])


def rank_draws(
    logits: Array, processors: Processors, histories: Histories, key: Key, positions: Array, vocab: VocabShard,
    count: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Likely choices of another model with the same noise: the `count` (k) best ids, int32 [T, k], and their chances.

    The chances are logarithms, float32 [T, k], -inf where the processed distribution has no further token. They are the
    softmax of the logits plus temperature times noise, which order the tokens: exact if the other model's logits differ
    from these by independent standard Gumbel errors. At temperature 0 that is the softmax of the penalised logits.
    """
    # Greedy scores were not divided by a temperature.
    temperature = jnp.where(jnp.asarray(processors.temperature) > 0, processors.temperature, 1.0)

    def best(scores: Array, ranks: Array) -> tuple[Array, Array]:
        ranks = ranks if ranks is scores else ranks * temperature
        value, token = vocab.top_k(ranks, count)
        return token, value - vocab.log_total(ranks)

    with named_scope("sampling/rank_draws"):
        return _rank(best, logits, processors, histories, key, positions, vocab)


def rank_tokens(
    scores: Array, total: Array | float, processors: Processors, vocab: VocabShard, count: int
) -> tuple[Array, Array]:
    """The last result of `choose_and_rank`: scores [T, V_local] less `total`, [T, 1], are log-probabilities."""
    nothing = _unranked(scores.shape[0], count)

    def ranked() -> tuple[Array, Array]:
        value, token = vocab.top_k(scores, count)
        return token, value - total

    if not count:
        return nothing
    with named_scope("sampling/rank"):
        return decide(processors.knows("ranked"), jnp.asarray(processors.num_logprobs) > 0, ranked, lambda: nothing)


def _unranked(rows: int, count: int) -> tuple[Array, Array]:
    return jnp.zeros((rows, count), jnp.int32), jnp.zeros((rows, count), jnp.float32)


def _rank(
    best: Callable[[Array, Array], Result], logits: Array, processors: Processors, histories: Histories, key: Key,
    positions: Array, vocab: VocabShard, cleaned: Array | None = None,
) -> Result:  # fmt: skip
    """Call `best` with scores [T, V_local] and with what orders the tokens: the scores, or scores and noise.

    `cleaned` are the logits after `clean`, where the caller has them.
    """
    draws = jnp.asarray(processors.temperature) > 0

    def plain() -> Result:
        if cleaned is not None:
            return best(cleaned, cleaned)
        # The native library cleans what it reads.
        z = logits if vocab.is_native and not vocab.is_padded else clean(logits, vocab)
        return best(z, z)

    def processed() -> Result:
        z = adjust(logits, processors, histories, vocab, positions)

        def draw() -> tuple[Array, Array]:
            scores = cut(shift(z, processors, vocab), processors, vocab)
            # The barrier keeps XLA from computing the noise anew in each of the argmax's reductions.
            return scores, lax.optimization_barrier(scores + gumbel_rows(key, positions, vocab))

        return best(*decide(processors.knows("draws"), draws, draw, lambda: (z, z)))

    # The cheap case alone: its branch reads the logits and nothing else.
    known = processors.variant and (processors.variant.draws or processors.variant.penalised)
    return decide(known, draws | jnp.asarray(processors.penalised), processed, plain)


def seed_key(seed: int) -> np.ndarray:
    """Key of a seed: its two 32-bit halves, uint32 [2], so that different seeds below 2**64 have different keys."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def role_key(key: Array | np.ndarray, role: int) -> Array:
    """A key of the same seed for another use than choosing tokens, so that one random number decides one thing."""
    # The counter's high word is 0 for positions: no role, 1 or more, gets the key of a position.
    seed = jnp.asarray(key, jnp.uint32)
    return jnp.stack(threefry((seed[0], seed[1]), jnp.uint32(role), jnp.uint32(0)))


def uniform_at(key: Array | np.ndarray, position: Array, draw: Array) -> Array:
    """Uniform numbers in [0, 1), float32 [N], that decide the token at an absolute position, int32 [].

    `key` is from `role_key`; `draw`, int32 [N], says which numbers of that position.
    """
    seed = jnp.asarray(key, jnp.uint32)
    at_position = threefry((seed[0], seed[1]), jnp.uint32(0), position.astype(jnp.uint32))
    bits = threefry(at_position, jnp.uint32(0), draw.astype(jnp.uint32))[0]
    # 24 bits are what a float32 below 1 holds: rounding up to 1 would reject what is certain.
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def gumbel_rows(key: Array | np.ndarray, positions: Array, vocab: VocabShard, draw: Array | int = 0) -> Array:
    """Standard Gumbel noise of every local column at absolute positions, int32 [T]: float32 [T, V_local], finite.

    `key` is from `seed_key`; `draw`, int32 [] or [T], makes several independent draws at one position.
    """
    return gumbel_at(key, positions, vocab.ids()[None], draw)


@jax.jit  # traced once for all programs: the kernels in use change nothing here
def gumbel_at(key: Array | np.ndarray, positions: Array, ids: Array, draw: Array | int = 0) -> Array:
    """The noise of `gumbel_rows` at chosen token ids, int32 [T or 1, C]: float32 [T, C]."""
    with named_scope("sampling/noise"):
        zero = jnp.uint32(0)
        seed = jnp.asarray(key, jnp.uint32)
        at_position = threefry((seed[0], seed[1]), zero, positions.astype(jnp.uint32)[:, None])
        which = jnp.broadcast_to(jnp.asarray(draw, jnp.uint32), positions.shape)[:, None]
        return gumbel_from_bits(threefry(at_position, which, ids.astype(jnp.uint32))[0])


def gumbel_from_bits(bits: Array) -> Array:
    """Map uniform 32-bit words, uint32, to standard Gumbel values by inversion: float32 between -2.82 and 22.88.

    Large values come from small w = (bits + 1/2) / 2**32, which float32 represents to full relative precision. So the
    upper tail, which decides draws, is resolved to 2**-32. w is kept below 1, which cuts the lower tail at -2.81.
    """
    w = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-w))


def threefry(key: tuple[Array, Array], high: Array, low: Array) -> tuple[Array, Array]:
    """One block of threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    `threefry(key, 0, n)` is `jax.random.fold_in(key, n)`, bit for bit, under JAX's threefry generator. It is written
    out because neither JAX's settings nor its versions may change what a seed means. One fused expression is also twice
    as fast on CPU as a vmapped `fold_in`. All words are uint32 and broadcast.
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = high + words[0], low + words[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ (y << distance | y >> (32 - distance))
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
