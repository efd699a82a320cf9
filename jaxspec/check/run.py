"""Is speculation lossless here? A method against plain decoding, token by token (ALGORITHMS 2.6).

Verifying many rows adds in another order than decoding one, so logits differ in their last bits and exact or near ties
may flip. A difference between two outputs is therefore judged by its *margin*: the text that both share is scored once
more by plain decoding, one token at a time, and the margin is by how much two scores would have to move against each
other for the other token to come out. Within rounding it is a tie; beyond, it is a fault of the method, never
"numerics". Behind a tie the method goes its own way: the rest of its text is judged against plain decoding of that same
text, so that no fault hides behind a tie.

Letter: V the real vocabulary, padding cut off.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxspec.check.distribution import Decoder
from jaxspec.check.reference_decoder import Cuts, Floats, Row, Scorer, choice, margin, rounding
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError

# Ties per token beyond which they are no accident: flips measured by adding noise of that size were below 0.03 % in
# float32 and 0.9 % in bfloat16 (ALGORITHMS 2.4).
TIE_SHARE = {"float32": 0.001, "bfloat16": 0.02}

Verdict = Literal["equal", "tie", "different"]


class PlainLaw:
    """Plain decoding's law behind texts that begin with one prompt: a `ScoreFn` and an `EdgeFn` for `check_law`."""

    def __init__(self, scorer: Scorer, prompt: Sequence[int], sampling: SamplingParams):
        """Bind; rows are computed when asked for, and kept.

        Raises:
          ConfigError: temperature 0, which has no law.
        """
        if sampling.temperature == 0:
            raise ConfigError("temperature 0 has no distribution to test; compare tokens instead")
        self._scorer = scorer
        self._prompt = tuple(prompt)
        self._sampling = sampling
        self._rows: dict[tuple[int, ...], Row] = {}

    def __call__(self, text: tuple[int, ...]) -> Floats:
        """Log-probabilities `[V]` of the token behind `text`, the prompt included."""
        return self._row(text).log_probs

    def edge(self, text: tuple[int, ...], token: int) -> bool:
        """Whether `token` is removed behind `text` by no more than rounding."""
        row = self._row(text)
        if not 0 <= token < len(row.logits):
            return False
        return bool(Cuts(row, self._sampling).kept(rounding(row, self._sampling, self._scorer.dtype))[1][token])

    def _row(self, text: tuple[int, ...]) -> Row:
        if text not in self._rows:
            start = len(self._prompt)
            for end, row in enumerate(self._scorer.rows(self._prompt, text[start:], self._sampling), start):
                self._rows[text[:end]] = row
        return self._rows[text]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt decoded twice.

    Attributes:
      prompt: index of the prompt.
      sampling: what both were asked for.
      expected: tokens of plain decoding.
      got: tokens of the method.
      equal: how many leading tokens agree.
      verdict: "equal", "tie" (every difference is within rounding) or "different".
      ties: positions where the method's token is not plain decoding's choice, but within rounding of it.
      position: index, in the output, of the difference that decides the verdict; None if there is none.
      expected_token: plain decoding's choice there; None where its text had ended.
      got_token: the method's token there; None where its text had ended.
      margin: by how much scores would have to move for `got_token`, in units of processed scores (logits over the
        temperature); inf for an impossible token, None where a text ended and there is nothing to score.
      eps: what passes for rounding there, in the same units.
    """

    prompt: int
    sampling: SamplingParams
    expected: tuple[int, ...]
    got: tuple[int, ...]
    equal: int
    verdict: Verdict
    ties: int = 0
    position: int | None = None
    expected_token: int | None = None
    got_token: int | None = None
    margin: float | None = None
    eps: float | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Comparisons by verdict, tokens of the method, ties among them, and whether those are too many to be chance."""

    prompts: int
    equal: int
    tie: int
    different: int
    tokens: int
    ties: int
    suspicious: bool


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


def check_tokens(
    llm_plain: Any,
    llm_method: Decoder,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams] | None = None,
    scorer: Scorer | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Decode every prompt with both and compare token by token; for methods that are exact for each seed.

    Args:
      llm_plain: plain decoding, an `LLM`; with `scorer`, anything that generates.
      llm_method: the method; anything that generates.
      prompts: token ids of each prompt.
      samplings: None is `default_samplings`. Those that sample need a seed.
      scorer: what judges differences; None makes one of `llm_plain`.
      progress: called after each comparison.

    Returns:
      One comparison per prompt and sampling, prompts in the inner loop.

    Raises:
      ConfigError: a sampling at temperature > 0 without a seed, or a prompt that does not fit.
    """
    samplings = default_samplings() if samplings is None else samplings
    for sampling in samplings:
        if sampling.temperature > 0 and sampling.seed is None:
            raise ConfigError(f"sampling without a seed cannot be compared token by token: {describe(sampling)}")
    scorer = scorer or Scorer(llm_plain.engine.target, llm_plain.params)
    comparisons = []
    for sampling in samplings:
        for index, prompt in enumerate(prompts):
            expected, got = (_decode(llm, prompt, sampling) for llm in (llm_plain, llm_method))
            comparisons.append(_compare(scorer, index, list(prompt), sampling, expected, got))
            progress()
    return comparisons


def summarise(comparisons: Sequence[Comparison], dtype: str = "float32") -> Summary:
    """Count verdicts; more than one tie, and more than `TIE_SHARE[dtype]` per token, is suspicious."""
    verdicts = [c.verdict for c in comparisons]
    equal, tie, different = (verdicts.count(verdict) for verdict in ("equal", "tie", "different"))
    tokens, ties = sum(len(c.got) for c in comparisons), sum(c.ties for c in comparisons)
    suspicious = ties > 1 and ties > TIE_SHARE[dtype] * tokens
    return Summary(len(comparisons), equal, tie, different, tokens, ties, suspicious)


def describe(sampling: SamplingParams) -> str:
    """What is not default, in a few words: "greedy", "temperature=0.7 top_p=0.9 seed=1"."""
    words = [
        f"{field.name}={getattr(sampling, field.name)}"
        for field in dataclasses.fields(sampling)
        if field.name not in ("max_tokens", "ignore_eos") and getattr(sampling, field.name) not in (field.default, ())
    ]
    return " ".join(words if sampling.temperature > 0 else ["greedy", *words])


def _decode(llm: Decoder, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    return tuple(int(token) for token in llm.generate(list(prompt), sampling).token_ids)


def _compare(
    scorer: Scorer,
    index: int,
    prompt: list[int],
    sampling: SamplingParams,
    expected: tuple[int, ...],
    got: tuple[int, ...],
) -> Comparison:
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
    for position, row in enumerate(scorer.rows(prompt, got[:-1], sampling)):
        if position < equal:
            continue
        # At the first difference both outputs are judged: if plain decoding's own token is not what its scores say,
        # something is broken as well.
        chosen = expected[position] if position == equal else choice(row, sampling)
        if chosen == got[position]:
            continue
        gap = max(margin(row, token, sampling) for token in (chosen, got[position]))
        eps = rounding(row, sampling, scorer.dtype)
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
