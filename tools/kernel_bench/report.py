"""A benchmark's result as a page of Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from kernel_bench.parts import list_unmeasured
from kernel_bench.targets import best_kernel, speedup

OUTCOMES = ("passed", "failed", "skipped")
WORDS = {True: "met", False: "missed", None: "not measured"}


def render(result: dict[str, Any]) -> str:
    """The whole page: targets first, then kernels, steps, decoding, and what went wrong."""
    parts, bandwidth = result["parts"], result["bandwidth"]
    lines = [
        f"# GPU kernels on {result['device']}",
        "",
        f"`{result['command']}`, {result['seconds']:.0f} s. {result['environment']}",
        "",
        f"Memory bandwidth: {_rate(bandwidth['published'])} published, {_rate(bandwidth['measured'])} by a copy; "
        "shares are of the published one where it is known.",
        "",
        *_table(
            ("target", "measured", ""),
            [(v["target"], _number(v["measured"]), WORDS[v["met"]]) for v in result["targets"]],
        ),
    ]
    tests = [row for row in parts.get("tests", {}).get("rows", ()) if "passed" in row]
    if tests:
        lines += ["## Tests on the device", "", *_test_table(tests)]
    titles = {"tree_attention": "Tree attention", "swiglu": "Norm and SwiGLU", "linear": "Products by packed weights"}
    for operation, title in titles.items():
        rows = [row for row in parts.get(operation, {}).get("rows", ()) if "times" in row]
        if rows:
            lines += [f"## {title}, µs of device time", "", *_kernel_table(rows, bandwidth["used"])]
    steps = [row for row in parts.get("steps", {}).get("rows", ()) if "seconds" in row]
    if steps:
        lines += ["## Steps with random weights", "", *_step_table(steps, bandwidth["used"])]
    rounds = [row for row in parts.get("rounds", {}).get("rows", ()) if "seconds" in row]
    if rounds:
        lines += [f"## Rounds of {rounds[0]['model']} with random weights", "", *_round_table(rounds)]
    decoded = [row for row in parts.get("decode", {}).get("rows", ()) if "report" in row]
    for kernels in dict.fromkeys(row["kernels"] for row in decoded):
        reports = [row["report"] for row in decoded if row["kernels"] == kernels]
        lines += [f"## Decoding with kernels {kernels}, {reports[0]['model']}", "", *_decode_table(reports)]
    lines += ["## Parts", "", *_table(("part", "rows", "seconds", ""), [_part(part) for part in parts.values()])]
    unmeasured = [(name, row) for name, part in parts.items() for row in list_unmeasured(part)]
    if unmeasured:
        lines += ["## Not measured", "", *(f"* {name}: {row}" for name, row in unmeasured), ""]
    errors = [("targets", result["error"])] if result["error"] else []
    errors += _errors(parts)
    if errors:
        lines += ["## What failed", "", *(f"* {where}: {' '.join(what.split())}" for where, what in errors), ""]
    return "\n".join(lines)


def _kernel_table(rows: Sequence[dict[str, Any]], bandwidth: float | None) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    cells = []
    for row in rows:
        auto, best = row["auto"], best_kernel(row)
        floor = row["bytes"] / bandwidth if bandwidth else None
        reached = row["times"].get(auto)
        sizes = " ".join(f"{name}={size}" for name, size in row["sizes"].items())
        cells.append((
            row["model"], sizes,
            *(_timing(row["times"].get(name)) for name in names),
            auto, _number(speedup(row, auto)), best or "-", _number(speedup(row, best)),
            "" if floor is None else f"{floor * 1e6:.1f}",
            f"{floor / reached['seconds']:.0%}" if floor and reached else "",
        ))  # fmt: skip
    head = ("model", "sizes", *names, "auto", "XLA / auto", "best", "XLA / best", "roofline", "auto of it")
    return _table(head, cells)


def _test_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [(row["name"], *(str(row[outcome]) for outcome in OUTCOMES)) for row in rows]
    return _table(("file", *OUTCOMES), cells)


def _step_table(rows: Sequence[dict[str, Any]], bandwidth: float | None) -> list[str]:
    single = {(row["kernels"], row["prefix"]): row["seconds"] for row in rows if row["rows"] == 1}
    cells = []
    for row in rows:
        alone, seconds = single.get((row["kernels"], row["prefix"])), row["seconds"]
        share = f"{row['bytes'] / seconds / bandwidth:.0%}" if bandwidth and seconds else ""
        cells.append((
            row["model"], row["kernels"], str(row["prefix"]), str(row["rows"]), f"{seconds * 1e3:.3f}",
            _number(seconds / alone if alone else None), share,
        ))  # fmt: skip
    return _table(("model", "kernels", "prefix", "T", "ms", "of T=1", "of bandwidth"), cells)


def _round_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    cells = [
        (
            row["name"].removeprefix("rounds, "), f"{row['tokens']:.1f}", f"{row['seconds'] * 1e3:.2f}",
            f"{row['seconds_per_token'] * 1e3:.2f}", f"{row['busy_s'] * 1e3:.2f}",
            "-" if row["idle"] is None else f"{row['idle']:.0%}", f"{row['launches']:.0f}",
            f"{row['copies_to_host']:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    head = ("round", "tokens", "ms", "ms a token", "busy ms", "idle", "launches", "copies to the host")
    return _table(head, cells)


def _decode_table(reports: Sequence[dict[str, Any]]) -> list[str]:
    # Plain decoding stands beside every method; it is shown once.
    columns = {label: column for report in reports for label, column in report["overall"]["columns"].items()}
    cells = []
    for label, column in columns.items():
        rate, gain = column["tokens_per_s"], column["speedup"]
        cells.append((
            label, _number(rate and rate["mean"]), _number(gain and gain["mean"]),
            _number(column["acceptance_length"]), f"{column['exact']['equal']}/{column['exact']['prompts']}",
        ))  # fmt: skip
    return _table(("method", "tokens/s", "speed-up", "acceptance length", "same tokens"), cells)


def _part(part: dict[str, Any]) -> tuple[str, ...]:
    return part["part"], str(len(part["rows"])), f"{part['seconds']:.0f}", part["stopped"] or ""


def _errors(parts: dict[str, dict[str, Any]]) -> Iterable[tuple[str, str]]:
    for name, part in parts.items():
        if part["error"]:
            yield name, part["error"]
        for row in part["rows"]:
            if row.get("error"):
                yield row["name"], row["error"]
            for kernels, error in (row.get("errors", {}) | row.get("missing", {})).items():
                yield f"{row['name']}, {kernels}", error


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def _timing(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return "-"
    # Where the profiler saw nothing the time is a clock's, with gaps.
    launches = f" ({timing['launches']:.0f})" if timing["launches"] else f" {timing['method']}"
    return f"{timing['seconds'] * 1e6:.1f}{launches}"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value / 1e9:.0f} GB/s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
