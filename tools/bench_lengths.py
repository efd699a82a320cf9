"""Acceptance lengths (tokens per target pass, bonus token included) of many settings of the tree methods.

    python tools/bench_lengths.py budgets [--plot docs/results/budgets.png]
    JAX_NUM_CPU_DEVICES=2 python tools/bench_lengths.py depths [--depths 1,2,3] [--refills 0,1] [--drop]
    JAX_NUM_CPU_DEVICES=2 python tools/bench_lengths.py rankings

`budgets` sweeps the size of SpecExec's and SpecInfer's trees. `depths` compares SwiftSpec's trees that grow beside
verification with trees grown in turn; with --drop also trees that no round keeps. `rankings` compares what trees are
ranked by at a temperature above 0. SwiftSpec's target and draft have a device each.

Once a schedule is given, a length depends on no clock: the run may share the machine. Lengths are pooled: all tokens
over all passes. Their 95 % intervals come from drawing the prompts anew. With --log a stopped run goes on from that
file. With --timed the speeds of the same settings are measured instead, interleaved; nothing else should run then.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import (
    AnswerLog,
    conversation,
    digest_of,
    environment_line,
    format_interval,
    make_parser,
    make_table,
    numbers,
    pooled_interval,
    read_prompts,
    write_report,
)
from rich.console import Console
from rich.progress import track

import jaxspec
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import make_report
from jaxspec.bench.run import BASELINE, Column, measure
from jaxspec.llm import internals
from jaxspec.methods.base import Method
from jaxspec.methods.core.proposals import RANKINGS

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
APART = {"target_devices": 1, "draft_devices": 1}


class Row(NamedTuple):
    """One setting at one temperature, over all prompts."""

    label: str
    temperature: float
    tokens: list[int]  # of each prompt's answer
    passes: list[int]  # target passes of each answer
    categories: dict[str, float]  # length by kind of prompt
    length: float
    interval: tuple[float, float] | None
    exposed: float | None  # draft passes per round that the target waits for; None without a tree that stays
    hit: float | None  # share of rounds whose new root the draft had evaluated
    equal: bool  # whether all answers are plain decoding's


def budgets(arguments: argparse.Namespace) -> dict[str, Method]:
    """Trees by size."""
    trees: dict[str, Method] = {f"specexec {n}": jaxspec.SpecExec(n) for n in SPECEXEC if n <= arguments.largest}
    return trees | {
        f"specinfer {n}": jaxspec.SpecInfer(shape) for n, shape in SPECINFER.items() if n <= arguments.largest
    }


def depths(arguments: argparse.Namespace) -> dict[str, Method]:
    """SwiftSpec's schedules."""
    schedules: dict[str, Method] = {"default": jaxspec.SwiftSpec()}
    for depth in arguments.depths:
        schedules[f"in turn, depth {depth}"] = jaxspec.SwiftSpec(depth=depth, overlap=False, reuse=False)
    for keep in (True, *([False] * arguments.drop)):
        for refill in arguments.refills:
            for depth in arguments.depths:
                name = f"beside{'' if keep else ', dropped'}, depth {depth}, refill {refill}"
                schedules[name] = jaxspec.SwiftSpec(depth=depth, refill=refill, reuse=keep)
    return schedules


def rankings(arguments: argparse.Namespace) -> dict[str, Method]:
    """SwiftSpec's trees by what ranks them; where speed is measured SpecExec's, too."""
    shapes: dict[str, Any] = {
        "beside": {"depth": 6, "refill": 1},
        "in turn": {"depth": 3, "overlap": False, "reuse": False},
    }
    ranked: dict[str, Method] = {
        f"{name} {kind}": jaxspec.SwiftSpec(ranking=kind, **shape)
        for name, shape in shapes.items()
        for kind in RANKINGS
    }
    return ranked | (
        {f"specexec {kind}": jaxspec.SpecExec(ranking=kind) for kind in RANKINGS} if arguments.timed else {}
    )


# By suite: its settings, the method that models are loaded with and where, the temperatures.
SUITES = {
    "budgets": (budgets, "specexec", {}, (0.0, 0.6)),
    "depths": (depths, "swiftspec", APART, (0.0,)),
    "rankings": (rankings, "swiftspec", APART, (0.6, 1.0)),
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table, write numbers and a plot if asked to."""
    parser = make_parser(__doc__, max_prompts=12)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--model", help="checkpoint of the target [the default model]")
    parser.add_argument("--draft", help="checkpoint of the draft [the shipped one]")
    parser.add_argument("--temperatures", type=float, nargs="+", help="[those of the suite]")
    parser.add_argument("--log", type=Path, help="JSON lines, one for each answer; a run goes on from them")
    parser.add_argument("--timed", action="store_true", help="measure speeds, all settings in turn")
    parser.add_argument("--largest", type=int, default=1024, help="of budgets: the largest")
    parser.add_argument("--depths", type=numbers, default=[1, 2, 3, 4, 5, 6, 7, 8], help="draft passes, by comma")
    parser.add_argument("--refills", type=numbers, default=[0, 1, 2], help="draft passes after a miss, by comma")
    parser.add_argument("--drop", action="store_true", help="of depths: also trees that are dropped in every round")
    parser.add_argument("--plot", type=Path, help="of budgets: lengths as curves")
    arguments = parser.parse_args(words)
    if arguments.timed and (arguments.log or arguments.plot):
        parser.error("--log and --plot are of lengths: leave them out with --timed")
    make, method, placed, temperatures = SUITES[arguments.suite]
    methods, prompts = make(arguments), read_prompts(arguments)
    temperatures = arguments.temperatures or temperatures
    llm: Any = jaxspec.LLM(arguments.model, draft=arguments.draft, method=method, session_memory=0, **placed)
    if arguments.timed:
        for temperature in temperatures:
            print(
                f"temperature {temperature}\n" + time_methods(llm, methods, prompts, temperature, arguments.max_tokens)
            )
        return
    rows = count_methods(llm, methods, prompts, temperatures, arguments.max_tokens, arguments.log)
    print(f"{internals(llm).target.weights}; {environment_line()}\n\n{length_table(rows)}")
    write_report(arguments.json, draft=str(llm.draft_path), rows=[row._asdict() for row in rows])
    if arguments.plot:
        plot(rows, arguments.plot)


def count_methods(
    llm: Any, methods: Mapping[str, Method], prompts: Sequence[BenchPrompt], temperatures: Sequence[float],
    max_tokens: int, path: Path | None = None,
) -> list[Row]:  # fmt: skip
    """Every setting's answers at every temperature, each prompt with a seed of its own; `path` keeps them.

    Raises:
      SystemExit: the file at `path` holds answers of another model, draft or length.
    """
    settings = {"model": str(llm.model_path), "draft": digest_of(llm.draft_path), "max_tokens": max_tokens}
    log = AnswerLog(path, settings)
    rows = []
    for label, method in {BASELINE: "ar", **methods}.items():
        keys = [(label, degree, prompt.question_id) for degree in temperatures for prompt in prompts]
        missing = [key for key in keys if key not in log.known]
        decoder = llm.with_method(method) if missing else llm
        for key in track(missing, label, console=Console(stderr=True)):
            seed = next(n for n, prompt in enumerate(prompts) if prompt.question_id == key[2])
            sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=key[1], seed=seed)
            log.add(key, answer(decoder, prompts[seed], sampling))
        if label != BASELINE:
            rows += [summarise(label, degree, prompts, log.known) for degree in temperatures]
    return rows


def answer(llm: Any, prompt: BenchPrompt, sampling: jaxspec.SamplingParams) -> dict[str, Any]:
    """Tokens of one answer, its target passes, and what its draft tree did."""
    completion = llm.chat(conversation(prompt), sampling)
    counters = completion.stats.speculative_decoding
    tree = counters and counters.draft_tree
    return {
        "tokens": list(completion.token_ids),
        "passes": counters.num_spec_steps if counters else len(completion.token_ids),
        "exposed": tree and tree.exposed_passes_per_round,
        "hit": tree and tree.evaluated_hit_rate,
    }


def summarise(label: str, temperature: float, prompts: Sequence[BenchPrompt], known: Mapping[Any, Any]) -> Row:
    """The row of a setting, from its answers and plain decoding's."""
    answers = [known[label, temperature, prompt.question_id] for prompt in prompts]
    plain = [known[BASELINE, temperature, prompt.question_id] for prompt in prompts]
    counts = [(len(each["tokens"]), each["passes"]) for each in answers]
    by_category: dict[str, list[tuple[int, int]]] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        by_category.setdefault(prompt.category, []).append(count)

    def mean(name: str) -> float | None:
        # The first round of an answer is in no rate.
        later = [(each[name], max(each["passes"] - 1, 0)) for each in answers if each[name] is not None]
        return sum(rate * n for rate, n in later) / max(sum(n for _, n in later), 1) if later else None

    return Row(
        label, temperature, [n for n, _ in counts], [n for _, n in counts],
        {name: pool(some) for name, some in by_category.items()}, pool(counts), pooled_interval(counts),
        mean("exposed"), mean("hit"),
        all(mine["tokens"] == theirs["tokens"] for mine, theirs in zip(answers, plain, strict=True)),
    )  # fmt: skip


def pool(counts: Sequence[tuple[int, int]]) -> float:
    """All tokens over all passes."""
    return sum(tokens for tokens, _ in counts) / sum(passes for _, passes in counts)


def length_table(rows: Sequence[Row]) -> str:
    """A line for each setting and temperature."""
    head = ["settings", "temperature", *rows[0].categories, "all", "95 %", "exposed passes", "evaluated", "equal"]
    return make_table(head, [
        [
            row.label, row.temperature, *(f"{length:.2f}" for length in row.categories.values()), f"{row.length:.3f}",
            format_interval(row.interval), "" if row.exposed is None else f"{row.exposed:.2f}",
            "" if row.hit is None else f"{row.hit:.0%}", "yes" if row.equal else "NO",
        ]
        for row in rows
    ])  # fmt: skip


def time_methods(
    llm: Any, methods: Mapping[str, Method], prompts: Sequence[BenchPrompt], temperature: float, max_tokens: int
) -> str:
    """Speeds of all settings and of plain decoding, from one interleaved run, as a table."""
    columns = [Column(BASELINE, jaxspec.Autoregressive()), *(Column(name, own) for name, own in methods.items())]
    sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    report = make_report(measure(llm, columns, prompts, sampling, 1), "", str(llm.model_path), str(llm.draft_path))
    rows = []
    for label, row in report["overall"]["columns"].items():
        rate = row["tokens_per_s"]
        rows.append([label, f"{rate['mean']:.1f}" if rate else "-", f"{row['acceptance_length']:.2f}"])
    return make_table(["settings", "tokens/s", "tokens per target pass"], rows)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Lengths over the size of the tree, a panel for each temperature."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure, axes = pyplot.subplots(1, len(temperatures), figsize=(9, 3.6), sharey=True, squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for method, marker in (("specexec", "o"), ("specinfer", "s")):
            mine = [row for row in rows if row.label.startswith(method) and row.temperature == temperature]
            sizes = [int(row.label.split()[1]) for row in mine]
            axis.plot(sizes, [row.length for row in mine], marker=marker, label=method)
            low, high = zip(*(row.interval or (row.length, row.length) for row in mine), strict=True)
            axis.fill_between(sizes, low, high, alpha=0.15)
        axis.set(xscale="log", xlabel="budget (draft tokens per target pass)", title=f"temperature {temperature}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens per target pass")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
