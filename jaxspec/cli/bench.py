"""`jaxspec-bench`: decoding methods side by side on the same prompts."""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.cli.offload import DeviceMemoryOption, OffloadOption, ResidentLayersOption, offload_from
from jaxspec.cli.options import (
    ACTIVATIONS_HELP,
    KERNELS_HELP,
    KV_DTYPE_HELP,
    check_output,
    merge_options,
    setting_types,
)
from jaxspec.cli.processes import (
    CoordinatorOption,
    DraftProcessOption,
    NumProcessesOption,
    ProcessIdOption,
    processes_from,
    ran_as_worker,
)
from jaxspec.cli.progress import Bar
from jaxspec.cli.run import VersionOption, interrupts_noted, leave_after_interrupt, run_app, run_command
from jaxspec.errors import ConfigError

NAME = "jaxspec-bench"

PIPE_WIDTH = 132  # tables need this much room; a file or a pipe has it

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Hugging Face folder, GGUF file or native checkpoint [the default model]."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="Checkpoint of a draft model.")] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", "--method", help="By comma; ar is always measured [all that fit the models]."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of question_id, category and turns [a suite of forty prompts].")
    ] = None,
    categories: Annotated[str | None, typer.Option(help="Categories of prompts, by comma [all].")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Most prompts, of all categories in turn.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "--temp", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random stream of every answer at temperature > 0.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed answers of each method to each prompt.")] = 3,
    budgets: Annotated[
        str | None, typer.Option(help="Tree sizes of specexec in draft tokens, by comma: a column each.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of a method, as method.name=value; repeatable.")
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON object with all samples here; - is standard output.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kernels: Annotated[str, typer.Option(help=KERNELS_HELP)] = "auto",
    activations: Annotated[str, typer.Option(help=ACTIVATIONS_HELP)] = "auto",
    kv_dtype: Annotated[str, typer.Option(help=KV_DTYPE_HELP)] = "auto",
    target_devices: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    draft_devices: Annotated[
        int | None, typer.Option(min=1, help="Devices of its own for the draft; for swiftspec [the target's].")
    ] = None,
    draft_platform: Annotated[
        str | None, typer.Option(help="Where the draft's devices are, if not where the target's are: cpu.")
    ] = None,
    offload: OffloadOption = None,
    device_memory: DeviceMemoryOption = None,
    resident_layers: ResidentLayersOption = None,
    coordinator: CoordinatorOption = None,
    num_processes: NumProcessesOption = None,
    process_id: ProcessIdOption = None,
    draft_process: DraftProcessOption = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answer --max-tokens tokens always.")
    ] = False,
    glossary: Annotated[bool, typer.Option("--glossary", help="Explain every column after the tables.")] = False,
    version: VersionOption = False,
) -> None:
    """Measure decoding methods side by side on the same prompts, in one process, everything warm.

    An interrupt (Ctrl-C) ends the run after the answer in progress and reports what is complete.
    """

    def run() -> None:
        out = check_output(json_)
        from rich.console import Console  # heavy imports only now: --help and usage errors answer at once

        from jaxspec.bench.columns import default_methods, loading_method, make_columns
        from jaxspec.bench.prompts import load_prompts, select_prompts
        from jaxspec.bench.report import make_report
        from jaxspec.bench.run import measure
        from jaxspec.bench.tables import print_report
        from jaxspec.config import SamplingParams
        from jaxspec.llm import LLM
        from jaxspec.opening import has_draft

        wanted = None if categories is None else _split_list(categories, "--categories")
        chosen = select_prompts(load_prompts(prompts), wanted, max_prompts)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
        )
        drafting = has_draft(model, draft_model)
        own = draft_devices is not None or draft_platform is not None
        streamed = offload not in (None, "none")
        names = default_methods(drafting, own, streamed) if methods is None else _split_list(methods, "--methods")
        columns = make_columns(names, _parse_settings(set_ or []), _parse_budgets(budgets))
        method = loading_method(columns, drafting, draft_model is not None, own)

        llm = LLM(
            model, draft=draft_model, method=method, dtype=dtype, kernels=kernels,  # pyright: ignore[reportArgumentType]
            activations=activations, kv_dtype=kv_dtype,  # pyright: ignore[reportArgumentType]
            target_devices=target_devices, draft_devices=draft_devices, draft_platform=draft_platform,
            session_memory=0, distributed=processes_from(context.params), **offload_from(context.params),
        )  # fmt: skip
        if ran_as_worker(llm, NAME):
            return
        with interrupts_noted() as noted, Bar() as bar:
            measured = measure(llm, columns, chosen, sampling, repeats, bar.show, noted.is_set)
        draft = None if llm.draft_path is None else str(llm.draft_path)
        command = shlex.join([NAME, *sys.argv[1:]])
        report = make_report(measured, command, str(llm.model_path), draft, target_devices)
        to_stdout = out is not None and str(out) == "-"
        console = Console(stderr=to_stdout)
        if not console.is_terminal:
            console = Console(stderr=to_stdout, width=PIPE_WIDTH)
        try:
            # Before the tables: their reader may leave early, as `head` does. A full disk must not cost the tables.
            if out is not None:
                text = json.dumps(report, ensure_ascii=False, allow_nan=False, default=str)
                print(text) if to_stdout else out.write_text(text + "\n", encoding="utf-8")
        finally:
            print_report(report, console, glossary)
        if measured.interrupted:
            leave_after_interrupt()

    run_command(NAME, run)


def main() -> None:
    """Entry point."""
    run_app(app, NAME)


def _split_list(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} {text!r} must be names with commas between them")
    return names


def _parse_budgets(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in _split_list(text, "--budgets")]
    except ValueError as error:
        raise ConfigError(f"--budgets {text!r} must be whole numbers with commas between them") from error


def _parse_settings(assignments: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    """Settings by method name, checked against the types of the method's own defaults."""
    from jaxspec.bench.columns import make_method

    by_method: dict[str, list[str]] = {}
    for assignment in assignments:
        name, dot, rest = assignment.partition(".")
        if not dot or "=" in name:
            raise ConfigError(f"--set {assignment!r} must have the form method.name=value")
        by_method.setdefault(name.strip(), []).append(rest)
    settings = {}
    for name, pairs in by_method.items():
        method = make_method(name)
        known = setting_types(method)
        if not known:
            raise ConfigError(f"--set {name}.{pairs[0]}: method {name!r} has no settings")
        settings[name] = merge_options({}, None, pairs, known)
    return settings
