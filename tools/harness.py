"""Shared by the benchmarks: command line, interleaved samples, tables and reports."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from jaxspec.bench.prompts import BenchPrompt, load_prompts, select_prompts
from jaxspec.bench.report import describe_environment


def make_parser(doc: str | None, max_prompts: int | None = None, max_tokens: int = 64) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring, with --json, and --max-prompts and --max-tokens if they have a default.

    Its options are read with `parse_args`; `read_prompts` gives the prompts that they name.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    if max_prompts is not None:
        parser.add_argument("--max-prompts", type=int, default=max_prompts, help="of all categories in turn")
        parser.add_argument("--max-tokens", "-n", type=int, default=max_tokens, help="most tokens of an answer")
    return parser


def numbers(text: str) -> list[int]:
    """Integers with commas between them, as an option's type."""
    return [int(word) for word in text.split(",")]


def read_prompts(arguments: argparse.Namespace) -> list[BenchPrompt]:
    """`--max-prompts` prompts of the suite, evenly over its categories."""
    return select_prompts(load_prompts(), None, arguments.max_prompts)


def conversation(prompt: BenchPrompt) -> list[dict[str, str]]:
    """The messages of a prompt's first turn."""
    return [{"role": "user", "content": prompt.turns[0]}]


def interleave(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Samples of every run, in seconds: each runs once to warm up, then all run in turn in every repeat."""
    console = Console(stderr=True)
    for run in track(runs.values(), "Warming up", console=console):
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(repeats), "Measuring", console=console):
        for name, run in runs.items():
            samples[name].append(run())
    return samples


def make_ratios(samples: Mapping[str, Sequence[float]], pairs: Mapping[str, tuple[str, str]]) -> dict[str, list[float]]:
    """Ratios within each repeat, by name; a pair of which a run was not measured is left out."""
    return {
        name: [a / b for a, b in zip(samples[above], samples[below], strict=True)]
        for name, (above, below) in pairs.items()
        if above in samples and below in samples
    }


def spread_rows(named: Mapping[str, Sequence[float]], scale: float = 1.0) -> list[list[str]]:
    """Rows of a table: a name, the median, and the extremes, multiplied by `scale`."""
    return [
        [name, *(f"{scale * each:.2f}" for each in (statistics.median(values), min(values), max(values)))]
        for name, values in named.items()
    ]


def make_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column holds names, the others numbers."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def environment_line() -> str:
    """Machine, devices and versions, in one line."""
    found = describe_environment()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['machine']}; {found['device']}; {versions}"


def write_report(path: Path | None, **report: Any) -> None:
    """Write numbers with their environment as JSON; does nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"environment": describe_environment(), **report}, indent=1) + "\n", "utf-8")
