"""Methods side by side: the same prompts, in one process, everything warm, every method in turn.

Rules of the measurement:

* Plain decoding (`ar`) is always a column: it is the baseline of every ratio and of exactness.
* Everything is compiled for the longest conversation and has generated once before the first timed answer.
* For each repeat and each prompt every column answers once; the column that begins moves on by one each time, and
  the roofline is sampled beside them, so that a machine whose speed drifts slows all of them alike.
* The first round belongs to the time to the first token. Rates count what comes behind it: tokens that the user
  receives after the first round, per second from the first round to the last.

Nothing here prints; `jaxspec.bench.report` makes numbers and tables of what `measure` returns.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.roofline import roofline_pass, weight_bytes
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods import registry
from jaxspec.methods.registry import METHODS
from jaxspec.results import DecodeStats
from pallas_kernels.active_rows import computed_rows
from pallas_kernels.registry import Kernels

if TYPE_CHECKING:
    from jaxspec.bench.microbench import PassTimes
    from jaxspec.llm import LLM

BASELINE = "ar"
SWEPT = "specexec"

# Passes per roofline sample (one sample per prompt and repeat), and repeats of a method's own passes.
ROOFLINE_PASSES = 4
PASS_REPEATS = 5
WARM_UP_TOKENS = 16

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Column:
    """One thing to measure: a method with its settings, under the name that tables give it."""

    label: str
    method: Any


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one column answered to one prompt in one repeat; a tuple holds one entry per turn.

    Attributes:
      label: of the column.
      prompt: what was asked.
      repeat: from 0.
      token_ids: generated tokens, an end-of-sequence token included.
      finish_reasons: "stop" or "length".
      stats: the generations' own statistics.
    """

    label: str
    prompt: BenchPrompt
    repeat: int
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
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
        """Tokens received after the first round of each turn."""
        return sum(stats.completion_tokens - first_round_tokens(stats) for stats in self.stats)

    @property
    def timed_passes(self) -> int:
        """Target passes after the first round of each turn: those that `decode_s` holds."""
        return sum(target_passes(stats) - 1 for stats in self.stats)

    @property
    def timed_draft_passes(self) -> float:
        """Draft passes in `decode_s`, taking those of a turn as spread evenly over its rounds."""
        return sum(draft_passes(s) * (target_passes(s) - 1) / target_passes(s) for s in self.stats)

    @property
    def decode_s(self) -> float:
        """Seconds from the first round's tokens to the last round's, summed over turns."""
        return sum(stats.decode_s for stats in self.stats)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, mean over turns."""
        return statistics.fmean(stats.ttft_s for stats in self.stats)

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling; zero in a sound measurement, and in none of the other times."""
        return sum(stats.compile_s for stats in self.stats)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first round per second of `decode_s`; None where one round said everything."""
        return self.timed_tokens / self.decode_s if self.timed_tokens and self.decode_s > 0 else None

    @property
    def call_tokens_per_s(self) -> float:
        """All tokens per second of the whole call, prefill and first round included."""
        return self.tokens / sum(stats.ttft_s + stats.decode_s for stats in self.stats)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Everything that was measured.

    Attributes:
      columns: what was compared; the first is the baseline.
      prompts: what was asked.
      sampling: how tokens were chosen.
      repeats: answers of each column to each prompt.
      answers: all of them, in the order in which they were measured.
      compile_s: by label, seconds of compiling before anything was timed.
      pass_times: by label, seconds of one target and one draft pass at `context` tokens of context.
      context: tokens, the middle of a mean answer.
      roofline_s: seconds of one pass over all weights, a sample per prompt and repeat.
      weight_bytes: what such a pass reads.
      weights: the target's weight types, in words.
      kernels: what multiplied and attended.
    """

    columns: tuple[Column, ...]
    prompts: tuple[BenchPrompt, ...]
    sampling: SamplingParams
    repeats: int
    answers: tuple[Answer, ...]
    compile_s: dict[str, float]
    pass_times: dict[str, "PassTimes"]
    context: int
    roofline_s: tuple[float, ...]
    weight_bytes: int
    weights: str
    kernels: Kernels


# What is assumed of methods and their counters, in one place.


def target_passes(stats: DecodeStats) -> int:
    """Target passes of a generation, those only that brought tokens which the user received."""
    spec = stats.speculative_decoding
    return stats.completion_tokens if spec is None else spec["num_spec_steps"]


def verified_rows(stats: DecodeStats, method: Any, kernels: Kernels) -> list[int]:
    """Rows of each target pass but a turn's first, as they were computed."""
    if stats.speculative_decoding is None:
        return [1] * (target_passes(stats) - 1)
    drafted = stats.speculative_decoding["per_step_drafted"][1:]
    return [computed_rows(1 + count, method.batch_rows, kernels) for count in drafted]


def draft_passes(stats: DecodeStats) -> int:
    """Draft passes of a generation."""
    return 0 if stats.speculative_decoding is None else stats.speculative_decoding["num_draft_passes"]


def first_round_tokens(stats: DecodeStats) -> int:
    """Tokens that came with the first token."""
    accepted = 0 if stats.speculative_decoding is None else stats.speculative_decoding["per_step_accepted"][0]
    return min(stats.completion_tokens, 1 + accepted)


def is_token_exact(method: Any, sampling: SamplingParams) -> bool:
    """Whether a method promises the baseline's very tokens, or at this temperature only their distribution."""
    return sampling.temperature == 0 or method.exact == "tokens"


def default_methods(has_draft: bool, apart: bool = False) -> list[str]:
    """Names of all methods that need no draft, and with a draft of those that use one.

    A draft on devices of its own, `apart` from the target's, leaves those that can use it there.
    """
    return [
        name
        for name, method in METHODS.items()
        if (has_draft or not method.needs_draft) and (method.own_devices or not (apart and method.drafts))
    ]


def make_columns(
    names: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    budgets: Sequence[int] | None = None,
) -> list[Column]:
    """Columns for methods by name, the baseline first whether it is named or not.

    Args:
      names: of methods; repeated ones count once.
      settings: by method name, values of its fields that are not the default.
      budgets: tree budgets in tokens; each becomes a column of SpecExec, instead of its default one.

    Raises:
      ConfigError: an unknown method or field (the nearest name is given), settings or budgets of a method that is not
        measured, or a value that the method refuses.
    """
    settings = settings or {}
    names = list(dict.fromkeys([BASELINE, *names]))
    for name in names:
        make_method(name)  # an unknown name comes before whatever else is wrong
    for name in settings:
        if name not in names:
            raise ConfigError(f"a setting is given for {name!r}, which is not measured: {', '.join(names)} are")
    if budgets and SWEPT not in names:
        raise ConfigError(f"budgets are swept for {SWEPT}, which is not measured: add it to the methods")
    columns = []
    for name in names:
        given = settings.get(name, {})
        if name == SWEPT and budgets:
            if "budget" in given:
                raise ConfigError(f"{SWEPT}.budget is set and swept: give --set {SWEPT}.budget or --budgets, not both")
            # Each is made anew, not changed: what a method derives from its budget has to follow it.
            swept = {f"{name}[budget={budget}]": {**given, "budget": budget} for budget in budgets}
        else:
            swept = {name: given}
        columns += [Column(label, make_method(name, values)) for label, values in swept.items()]
    return columns


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """A method by name with some settings; see `make_columns` for the errors."""
    if name == "all":
        raise ConfigError(f"{name!r} is no method to compare with others; known: {', '.join(METHODS)}")
    return registry.make_method(name, settings)


def loading_method(columns: Sequence[Column], has_draft: bool, given: bool = True, apart: bool = False) -> Any:
    """The method to load models with: one of the columns', and with a draft one that uses it.

    Args:
      columns: from `make_columns`.
      has_draft: whether there is a draft model.
      given: whether that is because somebody named one.
      apart: whether the draft is to have devices of its own.

    Raises:
      ConfigError: a column needs a draft and there is none, or there is one and no column uses it; or not all that do
        can use it on devices of its own.
    """
    drafting = [column for column in columns if column.method.drafts]
    if has_draft and given and not drafting:
        raise ConfigError(f"none of the methods {', '.join(c.label for c in columns)} uses a draft model: leave it out")
    needing = [column for column in columns if column.method.needs_draft]
    if needing and not has_draft:
        raise ConfigError(f"{needing[0].label} needs a draft model: name one, or leave the method out")
    together = [column.label for column in drafting if not column.method.own_devices]
    if apart and (together or not drafting):
        others = ", ".join(together) or "plain decoding"
        raise ConfigError(f"draft_devices and draft_platform are for swiftspec; {others} cannot use them")
    return (drafting or columns)[0].method


def measure(
    llm: "LLM",
    columns: Sequence[Column],
    prompts: Sequence[BenchPrompt],
    sampling: SamplingParams,
    repeats: int = 3,
    on_progress: Progress | None = None,
) -> Measurement:
    """Run all columns on all prompts; see the module's rules.

    Each turn of a conversation is answered in turn, with the column's own earlier answers in between. A model without
    a chat template completes the turns as plain text.

    Args:
      llm: the loaded model; columns of other methods share its weights.
      columns: from `make_columns`.
      prompts: at least one.
      sampling: with `max_tokens`, and with a seed if the temperature is above 0.
      repeats: timed answers of each column to each prompt.
      on_progress: called with what comes next, the number of answers measured so far and their total.

    Raises:
      ConfigError: a prompt does not fit into the context together with its answers; nothing was measured then.
    """
    assert prompts and sampling.max_tokens is not None and (sampling.temperature == 0 or sampling.seed is not None)
    total = repeats * len(prompts) * len(columns)
    report = on_progress or (lambda what, done, total: None)
    models = {column.label: _with_method(llm, column.method) for column in columns}
    longest = max(_most_tokens(llm, prompt, sampling.max_tokens) for prompt in prompts)
    compile_s = {}
    for label, model in models.items():
        report(f"warming up {label}", 0, total)
        compile_s[label] = _warm_up(model, prompts, sampling, longest)
    read_weights = roofline_pass(llm.params, llm.kernels, ROOFLINE_PASSES)
    read_weights()

    labels = list(models)
    answers: list[Answer] = []
    roofline_s = []
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            roofline_s.append(read_weights())
            first = (repeat + index) % len(labels)
            for label in labels[first:] + labels[:first]:
                report(f"{label}, {prompt.question_id}", len(answers), total)
                answers.append(_answer(models[label], label, prompt, sampling, repeat))

    context = _middle([answer for answer in answers if answer.label == labels[0]])
    pass_times = {}
    for label, model in models.items():
        report(f"single passes of {label}", total, total)
        mine = [s for answer in answers if answer.label == label for s in answer.stats]
        rows = {count for s in mine for count in verified_rows(s, model.engine.method, llm.kernels)}
        pass_times[label] = _time_passes(model, context, sorted(rows))
    return Measurement(
        tuple(columns), tuple(prompts), sampling, repeats, tuple(answers),
        compile_s, pass_times, context, tuple(roofline_s), weight_bytes(llm.params),
        str(llm.engine.target.weights), llm.kernels,
    )  # fmt: skip


def _with_method(llm: "LLM", method: Any) -> Any:
    return llm if llm.engine.method == method else llm.with_method(method)


def _time_passes(llm: Any, context: int, rows: Sequence[int]) -> "PassTimes":
    from jaxspec.bench.microbench import measure_passes

    return measure_passes(llm, context, rows, PASS_REPEATS)


def _most_tokens(llm: "LLM", prompt: BenchPrompt, max_tokens: int) -> int:
    """Most tokens that a conversation can come to."""
    messages = []
    for turn in prompt.turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    tokens = len(_encode(llm, messages[:-1])) + len(prompt.turns) * max_tokens
    if tokens > llm.engine.max_context:
        raise ConfigError(
            f"prompt {prompt.question_id!r} comes to {tokens} tokens with answers of {max_tokens}, the context holds "
            f"{llm.engine.max_context}: allow fewer tokens per answer or leave the prompt out"
        )
    return tokens


def _warm_up(llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, longest: int) -> float:
    """Compile for the longest conversation, once and for all capacities, and generate; seconds of compiling."""
    compile_s = llm.engine.prepare(longest)
    short = dataclasses.replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens or 1), ignore_eos=True)
    # The longest first turn goes through every size of prefill chunk that any of them needs, save for its remainder.
    prompt = max(prompts, key=lambda p: len(p.turns[0]))
    return compile_s + sum(stats.compile_s for stats in _answer(llm, "", prompt, short, 0).stats)


def _answer(llm: Any, label: str, prompt: BenchPrompt, sampling: SamplingParams, repeat: int) -> Answer:
    messages: list[dict[str, str]] = []
    completions = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        completion = _ask(llm, messages, sampling)
        # Not part of this answer, and not to be paid for by whatever is measured next.
        llm.engine.settle()
        messages.append({"role": "assistant", "content": completion.text})
        completions.append(completion)
    token_ids, reasons, stats = zip(*((tuple(c.token_ids), c.finish_reason, c.stats) for c in completions), strict=True)
    return Answer(label, prompt, repeat, token_ids, reasons, stats)


def _ask(llm: Any, messages: list[dict[str, str]], sampling: SamplingParams) -> Any:
    if llm.tokenizer.has_chat_template:
        return llm.chat(messages, sampling)
    return llm.generate(_plain_text(messages), sampling)


def _encode(llm: Any, messages: list[dict[str, str]]) -> list[int]:
    return llm.encode(messages if llm.tokenizer.has_chat_template else _plain_text(messages))


def _plain_text(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _middle(answers: Sequence[Answer]) -> int:
    """Tokens of context in the middle of a mean generation."""
    stats = [s for answer in answers for s in answer.stats]
    return round(statistics.fmean(s.prompt_tokens + s.completion_tokens / 2 for s in stats))
