"""From rounds to what a caller gets: events with whole characters, and timings."""

import collections
import time
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import StepOutput
from jaxspec.results import DecodeStats, StreamEvent, TopTokens
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

    def stats(self, prompt_tokens: int, tokens: int, compile_s: float, seed: int | None) -> DecodeStats:
        assert self._first is not None
        decode_s = self._last - self._first
        after_first = max(0, tokens - self._first_tokens)  # what a stop cut off was not received
        return DecodeStats(
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            ttft_s=self._first - self._start,
            decode_s=decode_s,
            tokens_per_s=after_first / decode_s if after_first else None,
            compile_s=compile_s,
            seed=seed,
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
