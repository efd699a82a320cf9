"""Tables of a report, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxspec.bench.report import MIN_RATED_TOKENS
from jaxspec.bench.run import BASELINE

# Percentiles of fewer prompts say nothing about the prompts between them.
MIN_PERCENTILE_PROMPTS = 20
SHOWN_DIFFERENCES = 5

GLOSSARY = {
    "tokens/s": "tokens received after the first dispatch, per second from the first dispatch to the last; per prompt "
    "the median over repeats, then the mean over prompts (± standard deviation of that mean between repeats).",
    "rated prompts": f"those with at least {MIN_RATED_TOKENS} tokens (or all that are allowed) after plain decoding's "
    "first dispatch. Tokens/s and speed-up are over these. A method that answers in one dispatch has no rate there; "
    "its own number of prompts n then stands beside its tokens/s.",
    "speed-up": "tokens/s over that of plain decoding with several tokens per dispatch, within one repeat of the same "
    "prompt; median over repeats, then mean over prompts, with a bootstrap 95 % interval over prompts.",
    "whole call": "the same ratio for all tokens over the whole call, prefill included; over all prompts.",
    "acceptance length": "tokens received per target pass, bonus token included; 1.00 is plain decoding.",
    "accepted": "draft tokens accepted over draft tokens proposed.",
    "TTFT": "time to the first token, prefill included and compiling not; mean over prompts of the median over "
    "repeats.",
    "exact": "prompts with plain decoding's own tokens in every repeat (plain decoding: those of its first repeat); "
    "'distribution' where the method promises the distribution only, '-' for other libraries.",
    "ms per pass": "time after the first dispatch per target pass. Target and draft are the same passes, timed alone "
    "with as many rows; rest is the difference. A rest below zero (passes overlap, or the machine's speed drifted) "
    "is shown as '-'.",
    "GB/s": "bytes of all weights times target passes, per second after the first dispatch. The roofline reads every "
    "weight once in a chain of matrix-vector products and does nothing else. Of a mixture of experts both count the "
    "experts of one row, whatever a pass of several rows reads.",
}


def print_report(report: dict[str, Any], console: Console, glossary: bool = False) -> None:
    """Tables for people: speed over all prompts, by category, the parts of a pass, notes, and where it was measured."""
    console.print(_speed_table(report))
    if len(report["categories"]) > 1:
        console.print(_category_table(report))
    if any(row["split"] for row in report["overall"]["columns"].values()):
        console.print(_time_table(report))
    for line in [*_notes(report), *_footer(report)]:
        console.print(line, markup=False, highlight=False)
    for name, definition in GLOSSARY.items() if glossary else ():
        console.print(f"{name}: {definition}", style="dim", markup=False, highlight=False)


def speed_cells(row: Mapping[str, Any]) -> list[str]:
    """Tokens/s, speed-up with its interval, and acceptance length of a column: the cells that all tables share."""
    rate, length = row["tokens_per_s"], row["acceptance_length"]
    return [f"{rate['mean']:.1f}" if rate else "-", format_ratio(row["speedup"]), f"{length:.2f}" if length else "-"]


def format_ratio(found: Mapping[str, Any] | None) -> str:
    """A mean ratio with its interval, where there is one."""
    if found is None:
        return "-"
    # Plain decoding over itself is 1 without an interval.
    sure = found["low"] is None or found["low"] == found["high"]
    bounds = "" if sure else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['mean']:.2f}{bounds}"


def make_table(title: str, columns: Sequence[str]) -> Table:
    """An empty table whose first column holds names and whose others hold numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    return table


def _speed_table(report: dict[str, Any]) -> Table:
    kind = "greedy" if report["sampling"]["temperature"] == 0 else f"temperature {report['sampling']['temperature']}"
    group, rated = report["overall"], report["overall"]["rated_prompts"]
    title = f"{kind}, {_count(group)}, answers of up to {report['sampling']['max_tokens']} tokens"
    percentiles = rated >= MIN_PERCENTILE_PROMPTS
    names = ["method", "tokens/s", "speed-up (95 %)", "acceptance length", "accepted", "whole call", "TTFT ms", "exact"]
    table = make_table(title, [*names, "p5 to p95 of tokens/s"][: len(names) + percentiles])
    for label, row in group["columns"].items():
        rate, exact = row["tokens_per_s"], row["exact"]
        cells = speed_cells(row)
        if rate and rate["repeat_std"] is not None:
            cells[0] += f" ± {rate['repeat_std']:.1f}"
        if rate and row["rated_prompts"] != rated:
            cells[0] += f" (n={row['rated_prompts']})"
        promises = {"tokens": f"{exact['equal']}/{exact['prompts']}", "none": "-"}
        cells += [_percent(row["draft_acceptance_rate"]), f"{row['call_speedup']['mean']:.2f}"]
        cells += [f"{row['ttft_s']['mean'] * 1e3:.0f}", promises.get(exact["promise"], exact["promise"])]
        if percentiles:
            cells.append(f"{rate['p5']:.1f} to {rate['p95']:.1f}" if rate else "-")
        table.add_row(escape(label), *cells)
    return table


def _category_table(report: dict[str, Any]) -> Table:
    table = make_table("by category", ("method", "tokens/s", "speed-up (95 %)", "acceptance length", "exact"))
    for name, group in report["categories"].items():
        table.add_row(f"[bold]{escape(name)}[/] [dim]({_count(group)})[/]")
        for label, row in group["columns"].items():
            exact = row["exact"]
            equal = f"{exact['equal']}/{exact['prompts']}" if exact["promise"] == "tokens" else "-"
            table.add_row("  " + escape(label), *speed_cells(row), equal)
        table.add_section()
    return table


def _time_table(report: dict[str, Any]) -> Table:
    names = ("method", "ms per pass", "target ms", "draft ms", "rest ms", "GB/s", "of roofline", "compile s")
    table = make_table("parts of a target pass, all prompts", names)
    for column in report["columns"]:
        row = report["overall"]["columns"][column["label"]]
        split, share = row["split"], row["of_roofline"]
        parts = [f"{1e3 * split[part]:.2f}" for part in ("pass_s", "target_s", "draft_s")] if split else ["-"] * 3
        table.add_row(
            escape(column["label"]), *parts, f"{1e3 * split['rest_s']:.2f}" if split and split["rest_s"] >= 0 else "-",
            f"{row['gb_per_s']:.1f}" if row["gb_per_s"] else "-", _percent(share if (share or 0) <= 1 else None),
            f"{column['compile_s']:.1f}",
        )  # fmt: skip
    return table


def _count(group: Mapping[str, Any]) -> str:
    rated = "" if group["rated_prompts"] == group["prompts"] else f", {group['rated_prompts']} rated"
    return f"{group['prompts']} prompt{'s'[: group['prompts'] > 1]}{rated}"


def _notes(report: dict[str, Any]) -> list[str]:
    """Findings that a reader must not miss."""
    lines = []
    if report["interrupted"]:
        lines.append(f"interrupted: the numbers are of the {len(report['samples'])} answers that were complete")
    for label, row in report["overall"]["columns"].items():
        speedup = row["speedup"]
        if label != BASELINE and speedup and speedup["high"] is not None and speedup["high"] < 1:
            lines.append(f"{label} is slower than plain decoding here: {speedup['mean']:.2f} times its speed.")
    for label in report["overall"]["columns"]:
        found = {d["question_id"]: d for d in reversed(report["differences"]) if d["label"] == label}
        for d in [*found.values()][::-1][:SHOWN_DIFFERENCES]:
            place = f"token {d['token']}" + (f" of turn {d['turn']}" if d["turn"] else "")
            lines.append(
                f"{label} differs from plain decoding at {place} of prompt {d['question_id']} (repeat {d['repeat']})."
            )
        if len(found) > SHOWN_DIFFERENCES:
            lines.append(f"{label} differs in {len(found) - SHOWN_DIFFERENCES} more prompts.")
    if report["differences"]:
        lines.append("jaxspec-check tells ties within rounding from faults.")
    if report["answers_that_compiled"]:
        lines.append(f"{report['answers_that_compiled']} timed answers compiled something, which slowed them down.")
    return lines


def _footer(report: dict[str, Any]) -> list[str]:
    environment, roofline = report["environment"], report["roofline"]
    peak = environment["peak_device_bytes"] or environment["peak_host_bytes"]
    eos = "ignored" if report["sampling"]["ignore_eos"] else "respected"
    return [
        (
            f"roofline {roofline['gb_per_s']:.1f} GB/s over {report['weight_bytes'] / 1e6:.0f} MB of weights · "
            if roofline
            else ""
        )
        + f"single passes at {report['pass_context']} tokens of context · {report['repeats']} repeats, columns "
        f"interleaved · end-of-sequence tokens {eos}" + (f" · peak memory {peak / 1e9:.1f} GB" if peak else ""),
        f"{environment['device']} · {environment['machine']} · "
        + ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        report["command"],
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"
