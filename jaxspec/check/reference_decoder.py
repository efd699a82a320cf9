"""Plain decoding of a given text, one token at a time, with every score kept: the judge of differences.
The *margin* of a token is the least movement of two scores against each other that makes it plain decoding's choice.
Letter: V the real vocabulary, without padding.
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
from jaxspec.methods.core.sequence import ModelSequence, cache_slots
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import vocab_logits
from jaxspec.offload.executor import TargetPass, make_sequence
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import compile_programs
from jaxspec.sampling.choose import gumbel_rows
from jaxspec.sampling.processors import GREEDY, History, clean, history_shapes, penalise, process
from jaxspec.sampling.request import make_request, request_shapes

# Rounding, in units in the last place of the largest logit. Measured on a 30-layer model with logits up to 33: logits
# of one row and of many differ by up to 10 units in float32, by 0.7 in bfloat16; a gap between two by twice that.
ROUNDING_ULPS = {"float32": 64, "bfloat16": 4}

Floats = npt.NDArray[np.floating]


@dataclasses.dataclass(frozen=True)
class Row:
    """Scores of plain decoding at one position; float32 [V] each."""

    logits: Floats  # raw, -inf where not a number
    penalised: Floats  # after penalties and bias
    log_probs: Floats  # after the whole processor; -inf where a token is removed; temperature 0 is read as 1
    noise: Floats  # Gumbel noise of the position


class ReferenceDecoder:
    """Plain decoding of a given text: prefill of the prompt, then one token at a time, with every score kept."""

    def __init__(self, target: Placement, params: Params):
        """Bind to a model placed on any mesh; nothing is compiled before the first use."""
        self.dtype = str(target.dtype)  # of weights and cache, "float32" or "bfloat16"
        self._target, self._params = target, params
        self._capacity = 0
        self._sequence: ModelSequence | None = None
        self._score: Any = None

    def rows(self, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> Iterator[Row]:
        """Yield the row of each of `len(tokens) + 1` positions after the prompt, which has at least one token.
        `tokens` is followed, whatever the scores say. No seed is read as 0. Raises `ConfigError` if prompt and tokens
        exceed the model's context.
        """
        target, size = self._target, self._target.cfg.vocab_size
        sequence = self._prepare(len(prompt) + len(tokens))
        request = make_request(sampling, sampling.seed or 0, size, target.padded_vocab, len(prompt))
        request = _place(request, request_shapes(target))
        # Kept on the host, so that the device's own count for penalties is checked too.
        seen, counts = np.zeros(target.padded_vocab, bool), np.zeros(target.padded_vocab, np.int32)
        seen[np.asarray(prompt)] = True
        state, _ = sequence.prefill(self._params, sequence.start(0, None), np.asarray(prompt[:-1], np.int32))
        token = prompt[-1]
        for following in [*tokens, None]:
            # Copies: placing an array on a CPU may share its memory.
            history = _place(History(seen.copy(), counts.copy()), history_shapes(target))  # pyright: ignore[reportArgumentType]
            state, scores = self._score(self._params, state, np.int32(token), history, request)
            yield Row(*(np.asarray(array)[:size] for array in scores))
            if following is not None:
                token = following
                seen[token] = True
                counts[token] += 1

    def _prepare(self, tokens: int) -> ModelSequence:
        """Compile for texts of `tokens` tokens, unless a capacity that holds them is compiled already."""
        target = self._target
        limit = target.cfg.max_context
        if tokens > limit:
            raise ConfigError(f"{tokens} tokens of prompt and output exceed the model's context of {limit}")
        if self._sequence is not None and tokens <= self._capacity:
            return self._sequence
        self._capacity = FIRST_CAPACITY
        while self._capacity < min(tokens, limit):
            self._capacity *= CAPACITY_GROWTH
        self._capacity = min(self._capacity, limit)
        cfg, vocab = target.cfg, target.vocab
        sequence = make_sequence(target, cache_slots(self._capacity + 1, 0), "check")

        def begin(length, token, history, request):
            return token[None], length[None], jnp.ones((1, 1), bool), None

        def finish(params, state, hidden, cache, token, history, request):
            position, logits = state.cache.length[None], vocab_logits(params, cfg, hidden)
            processors = request.processors
            scores = (
                clean(logits, vocab),
                penalise(logits, processors, history.row, vocab, position + 1),
                process(logits, processors, history.row, vocab, position + 1),
                gumbel_rows(request.key, position + 1, vocab),
            )
            state = dataclasses.replace(state, cache=commit_rows(cache, jnp.int32(1)))
            return state, tuple(array[0] for array in scores)

        args = [target.array((), jnp.int32), history_shapes(target), request_shapes(target)]
        row = target.array((target.padded_vocab,), jnp.float32, TENSOR_AXIS)
        out = (sequence.state, (row,) * 4)
        self._score = TargetPass("check score", sequence, 1, args, out, begin=begin, finish=finish)
        compile_programs([*sequence.programs, *self._score.programs], GREEDY)
        self._sequence = sequence
        return sequence


def _place(tree: Any, shapes: Any) -> Any:
    return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), tree, shapes)


def margin(row: Row, token: int, sampling: SamplingParams) -> float:
    """The margin of a token: 0 if it is plain decoding's choice, inf if it can never be.
    At temperature 0 it is the largest penalised logit less the token's. Above, it is the smallest gap that makes the
    token possible: scores (penalised logits over the temperature) move against each other by at most the gap. The token
    then survives top-k, top-p and min-p, and has the largest score plus noise of all sure survivors.
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
    """The largest margin of a tie: `ROUNDING_ULPS` of the largest logit, over the temperature if not 0."""
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
    """A row's scores in descending order, and the tokens that cuts keep when scores move by up to `gap`."""

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
        # For each token, how many are above it for certain, and how many may be (itself too unless the gap is 0).
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
