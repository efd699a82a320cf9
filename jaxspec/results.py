"""Results for a caller: completions, streamed events and their statistics."""

import dataclasses
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxspec.methods.base import DeviceChoice
    from jaxspec.offload.stream import OffloadStats
    from jaxspec.trace.events import TraceSummary

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


# Stands for a piece of a long prompt that was read, between which other texts may run.
READING = StreamEvent("", (), ())


class Stream(Iterator[StreamEvent]):
    """A text while it is decoded: an iterator of its events, and a context manager that ends it.

    Nothing is computed before the first event is asked for. Leaving the `with` block, `close`, or dropping the stream
    gives its buffers back. An abort keeps what was decoded.
    """

    def __init__(self, start: Callable[[Callable[[], bool], Callable[[], bool]], Generator[StreamEvent, None, None]]):
        """`start` makes the events; it is given what says whether the text was aborted, and is read in pieces."""
        self._aborted, self._in_pieces = threading.Event(), threading.Event()
        # The events do not hold the stream: dropping it ends them at once, in the thread that drops it.
        self._events = start(self._aborted.is_set, self._in_pieces.is_set)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def read_in_pieces(self) -> None:
        """Read a long prompt piece by piece: before the first event comes `READING` for each, but the last."""
        self._in_pieces.set()

    def abort(self) -> None:
        """End the text after the latest event, or the first one: the next is the last, with finish_reason "abort".

        A text that has ended is not changed. `close` ends a text without another event.
        """
        self._aborted.set()

    def close(self) -> None:
        """End the text without a last event; once it has ended, nothing is done."""
        self._events.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class DraftTreeStats:
    """Counts of a draft tree that outlives the rounds (docs/algorithms.md, "Re-rooting").

    A generation's first round has no tree to hit: it is in no rate, and rates are None without another round. Nodes are
    counted at each re-rooting, so a node that survives three rounds counts three times.

    Attributes:
      token_hit_rate: share of rounds whose new root was in the tree.
      evaluated_hit_rate: share whose new root was evaluated too, so that a batch could be chosen at once.
      exposed_passes_per_round: draft passes that the target waited for.
      tokens_computed: tokens that went through the draft.
      tokens_caught_up: those of them that were verified before the draft had seen them.
      nodes_kept: evaluated nodes that stayed in the tree.
      nodes_committed: those that joined the prefix.
      nodes_dropped: those that were in neither.
    """

    token_hit_rate: float | None
    evaluated_hit_rate: float | None
    exposed_passes_per_round: float | None
    tokens_computed: int
    tokens_caught_up: int
    nodes_kept: int
    nodes_committed: int
    nodes_dropped: int


MOST_SHOWN = 8  # numbers of a field that `repr` shows


class Brief:
    """A dataclass whose `repr` shows the beginning of long fields, and leaves out those that say nothing."""

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in fields.items() if value not in (None, ()))
        return f"{type(self).__name__}({shown})"


def _brief(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > MOST_SHOWN:
        return f"({', '.join(map(repr, value[:MOST_SHOWN]))}, ... {len(value)} in all)"
    return repr(value)


@dataclasses.dataclass(frozen=True, repr=False)
class SpeculationStats(Brief):
    """Counts of drafted and accepted tokens, under vLLM's names where it has one. A step is one target pass.

    Tokens that a stop or `max_tokens` cut off are not counted.

    Attributes:
      num_spec_steps: target passes.
      num_spec_tokens: the most tokens that the method verifies in a pass, the root not counted.
      num_draft_tokens: draft tokens verified.
      num_accepted_draft_tokens: draft tokens accepted.
      mean_acceptance_length: tokens per step, the bonus token included: 1 + accepted tokens per step.
      draft_acceptance_rate: accepted per verified draft token; None without drafts.
      acceptance_histogram: number of steps that accepted 0, 1, 2, ... draft tokens.
      acceptance_by_depth: for depth 1, 2, ..., the share of steps that accepted it, among those that accepted the depth
        before it and drafted that far.
      mean_tree_depth: depth of the verified tree, mean over steps.
      mean_tree_size: tokens of the verified tree without its root, mean over steps.
      budget_used: `mean_tree_size` over `num_spec_tokens`.
      num_draft_passes: passes of the draft model.
      rounds_by_kind: steps with a draft model's tokens ("drafted"), with copies ("copied") and without ("plain").
      per_step_accepted: draft tokens accepted in each step, in order.
      per_step_drafted: draft tokens verified in each step, in order.
      draft_tree: counts of a tree that outlives the rounds; None where there is none.
      tree_truncated: steps of SpecExec whose search `depth` ended, so that the tree may lack better prefixes.
    """

    num_spec_steps: int
    num_spec_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_histogram: tuple[int, ...]
    acceptance_by_depth: tuple[float, ...]
    mean_tree_depth: float
    mean_tree_size: float
    budget_used: float
    num_draft_passes: int
    rounds_by_kind: Mapping[str, int]
    per_step_accepted: tuple[int, ...]
    per_step_drafted: tuple[int, ...]
    draft_tree: DraftTreeStats | None = None
    tree_truncated: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Choice(Brief):
    """A method's decisions and the figures behind them; each method that decides adds fields of its own.

    Attributes:
      draft: file or folder name of the draft model; None without one.
      devices: choice of the devices of draft and target; None where it was not `auto`'s.
      rounds: `SpeculationStats.rounds_by_kind`.
    """

    draft: str | None = None
    devices: "DeviceChoice | None" = None
    rounds: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, repr=False)
class DecodeStats(Brief):
    """Timings in seconds and counts of emitted tokens; compile time is in none of the other timings.

    Attributes:
      prompt_tokens: tokens of the prompt.
      completion_tokens: tokens emitted, an end-of-sequence token included.
      ttft_s: from the call to the first token. A text that ends leaves a round in flight, which the next call on the
        same device waits for.
      decode_s: from the first round's tokens to the last round's.
      tokens_per_s: emitted tokens after those of the first round, per second of `decode_s`; None where there are none.
      compile_s: tracing, compiling or loading compiled programs.
      seed: the seed that reproduces this text at temperature > 0; None for greedy decoding.
      speculative_decoding: counts of drafted and accepted tokens; None for plain decoding.
      choice: decisions of `auto` (`AutoChoice`), `swift` (`SwiftChoice`) or `swiftspec` (`SwiftSpecChoice`); None for
        other methods.
      num_programs: compiled programs of the method.
      timeline: summary of the trace, where one was taken.
      cached_prompt_tokens: tokens of the prompt whose keys and values an earlier conversation left.
      offload: what was read for the layers that were streamed; None where none were.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_s: float
    tokens_per_s: float | None
    compile_s: float
    seed: int | None = None
    speculative_decoding: SpeculationStats | None = None
    choice: Choice | None = None
    num_programs: int = 0
    timeline: "TraceSummary | None" = None
    cached_prompt_tokens: int = 0
    offload: "OffloadStats | None" = None

    def __str__(self) -> str:
        speed = "" if self.tokens_per_s is None else f" at {self.tokens_per_s:.1f} tokens/s"
        parts = [f"{self.prompt_tokens} prompt tokens", f"{self.completion_tokens} tokens{speed}"]
        parts.append(f"first token after {self.ttft_s:.2f} s")
        if self.speculative_decoding is not None:
            parts.append(f"{self.speculative_decoding.mean_acceptance_length:.2f} tokens/pass")
        if self.compile_s:
            parts.append(f"compiling {self.compile_s:.2f} s")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, repr=False)
class Completion(Brief):
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
      message: the answer to a conversation in OpenAI's form: {"role", "content"} and, where there are some,
        "reasoning_content" and "tool_calls"; None where the prompt was text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: DecodeStats
    method: str
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopTokens, ...] | None = None
    alternatives: tuple["Completion", ...] = ()
    message: Mapping[str, Any] | None = None

    @property
    def tool_calls(self) -> list[Mapping[str, Any]]:
        """Calls of tools in the answer to a conversation, each with "id" and "function" (its name and arguments)."""
        return (self.message or {}).get("tool_calls", [])

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
        if self.message is not None:
            result["message"] = dict(self.message)
        if self.alternatives:
            result["alternatives"] = [other.to_dict() for other in self.alternatives]
        return result


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
