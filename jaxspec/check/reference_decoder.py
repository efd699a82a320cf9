"""Plain decoding of a given text, one token at a time, with every score kept: what a difference is judged by.

The *margin* of a token is by how much two scores would have to move against each other for it to be the one that plain
decoding chooses. Letter: V the real vocabulary, padding cut off.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxspec.config import SamplingParams
from jaxspec.engine import CAPACITY_GROWTH, FIRST_CAPACITY
from jaxspec.errors import ConfigError
from jaxspec.methods.core.chunks import CHUNKS, split_chunks, usable_chunks
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import KVCache, commit_rows, init_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program, compile_programs
from jaxspec.runtime.sharding import round_up
from jaxspec.sampling.noise import gumbel_rows
from jaxspec.sampling.processors import History, clean, penalise, process
from jaxspec.sampling.request import make_request

# What counts as rounding: units in the last place of the largest logit. Measured on a 30-layer model with logits up to
# 33: one row against many differ by up to 10 of them per logit in float32, by 0.7 in bfloat16; a gap has twice that.
ROUNDING_ULPS = {"float32": 64, "bfloat16": 4}

Floats = npt.NDArray[np.floating]


@dataclasses.dataclass(frozen=True)
class Row:
    """What plain decoding sees at one position; float32 [V] each.

    Attributes:
      logits: raw, -inf where not a number.
      penalised: after penalties and bias.
      log_probs: after the whole processor; -inf where a token is removed. Temperature 0 is read as 1.
      noise: Gumbel noise of the position.
    """

    logits: Floats
    penalised: Floats
    log_probs: Floats
    noise: Floats


class Scorer:
    """Plain decoding of a given text: prefill of the prompt, then one token at a time, with every score kept.

    Attributes:
      dtype: of weights and cache, "float32" or "bfloat16".
    """

    def __init__(self, target: Placement, params: Params):
        """Bind to a placed model; nothing is compiled before it is used.

        Args:
          target: the model that decides, on any mesh.
          params: its placed parameters.
        """
        self.dtype = str(target.dtype)
        self._target = target
        self._params = params
        self._slots = 0

    def rows(self, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> Iterator[Row]:
        """Yield the row of each of `len(tokens) + 1` positions behind the prompt, as far as the caller listens.

        Args:
          prompt: token ids, at least one.
          tokens: the continuation to follow, whatever the scores say.
          sampling: processors and seed; no seed is read as 0.

        Raises:
          ConfigError: prompt and tokens exceed the model's context.
        """
        target, size = self._target, self._target.cfg.vocab_size
        self._prepare(len(prompt) + len(tokens))
        request = self._place(make_request(sampling, sampling.seed or 0, size, target.padded_vocab), target.request())
        # Kept here and not on the device: what penalties count is checked, too.
        seen, counts = np.zeros(target.padded_vocab, bool), np.zeros(target.padded_vocab, np.int32)
        seen[np.asarray(prompt)] = True
        cache = self._create()
        for chunk, count in split_chunks(np.asarray(prompt[:-1], np.int32), self._slots):
            cache = self._fill[len(chunk)](self._params, cache, chunk, np.int32(count))
        token = prompt[-1]
        for following in [*tokens, None]:
            # Copies: placing an array on a CPU may share its memory.
            history = self._place(History(seen.copy(), counts.copy()), target.history())  # pyright: ignore[reportArgumentType]
            cache, scores = self._score(self._params, cache, np.int32(token), history, request)
            yield Row(*(np.asarray(array)[:size] for array in scores))
            if following is not None:
                token = following
                seen[token] = True
                counts[token] += 1

    def _prepare(self, tokens: int) -> None:
        """Compile for texts of `tokens` tokens, unless a capacity that holds them is compiled already."""
        limit = self._target.cfg.max_context
        if tokens > limit:
            raise ConfigError(f"{tokens} tokens of prompt and output exceed the model's context of {limit}")
        if tokens < self._slots:
            return
        capacity = FIRST_CAPACITY
        while capacity < tokens:
            capacity *= CAPACITY_GROWTH
        self._slots = round_up(min(capacity, limit) + 1, CHUNKS[0])
        self._compile()

    def _compile(self) -> None:
        target, slots = self._target, self._slots
        cfg, vocab, plan = target.cfg, target.vocab, target.plan
        cache, params, scalar = target.cache(slots), target.params(), target.array((), jnp.int32)

        def create():
            return init_cache(cfg, target.local_kv_heads, slots, target.dtype)

        def fill(params, cache, token, count):
            return prefill(params, cfg, token, count, cache)

        def score(params, cache: KVCache, token, history, request):
            position = cache.length[None]
            hidden, cache = forward(params, cfg, token[None], position, cache, jnp.ones((1, 1), bool))
            logits = vocab_logits(params, hidden)
            processors, seen, counts = request.processors, history.seen[None], history.counts[None]
            scores = (
                clean(logits, vocab),
                penalise(logits, processors, seen, counts, vocab),
                process(logits, processors, seen, counts, vocab),
                gumbel_rows(request.key, position + 1, vocab),
            )
            return commit_rows(cache, jnp.int32(1)), tuple(array[0] for array in scores)

        self._create = Program("check create", create, plan, [], cache)
        self._fill = {}
        for size in usable_chunks(slots):
            args = [params, cache, target.array((size,), jnp.int32), scalar]
            self._fill[size] = Program(f"check prefill{size}", fill, plan, args, cache, donate=[1])
        args = [params, cache, scalar, target.history(), target.request()]
        row = target.array((target.padded_vocab,), jnp.float32, TENSOR_AXIS)
        self._score = Program("check score", score, plan, args, (cache, (row,) * 4), donate=[1])
        compile_programs([self._create, *self._fill.values(), self._score])

    @staticmethod
    def _place(tree: Any, shapes: Any) -> Any:
        return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), tree, shapes)


def margin(row: Row, token: int, sampling: SamplingParams) -> float:
    """How far a token is from being plain decoding's choice; 0 if it is, inf if it never can be.

    At temperature 0, the largest penalised logit less the token's. Above, the smallest gap such that, with scores
    (penalised logits over the temperature) moved against each other by no more than the gap, the token survives top-k,
    top-p and min-p and has the largest score plus noise of all tokens that certainly survive. Where no cut is near,
    that is the largest perturbed score less the token's.
    """
    if not 0 <= token < len(row.penalised) or math.isinf(row.penalised[token]):
        return math.inf
    if sampling.temperature == 0:
        return float(row.penalised.max() - row.penalised[token])
    cuts = Cuts(row, sampling)
    if cuts.allow(token, 0.0):
        return 0.0
    low, high = 0.0, 1e-6
    while not cuts.allow(token, high):
        low, high = high, 2 * high
        if math.isinf(high):
            return math.inf
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cuts.allow(token, middle) else (middle, high)
    return high


def rounding(row: Row, sampling: SamplingParams, dtype: str) -> float:
    """The margin that passes for rounding: `ROUNDING_ULPS` of the largest logit, over the temperature if not 0."""
    finite = row.logits[np.isfinite(row.logits)]
    largest = float(np.abs(finite).max(initial=0.0))
    # A repetition penalty scales errors as it scales logits.
    largest *= max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
    ulp = float(jnp.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
    return ROUNDING_ULPS[dtype] * ulp / (sampling.temperature or 1.0)


def choice(row: Row, sampling: SamplingParams) -> int:
    """Plain decoding's token at a row."""
    scores = row.penalised if sampling.temperature == 0 else row.log_probs + row.noise
    return int(np.argmax(scores))


class Cuts:
    """A row's scores in descending order, and what the cuts keep when scores move by up to `gap` against each other."""

    def __init__(self, row: Row, sampling: SamplingParams):
        """Sort the row's scores; the temperature must be above 0."""
        z = row.penalised.astype(np.float64)
        scores = (z - z.max()) / sampling.temperature
        self._order = np.argsort(-scores, kind="stable")
        self._scores = scores[self._order]
        self._mass = np.exp(self._scores)
        self._perturbed = scores + row.noise
        self._sampling = sampling

    def allow(self, token: int, gap: float) -> bool:
        """Whether the token can be the choice."""
        sure, maybe = self.kept(gap)
        best = self._perturbed[sure].max(initial=-math.inf)
        return bool(maybe[token]) and self._perturbed[token] + gap >= best

    def kept(self, gap: float) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Tokens that certainly survive the cuts and those that may, bool [V] each."""
        scores, mass, sampling = self._scores, self._mass, self._sampling
        # Tokens that are above each one for certain, and those that may be (itself among them, unless the gap is 0).
        above = np.searchsorted(-scores, -(scores + gap), side="left")
        about = np.searchsorted(-scores, -(scores - gap), side="left")
        self_counted = gap > 0
        growth = math.exp(min(gap, 600.0))
        sure = maybe = np.isfinite(scores)
        if sampling.top_k > 0:
            sure, maybe = sure & (about - self_counted < sampling.top_k), maybe & (above < sampling.top_k)
        if sampling.top_p < 1:
            sure_mass, maybe_mass = (np.concatenate([[0.0], np.cumsum(mass * kept)]) for kept in (sure, maybe))
            rest = maybe_mass[-1] - maybe_mass[above]
            may = sure_mass[above] < sampling.top_p * (sure_mass[above] + rest * growth)
            before = (maybe_mass[about] - mass * self_counted) * growth
            rest = sure_mass[-1] - sure_mass[about] + mass * self_counted
            sure, maybe = sure & (before < sampling.top_p * (before + rest)), maybe & may
        if sampling.min_p > 0:
            limit = math.log(sampling.min_p)
            sure, maybe = sure & (scores - gap >= limit), maybe & (scores + gap >= limit)
        result = np.zeros((2, len(scores)), bool)
        result[0, self._order], result[1, self._order] = sure, maybe
        return result[0], result[1]
