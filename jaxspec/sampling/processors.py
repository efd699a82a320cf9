"""The one logits processor: penalties, bias, temperature, top-k, top-p, min-p.

The order of the steps is in docs/algorithms.md, "One logits processor".

Every knob is a traced value, so that one compiled program serves all sampling parameters. Nothing is sorted and the
vocabulary is never gathered: the cuts of top-k and top-p are found by exact bisection over the bits of the scores.
Counts and masses are integers, so a cut depends neither on the order of summation nor on how the vocabulary is split.

On a CPU one program serves every request: a branch on the device's data costs nothing there. The host of an accelerator
waits for each such branch. So it picks a program that was compiled for the kind of request, its variant, in which every
branch of `decide` is taken already.

Letters: T rows, V_local columns of this device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.vocab import VocabShard, sum_rows
from jaxspec.pytree import pytree, static
from jaxspec.runtime.placement import Placement

Result = TypeVar("Result")

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
# A mass of 1 (the most probable token) in fixed point: 12 + 13 + 13 bits in three words. Rounding errs by 2**-39 a
# token, and no word overflows below 2**19 tokens.
_MASS_BITS = (12, 13, 13)
_MOST_TOKENS = 2**19


@dataclasses.dataclass(frozen=True)
class Variant:
    """The sampling steps that a request needs; static, so that it keys compiled programs.

    Attributes:
      draws: whether tokens are drawn: a temperature above 0.
      penalised: whether there are penalties, biases, or tokens that are impossible before `min_tokens`.
      top_k: whether there is a cut by top-k.
      top_p: whether there is a cut by top-p.
      logprob: whether the log-probability of each token is wanted.
      ranked: whether the most probable tokens at each place are wanted.
    """

    draws: bool = False
    penalised: bool = False
    top_k: bool = False
    top_p: bool = False
    logprob: bool = False
    ranked: bool = False


GREEDY = Variant()


def find_variant(sampling: SamplingParams) -> Variant:
    """The variant of checked sampling parameters."""
    penalties = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return Variant(
        draws=sampling.temperature > 0,
        penalised=bool(penalties or sampling.logit_bias or (sampling.stop_token_ids and sampling.min_tokens)),
        top_k=sampling.top_k > 0,
        top_p=sampling.top_p < 1,
        logprob=sampling.wants_logprobs,
        ranked=sampling.num_logprobs > 0,
    )


def decide(known: bool | None, traced: ArrayLike, yes: Callable[[], Result], no: Callable[[], Result]) -> Result:
    """One of two results, which the program computes alone where the variant is `known`, else by a branch on `traced`.

    Args:
      known: of the request's variant; None where the program serves every request.
      traced: bool [], the same as data.
      yes, no: make the results.
    """
    if known is not None:
        return yes() if known else no()
    branch: Array = lax.cond(traced, yes, no)
    return branch  # pyright: ignore[reportReturnType]


@pytree
class Processors:
    """Sampling parameters as traced values."""

    temperature: ArrayLike  # float32; 0 is greedy
    top_k: ArrayLike  # int32; 0 keeps all
    top_p: ArrayLike  # float32 in (0, 1]; 1 keeps all
    min_p: ArrayLike  # float32 in [0, 1]; 0 keeps all
    repetition: ArrayLike  # float32 above 0; 1 is off
    frequency: ArrayLike  # float32; 0 is off
    presence: ArrayLike  # float32; 0 is off
    bias: ArrayLike  # float32 [V_local], added to logits; -inf bans
    ends: ArrayLike  # bool [V_local], tokens that end the text; impossible before `first_end`
    first_end: ArrayLike  # int32, lowest absolute position that one of `ends` may have
    # bool; False promises that penalties, bias and `first_end` are all off, so that they are skipped.
    penalised: ArrayLike
    want_logprob: ArrayLike  # bool, whether log-probabilities are reported, of the chosen tokens and of others
    num_logprobs: ArrayLike  # int32, most probable tokens to report at each place; above 0 only with `want_logprob`
    # What of these the program is compiled for; None for a program that serves every request.
    variant: Variant | None = static(default=None)

    def knows(self, name: str) -> bool | None:
        """A field of the variant, by name; None where there is none."""
        return None if self.variant is None else getattr(self.variant, name)


@pytree
class History:
    """Which tokens a text contains, for penalties; columns are split like the logits'."""

    seen: Array  # bool [V_local], tokens in prompt or output
    counts: Array  # int32 [V_local], occurrences in the output

    def row(self) -> "History":
        """The same with a leading axis of one row."""
        return jax.tree.map(lambda leaf: leaf[None], self)


# What penalties see of T rows: a `History` with a leading axis, T or 1. It is made where a penalty looks and nowhere
# else: of a large vocabulary even zeros take time in every token.
Histories = Callable[[], History]


def from_sampling(params: SamplingParams, vocab_size: int, padded_size: int, prompt_tokens: int = 0) -> Processors:
    """Turn checked sampling parameters into the processor's arrays.

    `padded_size` counts the columns of all devices, padding included. `min_tokens` counts from the prompt's end, at
    `prompt_tokens`. The leaves are numpy arrays; `bias` and `ends` are [padded_size], to be placed by
    `processor_specs`. Raises `ConfigError` where a bias or a stop token is outside the vocabulary, or no token is
    possible.
    """
    if padded_size > _MOST_TOKENS:
        raise ConfigError(f"a vocabulary of {padded_size} exceeds the {_MOST_TOKENS} tokens that sampling supports")
    bias = np.zeros(padded_size, np.float32)
    for token, value in (params.logit_bias or {}).items():
        if token >= vocab_size:
            raise ConfigError(f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens")
        bias[token] = np.clip(value, -np.inf, _LARGEST)
    ends = np.zeros(padded_size, bool)
    for token in params.stop_token_ids or ():
        if token >= vocab_size:
            raise ConfigError(f"stop_token_ids names token {token}, but the vocabulary has {vocab_size} tokens")
        ends[token] = True
    delayed = params.min_tokens > 0 and ends.any()
    if delayed and (np.isneginf(bias) | ends)[:vocab_size].all():
        raise ConfigError("logit_bias and stop_token_ids leave no token possible before min_tokens")
    if np.isneginf(bias[:vocab_size]).all():
        raise ConfigError(f"logit_bias bans all {vocab_size} tokens of the vocabulary; nothing could be generated")
    penalties = params.repetition_penalty != 1, params.frequency_penalty, params.presence_penalty
    return Processors(
        temperature=np.float32(params.temperature),
        top_k=np.int32(min(max(params.top_k, 0), _MOST_TOKENS)),
        # Values above 0 that float32 rounds to 0 must not become "keep nothing" and a division by 0.
        top_p=np.float32(max(params.top_p, _SMALLEST)),
        min_p=np.float32(params.min_p),
        repetition=np.float32(np.clip(params.repetition_penalty, _SMALLEST, _LARGEST)),
        frequency=np.float32(params.frequency_penalty),
        presence=np.float32(params.presence_penalty),
        bias=bias,
        ends=ends,
        first_end=np.int32(prompt_tokens + params.min_tokens if delayed else 0),
        penalised=np.bool_(any(penalties) or bias.any() or delayed),
        want_logprob=np.bool_(params.wants_logprobs),
        num_logprobs=np.int32(params.num_logprobs),
    )


def processor_specs(axis_name: str | None) -> Processors:
    """Partition specs of `Processors`: what has columns is split over `axis_name`, the scalars are replicated."""
    columns = ("bias", "ends")
    names = [name for name in Processors.__dataclass_fields__ if name != "variant"]
    return Processors(**{n: PartitionSpec(axis_name) if n in columns else PartitionSpec() for n in names})  # pyright: ignore


def history_shapes(placement: Placement) -> History:
    """Shapes of a token history on a model's mesh, split like the vocabulary."""
    size = (placement.padded_vocab,)
    seen, counts = placement.array(size, jnp.bool_, TENSOR_AXIS), placement.array(size, jnp.int32, TENSOR_AXIS)
    return History(seen=seen, counts=counts)


def init_history(vocab: VocabShard) -> History:
    """The history of an empty text."""
    return History(seen=jnp.zeros(vocab.local_size, bool), counts=jnp.zeros(vocab.local_size, jnp.int32))


def update_history(history: History, tokens: Array, valid: Array, vocab: VocabShard, *, generated: bool) -> History:
    """Add tokens, int32 [N] global ids, to a history; those that are not valid are ignored, whatever their id.

    `generated` is False for tokens of the prompt, which frequency and presence penalties do not count.
    """
    column = jnp.where(valid, vocab.local(tokens), vocab.local_size)
    seen = history.seen.at[column].set(True, mode="drop")
    counts = history.counts.at[column].add(1, mode="drop") if generated else history.counts
    return History(seen=seen, counts=counts)


def extend_history(history: History, tokens: Array, count: Array, vocab: VocabShard) -> Histories:
    """The history with the first `count` of generated `tokens`, int32 [P], for one row.

    A loop that carried a history would copy it in every turn. It carries its tokens instead, and asks for this.
    """
    return lambda: update_history(history, tokens, jnp.arange(tokens.size) < count, vocab, generated=True).row()


def allow(logits: Array, masks: Array, vocab: VocabShard) -> Array:
    """Logits [T, V_local] with -inf for the tokens that a shape does not allow, before any other step.

    `masks`, uint32 [T, words], have a bit for each column of all devices: token t is bit t % 32 of word t // 32.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flat = bits.reshape(masks.shape[0], -1)
    return jnp.where(lax.dynamic_slice_in_dim(flat, vocab.ids()[0], vocab.local_size, axis=1) > 0, logits, -jnp.inf)


def clean(logits: Array, vocab: VocabShard) -> Array:
    """Make logits [T, V_local] safe to subtract: NaN and padded ids become -inf, +inf the largest float32.

    A NaN is never chosen while another token is possible. If no token is, every choice in this package is id 0.
    """
    tidied = tidy(logits)
    return jnp.where(vocab.ids() < vocab.vocab_size, tidied, -jnp.inf) if vocab.is_padded else tidied


def tidy(x: Array) -> Array:
    """NaN becomes -inf, +inf the largest float32."""
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, _LARGEST))


def penalise(
    logits: Array, processors: Processors, histories: Histories, vocab: VocabShard, positions: Array | None = None
) -> Array:
    """Apply penalties, then bias (step 1), and `clean` the result: float32 [T, V_local], -inf or finite.

    `histories` hold prompt, output and each row's own path; they are made here. `positions`, int32 [T], are the
    absolute positions of the tokens that the rows choose; None where `first_end` is off.
    """
    history = histories()
    seen, counts = history.seen, history.counts
    z = jnp.where(logits > 0, logits / processors.repetition, logits * processors.repetition)
    z = jnp.where(seen, z, logits)
    z = z - (processors.frequency * counts.astype(jnp.float32) + processors.presence * (counts > 0))
    z = z + vocab.narrow(jnp.asarray(processors.bias))
    if positions is not None:
        early = positions[:, None] < processors.first_end
        z = jnp.where(early & vocab.narrow(jnp.asarray(processors.ends)), -jnp.inf, z)
    return clean(z, vocab)


def process(
    logits: Array, processors: Processors, histories: Histories, vocab: VocabShard, positions: Array | None = None
) -> Array:
    """Log-probabilities of the next token, float32 [T, V_local], which tokens are drawn by.

    Removed tokens are -inf; a row in which no token is possible is -inf everywhere. Temperature 0 is read as 1 here:
    greedy choice is `choose`'s. Arguments are those of `penalise`.
    """
    scores = score(logits, processors, histories, vocab, positions)
    return scores - log_mass(scores, vocab)


def score(
    logits: Array, processors: Processors, histories: Histories, vocab: VocabShard, positions: Array | None = None
) -> Array:
    """`process` up to a constant per row: the most probable token scores 0, removed tokens -inf.

    A draw from the scores does not depend on the rounding of the normalising sum.
    """
    with jax.named_scope("sampling/process"):
        return cut(shift(adjust(logits, processors, histories, vocab, positions), processors, vocab), processors, vocab)


def adjust(
    logits: Array, processors: Processors, histories: Histories, vocab: VocabShard, positions: Array | None = None
) -> Array:
    """`penalise` where there is anything to apply, else `clean`."""
    return decide(
        processors.knows("penalised"),
        processors.penalised,
        lambda: penalise(logits, processors, histories, vocab, positions),
        lambda: clean(logits, vocab),
    )


@functools.partial(jax.jit, static_argnames="vocab")  # see `gumbel_at`
def cut(scores: Array, processors: Processors, vocab: VocabShard) -> Array:
    """Scores [T, V_local], all <= 0, with -inf for what top-k, top-p and min-p remove."""
    lowest = decide(
        processors.knows("top_k"),
        jnp.asarray(processors.top_k) > 0,
        lambda: cut_top_k(scores, processors.top_k, vocab),
        lambda: jnp.full((scores.shape[0], 1), -_LARGEST),
    )
    lowest = decide(
        processors.knows("top_p"),
        jnp.asarray(processors.top_p) < 1,
        lambda: cut_top_p(jnp.where(scores >= lowest, scores, -jnp.inf), processors.top_p, vocab),
        lambda: lowest,
    )
    keep = (scores >= lowest) & (jnp.exp(scores) >= processors.min_p)
    return jnp.where(keep, scores, -jnp.inf)


def shift(z: Array, processors: Processors, vocab: VocabShard) -> Array:
    """Scores z / T with the row's maximum moved to 0, so that exp never overflows, however small T is.

    `z` is [T, V_local], -inf or finite; the scores are <= 0. A row of -inf stays one.
    """
    top = vocab.row_max(z)
    temperature = jnp.where(processors.temperature == 0, 1.0, processors.temperature)
    return (z - jnp.maximum(top, -_LARGEST)) / temperature


def log_mass(scores: Array, vocab: VocabShard) -> Array:
    """Log of the sum of exp(score), [T, 1]; 0 for a row of -inf, where any other row has at least 0."""
    return jnp.log(jnp.maximum(vocab.sum(jnp.exp(scores).sum(axis=-1, keepdims=True)), 1.0))


def cut_top_k(scores: Array, k: ArrayLike, vocab: VocabShard) -> Array:
    """The k-th largest of scores [T, V_local], all <= 0; `k` is at least 1.

    The result is float32 [T, 1]: the lowest finite value where fewer than k tokens are possible.
    """
    one = jnp.ones(scores.shape, jnp.int32)
    return _cut(scores, (one,), lambda count: count[..., 0] < k, vocab)


def cut_top_p(scores: Array, top_p: ArrayLike, vocab: VocabShard) -> Array:
    """The smallest score kept by top-p, float32 [T, 1], of scores [T, V_local], all <= 0; `top_p` is below 1.

    A token is kept iff the tokens above it hold less than top_p of the mass; the most probable one always is.
    """
    words = fixed_point(jnp.exp(scores))
    enough = top_p * from_fixed_point(vocab.sum(sum_rows(words)))
    return _cut(scores, words, lambda mass: from_fixed_point(mass) < enough, vocab)


def fixed_point(mass: Array) -> tuple[Array, ...]:
    """Split masses in [0, 1] into three words of 12, 13 and 13 bits, uint32, most significant first."""
    high, middle, low = _MASS_BITS
    x = mass * 2.0**high
    a = jnp.floor(x)
    x = (x - a) * 2.0**middle
    b = jnp.floor(x)
    c = jnp.round((x - b) * 2.0**low)
    return tuple(word.astype(jnp.uint32) for word in (a, b, c))


def from_fixed_point(words: Array) -> Array:
    """Value of summed words, uint32 [..., 3], float32 [...]: a function of the exact sum alone."""
    _, middle, low = _MASS_BITS
    a, b, c = words[..., 0], words[..., 1], words[..., 2]
    b = b + (c >> low)
    a = a + (b >> middle)
    b, c = b & (2**middle - 1), c & (2**low - 1)
    return a.astype(jnp.float32) + (b.astype(jnp.float32) + c.astype(jnp.float32) * 2.0**-low) * 2.0**-middle


def _cut(scores: Array, weights: Sequence[Array], admits: Callable[[Array], Array], vocab: VocabShard) -> Array:
    """The lowest score such that the weight of the tokens strictly above it is admitted, by search over float bits.

    Scores [T, V_local] are <= 0, so the bits of their absolute value order them: fewer is more probable, and 0 and -0
    are equal. `weights` are integers [T, V_local] each. `admits` maps summed weights [T, len(weights)] to bool [T]:
    true for nothing, false from some amount on. The result is float32 [T, 1], finite.
    """
    num_rows, num_weights = scores.shape[0], len(weights)
    size = lax.bitcast_convert_type(jnp.abs(scores), jnp.uint32)
    # A pass finds `bits` bits of the limit with 2**bits - 1 trials. On one device 2 cost the least work; many devices
    # pay for each pass with a collective.
    bits = 2 if vocab.num_shards == 1 else 4

    def refine(i: Array, limit: Array) -> Array:
        step = jnp.uint32(1) << (32 - bits * (i + 1)).astype(jnp.uint32)
        below = [size < (limit + digit * step)[:, None] for digit in range(1, 2**bits)]
        sums = vocab.sum(sum_rows([jnp.where(trial, weight, 0) for trial in below for weight in weights]))
        admitted = admits(jnp.moveaxis(sums.reshape(num_rows, len(below), num_weights), 1, 0))  # [trials, T]
        return limit + step * admitted.sum(axis=0, dtype=jnp.uint32)

    limit = lax.fori_loop(0, 32 // bits, refine, jnp.zeros(num_rows, jnp.uint32))
    largest = lax.bitcast_convert_type(jnp.float32(_LARGEST), jnp.uint32)
    return -lax.bitcast_convert_type(jnp.minimum(limit, largest), jnp.float32)[:, None]
