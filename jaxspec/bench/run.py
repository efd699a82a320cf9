"""Methods side by side: the same prompts, in one process, everything warm, every method in turn.

* Plain decoding (`ar`, several tokens per dispatch) is always a column: the baseline of all ratios and of exactness.
* Everything is compiled for the longest conversation and has generated once before the first timed answer.
* For each repeat and each prompt every column answers once. The order of columns rotates by one each time. The roofline
  is sampled beside them: drift of the machine's speed affects all alike.
* The first dispatch belongs to the time to the first token. Rates count the tokens after it, per second from the first
  dispatch to the last.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.results import DecodeStats
from pallas_kernels.active_rows import computed_rows
from pallas_kernels.registry import Kernels

if TYPE_CHECKING:
    from jaxspec.bench.microbench import PassTimes
    from jaxspec.llm import LLM, Internals

BASELINE = "ar"

# Passes per roofline sample, of which there is one per prompt and repeat; and samples of a method's own passes.
ROOFLINE_PASSES = 4
PASS_REPEATS = 5
WARM_UP_TOKENS = 16

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Column:
    """One decoder to measure: a method on the weights that are measured, or another library's decoder."""

    label: str  # its name in tables
    method: Any  # with its settings; None for another library's decoder
    model: Any = None  # that decoder, which answers like an `LLM`; None for a method


@dataclasses.dataclass(frozen=True)
class Answer:
    """One column's answer to one prompt in one repeat; a tuple holds one entry per turn."""

    label: str  # of the column
    prompt: BenchPrompt
    repeat: int  # from 0
    token_ids: tuple[tuple[int, ...], ...]  # an end-of-sequence token included
    finish_reasons: tuple[str, ...]  # "stop" or "length"
    stats: tuple[DecodeStats, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the user received."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def passes(self) -> int:
        """Target passes that brought them."""
        return sum(target_passes(stats) for stats in self.stats)

    @property
    def timed_tokens(self) -> int:
        """Tokens received after the first dispatch of each turn."""
        return sum(stats.completion_tokens - first_tokens(stats) for stats in self.stats)

    @property
    def timed_passes(self) -> int:
        """Target passes after the first dispatch of each turn."""
        return sum(target_passes(stats) - first_passes(stats) for stats in self.stats)

    @property
    def timed_draft_passes(self) -> float:
        """Draft passes after the first dispatch, taking those of a turn as spread evenly over its target passes."""
        pairs = ((stats.speculative_decoding, stats) for stats in self.stats)
        return sum(n.num_draft_passes * (1 - first_passes(s) / target_passes(s)) for n, s in pairs if n is not None)

    @property
    def decode_s(self) -> float:
        """Seconds from the first dispatch's tokens to the last's, summed over turns."""
        return sum(stats.decode_s for stats in self.stats)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first dispatch per second of `decode_s`; None where one dispatch held the whole answer."""
        return self.timed_tokens / self.decode_s if self.timed_tokens and self.decode_s > 0 else None

    @property
    def call_tokens_per_s(self) -> float:
        """All tokens per second of the whole call, prefill and first dispatch included."""
        return self.tokens / sum(stats.ttft_s + stats.decode_s for stats in self.stats)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Everything that was measured."""

    columns: tuple[Column, ...]  # the first is the baseline
    prompts: tuple[BenchPrompt, ...]  # those with at least one answer of each column
    sampling: SamplingParams
    repeats: int  # answers of each column to each prompt
    answers: tuple[Answer, ...]  # in order of time; of an interrupted run the complete groups of one answer per column
    compile_s: dict[str, float]  # by label, seconds of compiling before the first timed answer
    pass_times: dict[str, "PassTimes"]  # by label, seconds of passes at `context` tokens; none after an interrupt
    context: int  # tokens, the middle of a mean answer
    # Seconds of one pass over all weights, of a mixture those of one row, a sample per prompt and repeat; none where
    # that is not measured.
    roofline_s: tuple[float, ...]
    weight_bytes: int  # what such a pass reads
    weights: str  # the target's weight types, in words
    kernels: Kernels  # what multiplied and attended
    interrupted: bool = False  # whether an interrupt ended the run early


# How the counters of a generation are read, in one place.


def target_passes(stats: DecodeStats) -> int:
    """Target passes of a generation that brought tokens which the user received."""
    spec = stats.speculative_decoding
    return stats.completion_tokens if spec is None else spec.num_spec_steps


def first_tokens(stats: DecodeStats) -> int:
    """Tokens of the first dispatch, which `decode_s` does not hold."""
    return stats.completion_tokens - round((stats.tokens_per_s or 0.0) * stats.decode_s)


def first_passes(stats: DecodeStats) -> int:
    """Target passes of the first dispatch: one with a draft, else one per token."""
    spec = stats.speculative_decoding
    accepted = 0 if spec is None else spec.per_step_accepted[0]
    return min(target_passes(stats), max(1, first_tokens(stats) - accepted))


def verified_rows(stats: DecodeStats, method: Any, kernels: Kernels) -> list[int]:
    """Rows of each target pass after the first dispatch, as they were computed."""
    spec = stats.speculative_decoding
    if spec is None:
        return [1] * (target_passes(stats) - first_passes(stats))
    drafted = spec.per_step_drafted[first_passes(stats) :]
    return [computed_rows(1 + count, method.num_rows, kernels) for count in drafted]


def is_token_exact(method: Any, sampling: SamplingParams) -> bool:
    """Whether a method promises the baseline's tokens, not only their distribution; None is another library."""
    return method is not None and (sampling.temperature == 0 or method.exact == "tokens")


def measure(
    llm: "LLM", columns: Sequence[Column], prompts: Sequence[BenchPrompt], sampling: SamplingParams, repeats: int = 3,
    on_progress: Progress = lambda what, done, total: None, stopped: Callable[[], bool] = lambda: False,
) -> Measurement:  # fmt: skip
    """Run all columns on all prompts; see the module's rules.

    The turns of a conversation are answered in order, with the column's own earlier answers in between. A model without
    a chat template completes the turns as plain text. `sampling` has `max_tokens`, and a seed if the temperature is
    above 0. `on_progress` is called with what comes next, the number of answers so far and their total. `stopped` is
    asked before each answer; True ends the run, and what is complete is kept.

    Raises:
      ConfigError: a prompt does not fit into the context together with its answers; nothing was measured then.
      KeyboardInterrupt: the run was stopped before every column had answered once.
    """
    from jaxspec.bench.microbench import roofline_pass, weight_bytes

    assert prompts and sampling.max_tokens is not None and (sampling.temperature == 0 or sampling.seed is not None)
    total = repeats * len(prompts) * len(columns)
    models = {column.label: column.model or _with_method(llm, column.method) for column in columns}
    longest = max(_most_tokens(llm, prompt, sampling.max_tokens) for prompt in prompts)
    compile_s = {}
    for label, model in models.items():
        if stopped():
            raise KeyboardInterrupt
        on_progress(f"warming up {label}", 0, total)
        compile_s[label] = _warm_up(model, prompts, sampling, longest)
    params, kernels = internals(llm).params.target, internals(llm).kernels
    experts = internals(llm).target.cfg.experts
    read_weights = roofline_pass(params, kernels, ROOFLINE_PASSES, experts)
    if read_weights is not None:
        read_weights()

    labels = list(models)
    answers: list[Answer] = []
    roofline_s: list[float] = []
    interrupted = False
    for repeat, (index, prompt) in itertools.product(range(repeats), enumerate(prompts)):
        if read_weights is not None:
            roofline_s.append(read_weights())
        first = (repeat + index) % len(labels)
        for label in labels[first:] + labels[:first]:
            if not (interrupted := stopped()):
                on_progress(f"{label}, {prompt.question_id}", len(answers), total)
                answers.append(_answer(models[label], label, prompt, sampling, repeat))
        if interrupted:
            break
    interrupted = interrupted or stopped()
    # Ratios are taken within a group of one answer per column: an incomplete group is dropped.
    del answers[len(answers) // len(labels) * len(labels) :]
    if not answers:
        raise KeyboardInterrupt

    stats = [s for answer in answers if answer.label == labels[0] for s in answer.stats]
    context = round(statistics.fmean(s.prompt_tokens + s.completion_tokens / 2 for s in stats))
    pass_times = {}
    for column in columns if not interrupted else ():
        if column.model is None:
            on_progress(f"single passes of {column.label}", total, total)
            mine = [s for answer in answers if answer.label == column.label for s in answer.stats]
            rows = {count for s in mine for count in verified_rows(s, column.method, kernels)}
            pass_times[column.label] = _time_passes(models[column.label], context, sorted(rows))
    answered = {answer.prompt.question_id for answer in answers}
    return Measurement(
        tuple(columns), tuple(p for p in prompts if p.question_id in answered), sampling, repeats, tuple(answers),
        compile_s, pass_times, context, tuple(roofline_s), weight_bytes(params, experts),
        str(internals(llm).target.weights), kernels, interrupted,
    )  # fmt: skip


def encode_prompt(llm: Any, prompt: BenchPrompt) -> list[int]:
    """Token ids of a prompt's first turn, through the chat template if the model has one."""
    return _encode(llm, [{"role": "user", "content": prompt.turns[0]}])


def internals(llm: "LLM") -> "Internals":
    """See `jaxspec.llm`, which is imported only here: a bare machine has no packages for checkpoints."""
    from jaxspec import llm as loaded

    return loaded.internals(llm)


def _with_method(llm: "LLM", method: Any) -> Any:
    return llm if internals(llm).engine.method == method else llm.with_method(method)


def _time_passes(llm: Any, context: int, rows: Sequence[int]) -> "PassTimes":
    from jaxspec.bench.microbench import measure_passes

    return measure_passes(llm, context, rows, PASS_REPEATS)


def _most_tokens(llm: "LLM", prompt: BenchPrompt, max_tokens: int) -> int:
    """Most tokens that a conversation can come to."""
    messages = []
    for turn in prompt.turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    tokens = len(_encode(llm, messages[:-1])) + len(prompt.turns) * max_tokens
    context = internals(llm).engine.max_context
    if tokens > context:
        raise ConfigError(
            f"prompt {prompt.question_id!r} comes to {tokens} tokens with answers of {max_tokens}, the context holds "
            f"{context}: allow fewer tokens per answer or leave the prompt out"
        )
    return tokens


def _warm_up(llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, longest: int) -> float:
    """Compile for the longest conversation and generate once; returns seconds of compiling."""
    compile_s = internals(llm).engine.prepare(longest)
    short = dataclasses.replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens or 1), ignore_eos=True)
    # The longest first turn uses every size of prefill chunk that any of them needs, except for its remainder.
    prompt = max(prompts, key=lambda p: len(p.turns[0]))
    return compile_s + sum(stats.compile_s for stats in _answer(llm, "", prompt, short, 0).stats)


def _answer(llm: Any, label: str, prompt: BenchPrompt, sampling: SamplingParams, repeat: int) -> Answer:
    messages: list[dict[str, str]] = []
    completions = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        if llm.tokenizer.has_chat_template:
            completion = llm.chat(messages, sampling)
        else:
            completion = llm.generate(_plain_text(messages), sampling)
        # The round in flight belongs neither to this answer nor to the next measurement.
        internals(llm).engine.settle()
        messages.append({"role": "assistant", "content": completion.text})
        completions.append(completion)
    token_ids, reasons, stats = zip(*((tuple(c.token_ids), c.finish_reason, c.stats) for c in completions), strict=True)
    return Answer(label, prompt, repeat, token_ids, reasons, stats)


def _encode(llm: Any, messages: list[dict[str, str]]) -> list[int]:
    return llm.encode(messages if llm.tokenizer.has_chat_template else _plain_text(messages))


def _plain_text(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages)
