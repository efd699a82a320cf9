"""Results for a caller: completions, streamed events and their statistics."""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal

# "stop": a token or string that ends texts; "length": the last of `max_tokens`; "abort": the caller, as by Ctrl-C.
FinishReason = Literal["stop", "length", "abort"]
TopTokens = tuple[tuple[int, float], ...]  # the most probable tokens at one place, best first, with log-probabilities


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """One piece of a streamed completion.

    Attributes:
      text: new text, whole characters only; may be empty while a character is incomplete or a stop string may follow.
      token_ids: the tokens that this event adds.
      from_draft: for each of them, whether a draft proposed it.
      logprobs: for each of them, its log-probability, if asked for.
      top_logprobs: for each of them, the most probable tokens at its place, if asked for.
      finish_reason: None until the last event, which also carries `completion`.
      completion: the whole result, on the last event.
      spans: `text` in parts, each with whether all tokens that end in it were proposed by a draft.
    """

    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    completion: "Completion | None" = None
    spans: tuple[tuple[str, bool], ...] = ()
    top_logprobs: tuple[TopTokens, ...] | None = None


class Stream(Iterator[StreamEvent]):
    """A text while it is decoded: an iterator of its events, and a context manager that ends it.

    Nothing is computed before the first event is asked for. Leaving the `with` block, `close`, or dropping the stream
    gives its buffers back. An abort keeps what was decoded.
    """

    def __init__(self, start: Callable[[Callable[[], bool]], Generator[StreamEvent, None, None]]):
        """`start` makes the events; it is given what says whether the text was aborted."""
        self._aborted = False
        self._events = start(lambda: self._aborted)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def abort(self) -> None:
        """End the text after the latest event, or the first one: the next is the last, with finish_reason "abort".

        A text that has ended is not changed. `close` ends a text without another event.
        """
        self._aborted = True

    def close(self) -> None:
        """End the text without a last event; once it has ended, nothing is done."""
        self._events.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Timings in seconds and counts of emitted tokens; compile time is in none of the other timings.

    Attributes:
      prompt_tokens: tokens of the prompt.
      cached_prompt_tokens: those of them whose keys and values an earlier conversation left.
      completion_tokens: tokens emitted, an end-of-sequence token included.
      ttft_s: from the call to the first token. A text that ends leaves a round in flight, which the next call on the
        same device waits for.
      decode_s: from the first round's tokens to the last round's.
      tokens_per_s: emitted tokens after those of the first round, per second of `decode_s`; None where there are none.
      compile_s: tracing, compiling or loading compiled programs.
      seed: the seed that reproduces this text at temperature > 0; None for greedy decoding.
      speculative_decoding: counters in vLLM's vocabulary; None for plain decoding.
      choice: of method `auto`, what it did and why: the draft model (None without one), where its figures of costs come
        from and what they are, and the number of rounds of each kind. Of method `swift`, see `Swift.explain`. None for
        other methods.
      num_programs: compiled programs of the method.
      offload: where layers were streamed, what passed: see `offload.stream.StreamCounts`.
      timeline: where a trace was taken, its summary; see `bench.timeline.Summary`.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_s: float
    tokens_per_s: float | None
    compile_s: float
    seed: int | None = None
    speculative_decoding: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    num_programs: int = 0
    timeline: dict[str, Any] | None = None
    cached_prompt_tokens: int = 0
    offload: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished generation.

    `token_ids` ends with the end-of-sequence or stop token if one ended the text; `text` does not show it. A stop
    string cuts both at the same place: `text` ends before its first character, and `token_ids` is the shortest prefix
    of the generated tokens that holds all of `text`.

    Attributes:
      text: the new text.
      token_ids: the new tokens.
      finish_reason: what ended the text; see `FinishReason`.
      stats: timings and counts.
      method: name of the method.
      logprobs: log-probability of each token, if asked for.
      top_logprobs: the most probable tokens at the place of each token, if asked for.
      alternatives: the other completions of the same prompt, where `SamplingParams.n` asked for several.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: DecodeStats
    method: str
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopTokens, ...] | None = None
    alternatives: tuple["Completion", ...] = ()

    @property
    def outputs(self) -> tuple["Completion", ...]:
        """All completions of the prompt, this one first."""
        return (self, *self.alternatives)

    def to_dict(self) -> dict[str, Any]:
        """The object that `jaxspec-decode --json` prints."""
        result = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.stats.prompt_tokens,
            "method": self.method,
            "stats": dataclasses.asdict(self.stats),
        }
        if self.logprobs is not None:  # JSON has no infinities: what is not a number there is null
            result["logprobs"] = [_finite(p) for p in self.logprobs]
        if self.top_logprobs is not None:
            result["top_logprobs"] = [[[token, _finite(p)] for token, p in top] for top in self.top_logprobs]
        if self.alternatives:
            result["alternatives"] = [other.to_dict() for other in self.alternatives]
        return result


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
