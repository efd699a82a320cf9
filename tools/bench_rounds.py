"""What a round costs outside its passes, and what rows cost, against the roofline: interleaved in one run on CPU.

    python tools/bench_rounds.py DRAFT [--budgets 15,1024] [--repeats 7] [--json FILE]

The default model in float32, greedy, one sequence. Each repeat runs every measurement once, in turn; ratios are taken
within a repeat and their median is reported. Nothing is compiled inside a measurement.

  roofline   a chain of matrix-vector products that reads every weight once and does nothing else
  pass T     one target pass over T rows, head included, at 256 tokens of context
  round K    a SpecExec round of budget K, from one read token to the next
  passes K   the passes inside such a round, run alone: the target's, and as many of the draft's as the round ran
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxspec
from jaxspec.bench.microbench import roofline_pass, time_pass, time_target_pass

CONTEXT = 256
ROWS = (1, 8, 16)


def main() -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="checkpoint of a draft model")
    parser.add_argument("--budgets", default="15,1024")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one sample of rounds, at least 3 rounds")
    parser.add_argument("--json", type=Path, help="write all samples and medians here")
    arguments = parser.parse_args()

    budgets = [int(budget) for budget in arguments.budgets.split(",")]
    llm = jaxspec.LLM(dtype="float32", draft=arguments.draft, method=jaxspec.SpecExec(budgets[0]), session_memory=0)
    report = measure(llm, budgets, arguments.repeats, arguments.seconds)
    print_report(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(llm: jaxspec.LLM, budgets: list[int], repeats: int, seconds: float) -> dict[str, Any]:
    """Samples of every measurement, in seconds, and the ratios between those of one repeat."""
    roofline = roofline_pass(llm.params, llm.kernels)
    target = llm.engine.models.target
    passes = {rows: time_pass(target, llm.params, rows, CONTEXT) for rows in ROWS}
    rounds = {budget: RoundTimer(llm, budget, seconds) for budget in budgets}
    runs: dict[str, Callable[[], float]] = {"roofline": roofline}
    runs |= {f"pass {rows}": run for rows, run in passes.items()}
    for run in (*runs.values(), *(timer.run_with_parts for timer in rounds.values())):
        run()
    samples: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        samples.setdefault(name, []).append(seconds)

    for _ in track(range(repeats), "Measuring"):
        for name, run in runs.items():
            add(name, run())
        for budget, timer in rounds.items():
            whole, parts = timer.run_with_parts()
            add(f"round {budget}", whole)
            add(f"passes {budget}", parts)
    ratios = {f"pass {rows} / roofline": divide(samples[f"pass {rows}"], samples["roofline"]) for rows in ROWS}
    for budget in budgets:
        share = divide(samples[f"passes {budget}"], samples[f"round {budget}"])
        ratios[f"round {budget}, share outside the passes"] = [1 - s for s in share]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"jax": jax.__version__},
        "draft_passes_per_round": {budget: timer.passes_per_round for budget, timer in rounds.items()},
        "seconds": {name: spread(values) for name, values in samples.items()},
        "ratios": {name: spread(values) for name, values in ratios.items()},
    }


class RoundTimer:
    """Times SpecExec rounds of one budget, and the passes that they hold."""

    def __init__(self, llm: jaxspec.LLM, budget: int, seconds: float):
        """Compile everything that a round needs."""
        self.method = jaxspec.SpecExec(budget)
        self.llm = llm.with_method(self.method)
        self.passes_per_round = 0.0
        models = self.llm.engine.models
        assert models.draft is not None and self.llm.draft_params is not None
        self._target = time_target_pass(models.target, self.llm.params, self.method.num_rows, CONTEXT)
        rows, levels = self.method.draft_rows, self.method.max_path
        self._draft = time_pass(models.draft, self.llm.draft_params, rows, CONTEXT, levels=levels)
        self._root = time_pass(models.draft, self.llm.draft_params, 2, CONTEXT)
        self._prompt = np.random.default_rng(0).integers(5, 40_000, CONTEXT).tolist()
        self._seconds = seconds
        self._sampling = jaxspec.SamplingParams(max_tokens=1500, ignore_eos=True)

    def run(self) -> float:
        """Seconds of a round: mean over those of a generation but the first."""
        passes: list[int] = []
        with self.llm.engine.open(self.llm.model_params, self._prompt, self._sampling, seed=0) as session:
            session.step()
            start = time.perf_counter()
            while (seconds := time.perf_counter() - start) < self._seconds or len(passes) < 3:
                passes.append(session.step().draft_passes)
        self._target()  # waits for the round that the engine has dispatched ahead
        self.passes_per_round = statistics.mean(passes)
        return seconds / len(passes)

    def run_with_parts(self) -> tuple[float, float]:
        """Seconds of a round, and of its passes alone: measured before and after the rounds, and averaged."""

        def parts() -> float:
            # A loop runs whole passes; their mean number is not whole.
            further = round(self.passes_per_round - 1)
            scale = (self.passes_per_round - 1) / further if further else 0
            return self._target() + self._root() + scale * self._draft(further)

        if not self.passes_per_round:
            self.run()
        before = parts()
        whole = self.run()
        return whole, (before + parts()) / 2


def divide(above: list[float], below: list[float]) -> list[float]:
    """Ratios within each repeat."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_report(report: dict[str, Any]) -> None:
    """Tables for people."""
    Console().print(f"draft passes per round: {report['draft_passes_per_round']}")
    print_tables(report)


def print_tables(report: dict[str, Any]) -> None:
    """The machine, and seconds and ratios by name."""
    console = Console()
    console.print(f"{report['machine']}; {report['versions']}")
    for title, unit, scale in (("seconds", "ms", 1e3), ("ratios", "", 1.0)):
        table = Table(title=f"{title} {unit}".strip())
        for column in ("measurement", "median", "min", "max"):
            table.add_column(column, justify="left" if column == "measurement" else "right")
        for name, values in report[title].items():
            table.add_row(name, *(f"{values[key] * scale:.3f}" for key in ("median", "min", "max")))
        console.print(table)


if __name__ == "__main__":
    main()
