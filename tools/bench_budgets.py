"""Generation rate against budget: SpecExec's trees beside SpecInfer's, at several temperatures.

    python tools/bench_budgets.py [DRAFT] [--json FILE] [--plot docs/results/budgets.png]

The rate (tokens per target pass, bonus token included) depends on target, draft and text, and on no clock: the run may
share the machine. SpecExec's claim (arXiv 2406.02532, figure 1) is that its rate keeps rising with the budget where the
rate of sampled trees levels off. A rate is all prompts' tokens over all their passes; its 95 % interval comes from
drawing the prompts anew (bootstrap).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxspec
from jaxspec.bench.environment import describe_environment
from jaxspec.bench.prompts import BenchPrompt, load_prompts, select_prompts
from jaxspec.bench.report import RESAMPLES
from jaxspec.methods.base import Method

TEMPERATURES = (0.0, 0.6)
SPECEXEC = (1, 4, 16, 64, 256, 1024)
# About as many tokens each, in the shapes of SpecInfer's paper: branches near the root, then chains.
SPECINFER = {
    1: (1,),
    4: (1, 1, 1, 1),
    16: (2, 1, 1, 1, 1, 1, 1, 1),
    60: (4, 2, 1, 1, 1, 1, 1, 1),
    232: (8, 4, 1, 1, 1, 1, 1, 1),
    976: (16, 4, 2, 1, 1, 1, 1, 1, 1),
}


def main() -> None:
    """Measure, print a table, write the numbers and the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", nargs="?", help="checkpoint of a draft model [the shipped one]")
    parser.add_argument("--max-prompts", type=int, default=6, help="of the mini suite, evenly over its categories")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--largest", type=int, default=1024, help="largest budget")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()

    prompts = select_prompts(load_prompts(None), None, arguments.max_prompts)
    methods: dict[tuple[str, int], Method] = {
        **{("specexec", budget): jaxspec.SpecExec(budget) for budget in SPECEXEC if budget <= arguments.largest},
        **{("specinfer", n): jaxspec.SpecInfer(shape) for n, shape in SPECINFER.items() if n <= arguments.largest},
    }
    llm = jaxspec.LLM(draft=arguments.draft, method=methods["specexec", 1], session_memory=0)
    rows = []
    for (name, tokens), method in track(methods.items(), description="budgets", console=Console(stderr=True)):
        decoder = llm.with_method(method)
        for temperature in TEMPERATURES:
            counts = [count_passes(decoder, prompt, temperature, arguments.max_tokens) for prompt in prompts]
            rows.append(summarise(name, tokens, temperature, counts))
    report = {
        "draft": llm.draft_path.name if llm.draft_path else None,
        "weights": str(llm.engine.target.weights),
        "prompts": [prompt.question_id for prompt in prompts],
        "max_tokens": arguments.max_tokens,
        "environment": describe_environment(),
        "rates": rows,
    }
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


def count_passes(llm: jaxspec.LLM, prompt: BenchPrompt, temperature: float, max_tokens: int) -> tuple[int, int]:
    """Tokens and target passes of one answer."""
    sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    completion = llm.chat([{"role": "user", "content": prompt.turns[0]}], sampling)
    counters = completion.stats.speculative_decoding
    assert counters is not None
    return completion.stats.completion_tokens, counters["num_spec_steps"]


def summarise(method: str, budget: int, temperature: float, counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Tokens per pass over all prompts, its interval, and what each prompt took."""
    tokens, passes = zip(*counts, strict=True)
    return {
        "method": method,
        "budget": budget,
        "temperature": temperature,
        "rate": sum(tokens) / sum(passes),
        "interval": pooled_interval(counts),
        "tokens": tokens,
        "passes": passes,
        "per_prompt": [n / rounds for n, rounds in counts],
    }


def pooled_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """95 % interval of all tokens over all passes, by drawing prompts anew with replacement; None for fewer than two.

    The draws are seeded: the same counts give the same interval.
    """
    if len(counts) < 2:
        return None
    tokens, passes = np.asarray(counts, np.float64).T
    drawn = np.random.default_rng(0).integers(0, len(counts), (RESAMPLES, len(counts)))
    low, high = np.percentile(tokens[drawn].sum(axis=1) / passes[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Tokens per pass, a line for each method and temperature."""
    for method in ("specexec", "specinfer"):
        mine = [row for row in rows if row["method"] == method]
        table = Table(title=f"{method}: tokens per target pass by budget")
        table.add_column("temperature")
        for budget in dict.fromkeys(row["budget"] for row in mine):
            table.add_column(str(budget), justify="right")
        for temperature in TEMPERATURES:
            table.add_row(str(temperature), *(f"{r['rate']:.2f}" for r in mine if r["temperature"] == temperature))
        Console().print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The same as curves."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(1, len(TEMPERATURES), figsize=(9, 3.6), sharey=True)
    for axis, temperature in zip(axes, TEMPERATURES, strict=True):
        for method, marker in (("specexec", "o"), ("specinfer", "s")):
            mine = [row for row in rows if (row["method"], row["temperature"]) == (method, temperature)]
            budgets, rates = [row["budget"] for row in mine], [row["rate"] for row in mine]
            axis.plot(budgets, rates, marker=marker, label=method)
            if all(row["interval"] for row in mine):
                low, high = zip(*(row["interval"] for row in mine), strict=True)
                axis.fill_between(budgets, low, high, alpha=0.15)
        axis.set(xscale="log", xlabel="budget (draft tokens per target pass)", title=f"temperature {temperature}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens per target pass")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
