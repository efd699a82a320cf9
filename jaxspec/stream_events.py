"""Results of rounds for a caller: events with whole characters, timings, and counters in vLLM's vocabulary."""

import collections
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import DraftCounts, StepOutput
from jaxspec.results import DecodeStats, DraftTreeStats, SpeculationStats, StreamEvent, TopTokens
from jaxspec.text.stream import StreamPiece, TextStream


class RoundClock:
    """Times of the first and the latest round."""

    def __init__(self):
        """Start now."""
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._first_tokens = 0

    def tick(self, tokens: int) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
            self._first_tokens = tokens

    def stats(self, prompt_tokens: int, tokens: int, **known: Any) -> DecodeStats:
        """Statistics with these times and the `known` fields."""
        assert self._first is not None
        decode_s = self._last - self._first
        after_first = max(0, tokens - self._first_tokens)  # what a stop cut off was not received
        return DecodeStats(
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            ttft_s=self._first - self._start,
            decode_s=decode_s,
            tokens_per_s=after_first / decode_s if after_first else None,
            **known,
        )


class EventMaker:
    """Turns rounds into events; tokens wait here until the text is certain to keep them."""

    def __init__(self, text: TextStream, sampling: SamplingParams):
        """Begin a text."""
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopTokens] = []
        self._text = text
        self._num_logprobs = sampling.num_logprobs if sampling.wants_logprobs else None
        self._waiting: collections.deque[tuple[int, bool, float, TopTokens]] = collections.deque()

    def push(self, output: StepOutput) -> StreamEvent:
        """Feed a round's tokens to the text until it ends; tokens after the end are dropped."""
        spans, kept = [], []
        top = output.top or ((),) * len(output.tokens)
        for index, (token, logprob, ranked) in enumerate(zip(output.tokens, output.logprobs, top, strict=True)):
            self._waiting.append((token, index < output.accepted, logprob, ranked))
            piece = self._text.push(token)
            self._take(piece, spans, kept)
            if piece.finish_reason is not None:
                break
        return self._make(spans, kept)

    def abort(self) -> StreamEvent:
        spans, kept = [], []
        self._take(self._text.abort(), spans, kept)
        return self._make(spans, kept)

    def _take(self, piece: StreamPiece, spans: list[tuple[str, bool]], kept: list[tuple[Any, ...]]) -> None:
        shown = [self._waiting.popleft() for _ in range(piece.num_tokens)]
        kept.extend(shown)
        if piece.text:
            spans.append((piece.text, bool(shown) and all(drafted for _, drafted, *_ in shown)))

    def _make(self, spans: list[tuple[str, bool]], kept: list[tuple[Any, ...]]) -> StreamEvent:
        tokens, from_draft, logprobs, top = zip(*kept, strict=True) if kept else ((), (), (), ())
        top = tuple(ranked[: self._num_logprobs] for ranked in top)
        self.logprobs.extend(logprobs)
        self.top_logprobs.extend(top)
        return StreamEvent(
            text="".join(text for text, _ in spans),
            token_ids=tokens,
            from_draft=from_draft,
            logprobs=None if self._num_logprobs is None else logprobs,
            finish_reason=self._text.finish_reason,
            spans=tuple(spans),
            top_logprobs=top if self._num_logprobs else None,
        )


def count_speculation(rounds: Sequence[StepOutput], num_tokens: int, num_spec_tokens: int) -> SpeculationStats:
    """Count the target passes of a generation's first `num_tokens` tokens, and what was drafted and accepted in them.

    `num_spec_tokens` are the most tokens that the method verifies in a round, the root not counted.
    """
    kept = []
    for step in (step for output in rounds for step in output.passes()):
        if num_tokens <= 0:
            break
        kept.append(step.cut(num_tokens))
        num_tokens -= len(kept[-1].tokens)
    steps = len(kept)
    accepted, drafted = tuple(r.accepted for r in kept), tuple(r.drafted for r in kept)
    histogram, kinds = Counter(accepted), Counter(map(_kind, kept))
    trees = [r.draft for r in kept if r.draft is not None]
    return SpeculationStats(
        num_spec_steps=steps,
        num_spec_tokens=num_spec_tokens,
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        mean_acceptance_length=1 + sum(accepted) / steps,
        draft_acceptance_rate=sum(accepted) / sum(drafted) if any(drafted) else None,
        acceptance_histogram=tuple(histogram[n] for n in range(max(accepted) + 1)),
        acceptance_by_depth=tuple(_by_depth(kept)),
        mean_tree_depth=sum(r.depth for r in kept) / steps,
        mean_tree_size=sum(drafted) / steps,
        budget_used=sum(drafted) / (steps * num_spec_tokens),
        num_draft_passes=sum(r.draft_passes for r in kept),
        rounds_by_kind={kind: kinds[kind] for kind in ("plain", "copied", "drafted")},
        per_step_accepted=accepted,
        per_step_drafted=drafted,
        draft_tree=count_draft_tree([trees]) if trees else None,
        tree_truncated=sum(r.truncated for r in kept),
    )


def count_draft_tree(generations: Sequence[Sequence[DraftCounts]]) -> DraftTreeStats:
    """Count the nodes and hits of a draft tree that outlives the rounds, from the rounds of each generation."""
    everything = [counts for rounds in generations for counts in rounds]
    later = [counts for rounds in generations for counts in rounds[1:]]

    def total(name: str) -> int:
        return sum(getattr(counts, name) for counts in everything)

    def rate(name: str) -> float | None:
        return sum(getattr(counts, name) for counts in later) / len(later) if later else None

    return DraftTreeStats(
        token_hit_rate=rate("token_hit"),
        evaluated_hit_rate=rate("evaluated_hit"),
        exposed_passes_per_round=rate("exposed"),
        tokens_computed=total("computed"),
        tokens_caught_up=total("caught_up"),
        nodes_kept=total("kept"),
        nodes_committed=total("committed"),
        nodes_dropped=total("dropped"),
    )


def _kind(output: StepOutput) -> str:
    if output.draft_passes:
        return "drafted"
    return "copied" if output.drafted else "plain"


def _by_depth(rounds: Sequence[StepOutput]) -> list[float]:
    rates = []
    for depth in range(1, max(r.depth for r in rounds) + 1):
        tried = [r for r in rounds if r.depth >= depth and r.accepted >= depth - 1]
        if not tried:
            break
        rates.append(sum(r.accepted >= depth for r in tried) / len(tried))
    return rates
