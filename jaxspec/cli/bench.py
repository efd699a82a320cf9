"""`jaxspec-bench`: decoding methods side by side on the same prompts."""

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.cli.options import (
    MEASURED_ENGINE,
    MODEL,
    PROCESSES,
    ReportOption,
    check_output,
    finds_draft,
    has_own_devices,
    is_streamed,
    merge_options,
    model_options,
    options_of,
    sampling_options,
    setting_types,
)
from jaxspec.cli.processes import processes_from, ran_as_worker
from jaxspec.cli.progress import Bar, table_console, write_report
from jaxspec.cli.run import command, interrupts_noted, leave_after_interrupt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError

NAME = "jaxspec-bench"

SAMPLED = options_of(
    SamplingParams, "max_tokens", "temperature", "top_p", "seed", "ignore_eos",
    max_tokens=128, temperature=0.0, top_p=1.0, seed=0, ignore_eos=False,
)  # fmt: skip


@command(NAME, MODEL, SAMPLED, MEASURED_ENGINE, PROCESSES)
def app(
    given: dict[str, Any],
    methods: Annotated[
        str | None,
        typer.Option("--methods", "--method", help="By comma; ar is always measured [all that fit the models]."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of question_id, category and turns [a suite of forty prompts].")
    ] = None,
    categories: Annotated[str | None, typer.Option(help="Categories of prompts, by comma [all].")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Most prompts, of all categories in turn.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed answers of each method to each prompt.")] = 3,
    budgets: Annotated[
        str | None, typer.Option(help="Tree sizes of specexec in draft tokens, by comma: a column each.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of a method, as method.name=value; repeatable.")
    ] = None,
    json_: ReportOption = None,
    glossary: Annotated[bool, typer.Option("--glossary", help="Explain every column after the tables.")] = False,
) -> None:
    """Measure decoding methods side by side on the same prompts, in one process, everything warm.

    An interrupt (Ctrl-C) ends the run after the answer in progress and reports what is complete.
    """
    out = check_output(json_)
    # Heavy imports only now: --help and usage errors answer at once.
    from jaxspec.bench.columns import default_methods, loading_method, make_columns
    from jaxspec.bench.prompts import load_prompts, select_prompts
    from jaxspec.bench.report import make_report
    from jaxspec.bench.run import measure
    from jaxspec.bench.tables import print_report
    from jaxspec.llm import LLM

    given = {"target_devices": 1} | given
    wanted = None if categories is None else _split_list(categories, "--categories")
    chosen = select_prompts(load_prompts(prompts), wanted, max_prompts)
    sampling = sampling_options(given)
    drafting = finds_draft(given)
    own = has_own_devices(given)
    names = default_methods(drafting, own, is_streamed(given)) if methods is None else _split_list(methods, "--methods")
    columns = make_columns(names, _parse_settings(set_ or []), _parse_budgets(budgets))
    method = loading_method(columns, drafting, "draft_model" in given, own)

    llm = LLM(**model_options(given), method=method, session_memory=0, distributed=processes_from(given))
    if ran_as_worker(llm, NAME):
        return
    with interrupts_noted() as noted, Bar() as bar:
        measured = measure(llm, columns, chosen, sampling, repeats, bar.show, noted.is_set)
    draft = None if llm.draft_path is None else str(llm.draft_path)
    line = shlex.join([NAME, *sys.argv[1:]])
    report = make_report(measured, line, str(llm.model_path), draft, given["target_devices"])
    try:
        write_report(report, out)  # before the tables: their reader may leave early, as `head` does
    finally:
        print_report(report, table_console(out), glossary)  # a full disk must not cost the tables
    if measured.interrupted:
        leave_after_interrupt()


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
