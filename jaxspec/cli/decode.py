"""`jaxspec-decode`: a prompt in, streamed text out."""

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, AnyStr

import typer

from jaxspec.cli.conversation import Conversation
from jaxspec.cli.options import (
    ENGINE,
    METHOD,
    MODEL,
    PROCESSES,
    SAMPLING,
    SHAPES,
    Option,
    Options,
    PlanOption,
    PresetOption,
    SetOption,
    check_new_file,
    list_presets,
    merge_options,
    method_from,
    method_options,
    model_options,
    print_plan,
    sampling_options,
)
from jaxspec.cli.processes import asks_for_several, is_worker, processes_from, ran_as_worker
from jaxspec.cli.progress import passes_shown, waiting
from jaxspec.cli.run import command, interrupts_noted, leave_after_interrupt, without_collection
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.methods.swift.runner import SwiftChoice
    from jaxspec.offload.stream import OffloadStats
    from jaxspec.results import Completion, DecodeStats, SpeculationStats, StreamEvent
    from jaxspec.trace.events import TraceSummary
    from jaxspec.trace.timeline import Timeline

NAME = "jaxspec-decode"

LONGEST_PROMPT = 64 << 20  # bytes: no context holds as much, and a device such as /dev/zero has no end

SHOWN_HISTORY = 8  # latest entries of the history of a search that are printed; --json has them all

FLAGS: Options = {
    **MODEL, **METHOD, **SAMPLING, **SHAPES, **ENGINE, **PROCESSES,
    "chat": Option((bool,), "Apply the chat template (default if there is one) or none.", ("--chat/--raw",)),
    "system": Option((str,), "System message of the chat."),
}  # fmt: skip


@command(NAME, FLAGS, extra_words=True)
def app(
    context: typer.Context,
    given: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt [standard input, if it is piped; - too].")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file.")] = None,
    top_logprobs: Annotated[
        int | None, typer.Option(help="With --json, add those of the most probable tokens at each place.")
    ] = None,
    plan: PlanOption = False,
    config: PresetOption = None,
    set_: SetOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print timings to standard error at the end.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write when each program ran, as a Chrome/Perfetto trace, to this file.")
    ] = None,
    show_drafted: Annotated[
        bool, typer.Option("--show-drafted", help="Underline and colour what a draft proposed.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode the prompt plainly, too, and print both speeds.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="A conversation: questions from the terminal, /help, Ctrl-D.")
    ] = False,
    tools: Annotated[
        Path | None, typer.Option(help="With --interactive, a JSON list of tools that answers may call.")
    ] = None,
) -> None:
    """Decode one prompt with the lowest latency, streaming the text; with --interactive, hold a conversation.

    Ctrl-C ends the text there: --json and --stats then say what was decoded, with finish_reason "abort".
    """
    if context.args:
        whole = shlex.quote(" ".join([str(prompt), *context.args]))
        raise ConfigError(f"the prompt is {1 + len(context.args)} arguments: quote it, {NAME} {whole}")
    if config == "list":
        names = list_presets()
        for name, line in names.items():
            print(f"{name:<{max(map(len, names))}}  {line}")
        return
    if top_logprobs is not None:
        given["logprobs"] = top_logprobs
    options = merge_options(given, config, set_ or [], FLAGS, method_options)
    if plan:
        without = {"a prompt": prompt or prompt_file, "--json": json_, "--interactive": interactive}
        without |= {"--trace": trace, "--coordinator": options.get("coordinator")}
        print_plan(options, method_from(options), without)
        return
    if options.get("logprobs") not in (None, False) and not json_:
        raise ConfigError("log-probabilities are part of the JSON object: add --json")
    if show_drafted and json_:
        raise ConfigError("--show-drafted underlines streamed text, which --json replaces: give one of them")
    if trace is not None and asks_for_several(options):
        raise ConfigError("--trace shows the programs of one process: it does not go with several")
    if compare and (interactive or asks_for_several(options)):
        raise ConfigError("--compare decodes one prompt in one process: it goes neither with --interactive nor several")
    out = check_new_file(trace, "--trace")
    if tools is not None and not interactive:
        raise ConfigError("--tools are for a conversation: add --interactive")
    functions = None if tools is None else _read_tools(tools)
    if interactive:
        _check_interactive(options, prompt is not None or prompt_file is not None, json_, trace)
    worker = is_worker(options)
    text = "" if interactive or worker else _read_prompt(prompt, prompt_file)
    with waiting("loading the model and compiling its programs") as show:
        with without_collection():
            from jaxspec.one_call import LLMForRequest  # heavy imports only now: usage errors answer at once

            sampling = sampling_options(options)

            def request(llm: "LLM") -> Any:
                return None if interactive else (llm.encode(_messages(llm, text, options)), sampling)

            processes = processes_from(options)
            llm = LLMForRequest(request, **model_options(options), method=method_from(options), distributed=processes)
        if ran_as_worker(llm, NAME):
            return
        if interactive:
            show(None)
            Conversation(llm, sampling, options.get("system"), _shower(show_drafted), _summary, stats, functions).run()
            return
        prepared = llm.encode(_messages(llm, text, options))
        plain = _ready_for_comparison(llm, show) if compare else None
        show(f"reading {len(prepared)} tokens of the prompt")
        with _tracing(llm, out) as timeline, passes_shown(llm):
            completion = _stream(llm, prepared, sampling, lambda: show(None), quiet=json_, underline=show_drafted)
    if timeline is not None:
        traced = dataclasses.replace(completion.stats, timeline=timeline.summary())
        completion = dataclasses.replace(completion, stats=traced)
    if json_:
        print(json.dumps(completion.to_dict(), ensure_ascii=False))
    if stats:
        sys.stdout.flush()
        print(_summary(completion), file=sys.stderr)
    if completion.finish_reason == "abort":
        leave_after_interrupt()
    if plain is not None:
        sys.stdout.flush()
        print(_comparison(completion, _decode_plainly(plain, prepared, sampling, completion)), file=sys.stderr)


def _check_interactive(options: dict[str, Any], prompt: bool, json_: bool, trace: Path | None) -> None:
    for given, what in (
        (prompt, "a prompt"), (json_, "--json"), (trace is not None, "--trace"),
        (options.get("chat") is False, "--raw"),
    ):  # fmt: skip
        if given:
            raise ConfigError(f"--interactive is a conversation: {what} does not go with it")


def _read_tools(file: Path) -> list[Any]:
    from jaxspec.text.turn import check_tools

    try:
        tools = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--tools {file} cannot be read: {error}") from error
    check_tools(tools)
    return tools


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    piped = prompt is None and file is None and not sys.stdin.isatty()
    one = "give one prompt: as an argument, piped into standard input, or with --prompt-file"
    if not piped and (prompt is None) == (file is None):
        raise ConfigError(one)
    try:
        if file is not None:
            with open(file, encoding="utf-8") as opened:
                text = _check_length(opened.read(LONGEST_PROMPT + 1))
        elif prompt == "-" or piped:
            text = _check_length(sys.stdin.buffer.read(LONGEST_PROMPT + 1)).decode("utf-8")
        else:
            text = str(prompt)
            if any("\udc80" <= character <= "\udcff" for character in text):  # how Python marks bytes it cannot read
                raise ConfigError(
                    "the prompt has characters that this locale does not know: set LC_ALL=C.UTF-8 or PYTHONUTF8=1, or "
                    "give it in a file with --prompt-file"
                )
    except OSError as error:
        where = "standard input" if file is None else f"prompt file {file}"
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text: {error}") from error
    if file is not None or prompt == "-" or piped:
        text = text.removesuffix("\n")  # that a shell or an editor adds; it is no part of the prompt
    if not text:
        raise ConfigError(one if piped else "the prompt is empty: it has 0 characters and at least 1 is needed")
    return text


def _check_length(content: AnyStr) -> AnyStr:
    if len(content) > LONGEST_PROMPT:
        raise ConfigError(f"the prompt is longer than {LONGEST_PROMPT} bytes")
    return content


def _messages(llm: "LLM", text: str, options: dict[str, Any]) -> Any:
    chat = options.get("chat", llm.tokenizer.has_chat_template)
    if chat and not llm.tokenizer.has_chat_template:
        raise ConfigError(f"{llm.model_path} has no chat template; --raw completes the text as it is")
    if not chat:
        if "system" in options:
            raise ConfigError("--system needs the chat template, which --raw switches off or the model lacks")
        return text
    system = [{"role": "system", "content": options["system"]}] if "system" in options else []
    return [*system, {"role": "user", "content": text}]


def _ready_for_comparison(llm: "LLM", show: Callable[[str], None]) -> "LLM":
    """Plain decoding with the same weights; all programs of both are compiled and loaded afterwards."""
    from jaxspec.llm import internals

    show("loading the programs that draft")
    internals(llm).engine.settle()
    show("compiling plain decoding")
    plain = llm.with_method("ar")
    internals(plain).engine.settle()
    return plain


def _decode_plainly(plain: "LLM", prompt: list[int], sampling: Any, completion: "Completion") -> "Completion":
    """The same request without drafts, with the seed that it had."""
    request = dataclasses.replace(sampling, seed=completion.stats.seed) if sampling.temperature else sampling
    return plain.generate([prompt], request)[0]


def _comparison(completion: "Completion", plain: "Completion") -> str:
    """One line: both speeds, and whether the tokens are the same."""
    fast, slow = completion.stats.tokens_per_s, plain.stats.tokens_per_s
    same = "the same" if completion.token_ids == plain.token_ids else "other"
    per_pass = _tokens_per_pass(completion.stats)
    shown = "" if per_pass is None else f", {per_pass:.2f} tokens/pass"
    parts = [f"{completion.method}: {_rate(fast)}{shown}", f"plain decoding: {_rate(slow)}, {same} tokens"]
    if fast and slow:
        parts.append(f"{fast / slow:.2f} times as fast")
    return " · ".join(parts)


def _tokens_per_pass(stats: "DecodeStats") -> float | None:
    """New tokens per target pass; None for plain decoding."""
    counters = stats.speculative_decoding
    return None if counters is None else stats.completion_tokens / counters.num_spec_steps


def _rate(tokens_per_s: float | None) -> str:
    return "too short to time" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"


@contextlib.contextmanager
def _tracing(llm: "LLM", path: Path | None) -> Iterator["Timeline | None"]:
    """Trace what runs within, if there is a file to write; a text that is cut short leaves what was decoded of it."""
    if path is None:
        yield None
        return
    from jaxspec.llm import internals
    from jaxspec.trace.timeline import Timeline

    timeline = Timeline(internals(llm).models)
    try:
        with timeline:
            yield timeline
    finally:
        if timeline.rounds_read:
            timeline.write(path)


def _stream(
    llm: "LLM", prompt: list[int], sampling: Any, begin: Callable[[], None], *, quiet: bool, underline: bool
) -> "Completion":
    """Print the text as it comes; `begin` is called before the first of it. An interrupt ends the text."""

    show = (lambda event: None) if quiet else _shower(underline)
    with llm.stream(prompt, sampling) as events:
        # Until there is a token, there is nothing to keep, and an interrupt ends the process at once.
        event = next(events)
        begin()
        with interrupts_noted() as interrupted:
            show(event)
            while event.completion is None:
                if interrupted.is_set():
                    events.abort()
                event = next(events)
                show(event)
    if not quiet:
        typer.echo()
    return event.completion


def _shower(underline: bool) -> Callable[["StreamEvent"], None]:
    """A function that prints a piece of an answer."""

    def show(event: "StreamEvent") -> None:
        for text, drafted in event.spans:
            shown = typer.style(text, fg=typer.colors.GREEN, underline=True) if underline and drafted else text
            typer.echo(shown, nl=False)
        sys.stdout.flush()

    return show


def _summary(completion: "Completion") -> str:
    stats = completion.stats
    parts = [
        f"prompt {stats.prompt_tokens} tokens",
        f"first token {stats.ttft_s:.2f} s",
        f"{stats.completion_tokens} tokens" + (f" at {stats.tokens_per_s:.1f} tokens/s" if stats.tokens_per_s else ""),
        f"compile {stats.compile_s:.2f} s",
        f"method {completion.method}",
        f"ended by {completion.finish_reason}",
    ]
    if stats.speculative_decoding is not None:
        tree = stats.speculative_decoding.draft_tree
        parts.append(f"{_tokens_per_pass(stats):.2f} tokens/pass")
        if tree is not None and tree.token_hit_rate is not None:
            parts.append(f"hits {tree.token_hit_rate:.0%}, evaluated {tree.evaluated_hit_rate:.0%}")
        if cut := stats.speculative_decoding.tree_truncated:
            parts.append(f"{cut} of {stats.speculative_decoding.num_spec_steps} searches cut short by depth")
    parts.append(f"{stats.num_programs} programs")
    if stats.seed is not None:
        parts.append(f"seed {stats.seed}")
    lines = [" · ".join(parts)]
    if stats.offload is not None:
        lines.append(_offload_line(stats.offload))
    if completion.method == "swift" and stats.choice is not None and stats.speculative_decoding is not None:
        choice: Any = stats.choice
        lines.append(_swift_line(choice, stats.speculative_decoding))
    if stats.timeline is not None:
        lines.append(_timeline_line(stats.timeline))
    return "\n".join(lines)


def _offload_line(counts: "OffloadStats") -> str:
    rate = counts.bytes / counts.read_s / 1e9 if counts.read_s else 0.0
    parts = [
        f"streamed {counts.bytes / 1e9:.2f} GB in {counts.reads} reads at {rate:.2f} GB/s",
        f"{counts.passes} passes of {counts.pass_s / max(counts.passes, 1):.2f} s",
        f"waited {counts.stalls} times, {counts.stall_s:.2f} s",
    ]
    if counts.experts:
        parts.append(f"{counts.experts_read} of {counts.experts} experts read")
    return " · ".join(parts + ([] if counts.overlap is None else [f"overlap {counts.overlap:.0%}"]))


def _swift_line(choice: "SwiftChoice", counters: "SpeculationStats") -> str:
    parts = [f"{choice.num_skipped} blocks skipped ({choice.layers})"]
    if choice.matchness is not None:
        parts.append(f"matchness {choice.matchness:.0%} after {choice.steps} steps")
        shown = [f"{step}: {score:.2f}" for step, score in choice.history]
        parts.append("matchness over steps " + ", ".join(shown[-SHOWN_HISTORY:]))
    if choice.stopped is not None:
        parts.append(f"search ended: {choice.stopped}")
    parts.append(f"search {choice.search_share:.1%} of the time")
    accepted = counters.num_accepted_draft_tokens
    if counters.num_draft_tokens:
        parts.append(f"{accepted / counters.num_draft_tokens:.0%} of drafted tokens accepted")
    if counters.num_draft_passes:
        parts.append(f"{accepted / counters.num_draft_passes:.0%} of draft steps")
    gain = choice.gain
    parts.append("no gain known yet" if gain is None else f"drafted rounds at {gain:.2f} times the plain speed")
    return " · ".join(parts)


def _timeline_line(summary: "TraceSummary") -> str:
    rounds, passes = summary.rounds, summary.passes
    parts = [f"{rounds} rounds" if passes == rounds else f"{rounds} rounds of {passes} passes"]
    times = {"each": summary.round_s, "pass": summary.pass_s, "sync": summary.sync_s}
    times |= {"transfers": summary.transfer_s, "host": summary.host_s}
    parts += [f"{what} {seconds * 1e3:.2f} ms" for what, seconds in times.items() if seconds is not None]
    parts += [f"{name} {seconds * 1e3:.2f} ms" for name, seconds in summary.program_s.items() if "->" not in name]
    if summary.overlap is not None:
        parts.append(f"overlap {summary.overlap:.0%}")
    parts += [f"{row} idle {share:.0%}" for row, share in summary.idle.items()]
    if summary.draft_tree is not None:
        parts.append(f"nodes kept {summary.draft_tree.nodes_kept}, dropped {summary.draft_tree.nodes_dropped}")
    return " · ".join(parts)
