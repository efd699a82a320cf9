"""Is speculation lossless here? A method against plain decoding, token by token.

Verification of many rows adds in another order than decoding of one: logits differ in their last bits, and exact or
near ties may flip. A difference between two outputs is therefore judged by its *margin*. Plain decoding scores the
common text once more, one token at a time. The margin is the least movement of two scores against each other that makes
the other token come out. Within rounding it is a tie; beyond, it is a fault of the method. After a tie the rest of the
method's text is judged against plain decoding of that same text, so a tie hides no later fault.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from jaxspec.check.distribution import DEPTH, Decoder, check_distribution, distribution_samplings, draw_many
from jaxspec.check.reference_decoder import Cuts, Floats, ReferenceDecoder, Row, choice, margin, rounding
from jaxspec.config import SamplingParams, StructuredOutputs
from jaxspec.errors import ConfigError
from jaxspec.llm import internals

# More ties per token than this are no accident. Added noise of rounding's size flips fewer than 0.03 % of tokens in
# float32 and 0.9 % in bfloat16.
TIE_SHARE = {"float32": 0.001, "bfloat16": 0.02}

Verdict = Literal["equal", "tie", "different"]
# Told the kind of work and how much of it there is; called after each piece.
Advance = Callable[[str, int], None]


class PlainDistribution:
    """Plain decoding's distribution after texts with a common prompt: a `ScoreFn` and an `EdgeFn`."""

    def __init__(self, reference: ReferenceDecoder, prompt: Sequence[int], sampling: SamplingParams):
        """Bind; rows are computed when asked for, and kept. Raises `ConfigError` for temperature 0."""
        if sampling.temperature == 0:
            raise ConfigError("temperature 0 has no distribution to test; compare tokens instead")
        self._reference, self._prompt, self._sampling = reference, tuple(prompt), sampling
        self._rows: dict[tuple[int, ...], Row] = {}

    def __call__(self, text: tuple[int, ...]) -> Floats:
        """Log-probabilities `[V]` of the token after `text`, the prompt included."""
        return self._row(text).log_probs

    def edge(self, text: tuple[int, ...], token: int) -> bool:
        """Whether a cut removes `token` after `text` by no more than rounding."""
        row = self._row(text)
        if not 0 <= token < len(row.logits):
            return False
        return bool(Cuts(row, self._sampling).kept(rounding(row, self._sampling, self._reference.dtype))[1][token])

    def _row(self, text: tuple[int, ...]) -> Row:
        if text not in self._rows:
            start = len(self._prompt)
            for end, row in enumerate(self._reference.rows(self._prompt, text[start:], self._sampling), start):
                self._rows[text[:end]] = row
        return self._rows[text]


class RememberedDecoder:
    """A decoder that answers the same question once: plain texts serve the comparison with every method."""

    def __init__(self, decoder: Decoder):
        """Bind; nothing is decoded yet."""
        self._decoder = decoder
        self._answers: dict[Any, tuple[int, ...]] = {}

    def generate(self, prompt: Sequence[int], sampling: SamplingParams) -> Any:
        key = tuple(prompt), describe(sampling), sampling.max_tokens
        if key not in self._answers:
            self._answers[key] = _decode(self._decoder, prompt, sampling)
        return SimpleNamespace(token_ids=self._answers[key])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt decoded twice: by plain decoding and by a method."""

    prompt: int  # index of the prompt
    sampling: SamplingParams  # of both
    expected: tuple[int, ...]  # tokens of plain decoding
    got: tuple[int, ...]  # tokens of the method
    equal: int  # how many leading tokens agree
    verdict: Verdict  # "tie" if every difference is within rounding
    ties: int = 0  # positions where the method's token is not plain decoding's choice, but within rounding of it
    position: int | None = None  # index, in the output, of the difference that decides the verdict; None without one
    expected_token: int | None = None  # plain decoding's choice there; None after its end
    got_token: int | None = None  # the method's token there; None after its end
    # Of `got_token`, in units of processed scores (logits over the temperature).
    margin: float | None = None  # inf for an impossible token, None where a text ended
    eps: float | None = None  # largest margin of a tie there, in the same units


@dataclasses.dataclass(frozen=True)
class VerdictCounts:
    """Comparisons by verdict, tokens of the method, ties among them, and whether the ties are too many for chance."""

    prompts: int
    equal: int
    tie: int
    different: int
    tokens: int
    ties: int
    suspicious: bool


@dataclasses.dataclass(frozen=True)
class CheckSize:
    """How much one check decodes."""

    max_tokens: int  # of an answer
    max_prompts: int
    samples: int  # draws per distribution test
    every_sampling: bool  # all `default_samplings` and both distribution tests; else the first and last, and one test


QUICK = CheckSize(max_tokens=32, max_prompts=2, samples=200, every_sampling=False)
FULL = CheckSize(max_tokens=64, max_prompts=8, samples=1000, every_sampling=True)


def default_samplings(max_tokens: int = 64, seed: int = 0) -> list[SamplingParams]:
    """Greedy, greedy with a repetition penalty, plain sampling, and sampling with every processor at once."""
    return [
        SamplingParams(max_tokens),
        SamplingParams(max_tokens, repetition_penalty=1.3),
        SamplingParams(max_tokens, temperature=1.0, seed=seed),
        SamplingParams(
            max_tokens, temperature=0.7, top_p=0.9, top_k=50, min_p=0.02, seed=seed,
            frequency_penalty=0.3, presence_penalty=0.2,
        ),
    ]  # fmt: skip


def check_method(
    plain: Decoder, speculative: Any, prompts: Sequence[Sequence[int]], size: CheckSize, seed: int,
    reference: ReferenceDecoder, advance: Advance = lambda what, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Check an `LLM`, `speculative`, token by token, and by its distribution where it promises only that.
    `seed` is of sampling, and of the first draw. `advance` is called after each comparison and each draw. Returns
    everything for tables and JSON: `method`, `settings`, `exact`, `tokens` (a row per sampling), `distribution`
    (likewise), `lossless`, and `seconds_per_token`, the median over comparisons.
    """
    method: Any = internals(speculative).engine.method
    by_tokens = method.exact == "tokens"
    samplings = default_samplings(size.max_tokens, seed)
    samplings = samplings if size.every_sampling else [samplings[0], samplings[-1]]
    samplings = [sampling for sampling in samplings if by_tokens or sampling.temperature == 0]
    tokens, distributions = [], []
    per_token, marks = [], [time.perf_counter()]
    for sampling in samplings:

        def step(total: int = len(prompts) * len(samplings)) -> None:
            marks.append(time.perf_counter())
            advance("prompts", total)

        compared = check_tokens(plain, speculative, prompts, [sampling], reference, step)
        spans = itertools.pairwise(marks[-len(compared) - 1 :])
        per_token += [(b - a) / max(1, len(c.got)) for (a, b), c in zip(spans, compared, strict=True)]
        counts = dataclasses.asdict(count_verdicts(compared, reference.dtype))
        tokens.append({"sampling": describe(sampling), **counts, "comparisons": compared})
    # The shortest prompt: every draw prefills it. A fully accepted round and the token after it.
    prompt, longest = min(prompts, key=len), method.max_path
    tests = [] if by_tokens else distribution_samplings(max(DEPTH, longest))[: 2 if size.every_sampling else 1]
    for sampling in tests:
        exact, draws = PlainDistribution(reference, prompt, sampling), []
        for draw in draw_many(speculative, prompt, sampling, size.samples, seed):
            draws.append(draw)
            advance("draws", len(tests) * size.samples)
        result = dataclasses.asdict(check_distribution(exact, prompt, draws, edge_fn=exact.edge))
        # Too few rounds got there, or none told how far it got: no verdict on these.
        untested = [depth for depth in range(1, longest) if depth not in result["after"]]
        where = {"sampling": describe(sampling), "prompt": [*prompts].index(prompt), "untested": untested}
        distributions.append({**where, **result})
    faulty = any(row["different"] for row in tokens) or any(r["verdict"] == "different" for r in distributions)
    return {
        "method": method.name, "settings": dataclasses.asdict(method), "exact": method.exact, "tokens": tokens,
        "distribution": distributions, "lossless": not faulty, "seconds_per_token": statistics.median(per_token),
    }  # fmt: skip


def check_tokens(
    plain: Any, method: Decoder, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams] | None = None,
    reference: ReferenceDecoder | None = None, progress: Callable[[], None] = lambda: None,
) -> list[Comparison]:  # fmt: skip
    """Decode every prompt with both and compare token by token; for methods that are exact for each seed.
    `plain` is an `LLM`, or any decoder with a `reference`, by default one made of `plain`. `samplings` None is
    `default_samplings`. Returns one comparison per prompt and sampling, prompts in the inner loop; `progress` is called
    after each. Raises `ConfigError` for temperature > 0 without a seed, and for a prompt that does not fit.
    """
    samplings = default_samplings() if samplings is None else samplings
    for sampling in samplings:
        if sampling.temperature > 0 and sampling.seed is None:
            raise ConfigError(f"sampling without a seed cannot be compared token by token: {describe(sampling)}")
    reference = reference or ReferenceDecoder(internals(plain).target, internals(plain).params.target)
    comparisons = []
    for sampling in samplings:
        for index, prompt in enumerate(prompts):
            expected, got = (_decode(llm, prompt, sampling) for llm in (plain, method))
            comparisons.append(_compare(reference, index, list(prompt), sampling, expected, got))
            progress()
    return comparisons


def compare_shaped(
    plain: Decoder, method: Decoder, prompts: Sequence[Sequence[int]], shape: StructuredOutputs, max_tokens: int,
    seed: int,
) -> dict[str, int]:  # fmt: skip
    """How many texts under a shape, greedy and at temperature 1, equal plain decoding's under the same shape."""
    samplings = [SamplingParams(max_tokens, temperature=t, seed=seed, structured_outputs=shape) for t in (0.0, 1.0)]
    pairs = [(prompt, sampling) for prompt in prompts for sampling in samplings]
    return {"texts": len(pairs), "equal": sum(_decode(plain, *pair) == _decode(method, *pair) for pair in pairs)}


def count_verdicts(comparisons: Sequence[Comparison], dtype: str = "float32") -> VerdictCounts:
    """Count verdicts; more than one tie, and more than `TIE_SHARE[dtype]` per token, is suspicious."""
    verdicts = [c.verdict for c in comparisons]
    equal, tie, different = (verdicts.count(verdict) for verdict in ("equal", "tie", "different"))
    tokens, ties = sum(len(c.got) for c in comparisons), sum(c.ties for c in comparisons)
    suspicious = ties > 1 and ties > TIE_SHARE[dtype] * tokens
    return VerdictCounts(len(comparisons), equal, tie, different, tokens, ties, suspicious)


def estimate_full(entries: Sequence[Mapping[str, Any]], setup_s: float, methods: Sequence[Any]) -> float:
    """Seconds that a check of these methods (classes) at `FULL` size takes, by the `entries` of a smaller one.
    `setup_s` is of compiling a method.
    """
    per_token = max(entry["seconds_per_token"] for entry in entries)
    texts = len(methods) * FULL.max_prompts * len(default_samplings()) * FULL.max_tokens
    # A draw costs a prefill and a round or two: about five tokens.
    draws = sum(cls().exact == "distribution" for cls in methods) * 2 * FULL.samples * 5
    return len(methods) * setup_s + (texts + draws) * per_token


def describe(sampling: SamplingParams) -> str:
    """The settings that are not default, in a few words: "greedy", "temperature=0.7 top_p=0.9 seed=1"."""
    words = [
        f"{field.name}={getattr(sampling, field.name)}"
        for field in dataclasses.fields(sampling)
        if field.name not in ("max_tokens", "ignore_eos") and getattr(sampling, field.name) not in (field.default, ())
    ]
    return " ".join(words if sampling.temperature > 0 else ["greedy", *words])


def _decode(llm: Decoder, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    return tuple(int(token) for token in llm.generate(list(prompt), sampling).token_ids)


def _compare(
    reference: ReferenceDecoder, index: int, prompt: list[int], sampling: SamplingParams,
    expected: tuple[int, ...], got: tuple[int, ...],
) -> Comparison:  # fmt: skip
    pairs = zip(expected, got, strict=False)
    equal = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(got)))
    base = Comparison(index, sampling, expected, got, equal, "equal")
    if expected == got:
        return base
    if equal in (len(expected), len(got)):
        # Where a text ends depends on its tokens alone, and these agree.
        one, other = (text[equal] if equal < len(text) else None for text in (expected, got))
        return dataclasses.replace(base, verdict="different", position=equal, expected_token=one, got_token=other)
    found = base
    for position, row in enumerate(reference.rows(prompt, got[:-1], sampling)):
        if position < equal:
            continue
        # At the first difference plain decoding's own token is judged too: it has to be what its scores say.
        chosen = expected[position] if position == equal else choice(row, sampling)
        if chosen == got[position]:
            continue
        gap = max(margin(row, token, sampling) for token in (chosen, got[position]))
        eps = rounding(row, sampling, reference.dtype)
        verdict = "tie" if gap <= eps else "different"
        if verdict == "different" or found.position is None:
            found = dataclasses.replace(
                base, verdict=verdict, ties=found.ties, position=position, expected_token=chosen,
                got_token=got[position], margin=gap, eps=eps,
            )  # fmt: skip
        if verdict == "different":
            return found
        found = dataclasses.replace(found, ties=found.ties + 1)
    return found
