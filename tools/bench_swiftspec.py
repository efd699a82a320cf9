"""SwiftSpec on the devices at hand: acceptance length by depth, and the ablations of the paper.

    JAX_NUM_CPU_DEVICES=2 python tools/bench_swiftspec.py depths --json FILE
    JAX_NUM_CPU_DEVICES=2 python tools/bench_swiftspec.py rankings
    JAX_NUM_CPU_DEVICES=2 python tools/bench_swiftspec.py ablation

`depths` compares trees that grow beside verification with trees grown in turn, for each number of draft passes. An
acceptance length (tokens per target pass, bonus token included) depends on no clock once the schedule is given: the
run may share the machine. Lengths are pooled: all tokens over all passes. With --json an interrupted run goes on
where it stopped. With --drop also trees that no round keeps; with --timed their speed, so nothing else should run then.

`rankings` compares what trees are ranked by at temperature above 0, in the same way; with --timed also their speed,
SpecExec's beside it, so nothing else should run then.

`ablation` runs the paper's four systems: serial trees on all devices or parallel ones on a split, each with XLA alone
or with the kernels of this project. It times them, so nothing else should run.
"""

import dataclasses
import gc
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxspec
from jaxspec.bench.prompts import BenchPrompt, load_prompts, select_prompts
from jaxspec.bench.report import RESAMPLES, make_report
from jaxspec.bench.run import BASELINE, Column
from jaxspec.bench.run import measure as time_columns
from jaxspec.cli.run import run_command
from jaxspec.errors import ConfigError
from jaxspec.methods.base import Method
from jaxspec.methods.core.proposals import RANKINGS

NAME = "bench_swiftspec"
TOTAL = "all"
# System: whether it has kernels of its own, and whether draft and target run in parallel.
SYSTEMS = {
    "serial": (False, False), "parallel only": (False, True), "kernels only": (True, False), "full": (True, True),
}  # fmt: skip
PAPER_RATIOS = {
    ("full", "kernels only"): 1.43, ("parallel only", "serial"): 1.50, ("full", "parallel only"): 1.16,
    ("kernels only", "serial"): 1.21,
}  # fmt: skip

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a schedule did to every prompt.

    Attributes:
      label: of the schedule.
      tokens: of each answer.
      passes: target passes of each answer.
      exposed: draft passes per round that the target waited for, over all answers.
      hit: share of rounds whose new root the draft had evaluated.
      equal: whether all answers are plain decoding's.
      choice: what the method reports of itself.
    """

    label: str
    tokens: tuple[int, ...]
    passes: tuple[int, ...]
    exposed: float
    hit: float
    equal: bool
    choice: Mapping[str, Any] | None

    @property
    def length(self) -> float:
        """Mean acceptance length, pooled."""
        return sum(self.tokens) / sum(self.passes)


@app.command()
def depths(
    model: Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft's checkpoint [the shipped one].")] = None,
    depth: Annotated[str, typer.Option(help="Draft passes, by comma.")] = "1,2,3,4,5,6,7,8",
    refill: Annotated[
        str, typer.Option(help="Passes after a miss, by comma, for growth beside verification.")
    ] = "0,1,2",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines in Spec-Bench's form [the mini suite].")] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Of all categories in turn.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96,
    target_devices: Annotated[int, typer.Option(min=1)] = 1,
    draft_devices: Annotated[int, typer.Option(min=1)] = 1,
    drop: Annotated[
        bool, typer.Option("--drop", help="Also beside verification, with trees that are dropped in every round.")
    ] = False,
    timed: Annotated[bool, typer.Option("--timed", help="Measure speed, all columns in turn.")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="Write all numbers here, and go on from them.")] = None,
) -> None:
    """Acceptance length by depth: beside verification, in turn with fresh trees, and with the default settings."""

    def run() -> None:
        if timed and json_ is not None:
            raise ConfigError("--json keeps lengths: leave out --timed")
        numbers, waits = _numbers("--depth", depth), _numbers("--refill", refill, least=0)
        methods: dict[str, Method] = {"default": jaxspec.SwiftSpec()}
        methods |= {f"in turn, depth {d}": jaxspec.SwiftSpec(depth=d, overlap=False, reuse=False) for d in numbers}
        methods |= {
            f"beside{', dropped' if not keep else ''}, depth {d}, refill {e}":
            jaxspec.SwiftSpec(depth=d, refill=e, reuse=keep)
            for keep in (True, *([False] * drop)) for e in waits for d in numbers
        }  # fmt: skip
        chosen = select_prompts(load_prompts(prompts), None, max_prompts)
        llm = jaxspec.LLM(
            model, draft=draft, method="swiftspec", target_devices=target_devices, draft_devices=draft_devices
        )
        if timed:
            sampling = jaxspec.SamplingParams(max_tokens=max_tokens)
            Console().print(time_methods(llm, methods, chosen, sampling), soft_wrap=True)
            return
        found = measure(llm, methods, chosen, max_tokens, json_)
        categories = [prompt.category for prompt in chosen]
        Console().print(table_of(found.values(), categories), soft_wrap=True)

    run_command(NAME, run)


@app.command()
def rankings(
    model: Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft's checkpoint [the shipped one].")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable [0.6 and 1].")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines in Spec-Bench's form [the mini suite].")] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Of all categories in turn.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    timed: Annotated[bool, typer.Option("--timed", help="Measure speed, all columns in turn.")] = False,
    top_p: Annotated[float, typer.Option(help="Of the timed answers.")] = 1.0,
) -> None:
    """Acceptance length by temperature and `ranking`; draft and target each have a device."""

    def run() -> None:
        chosen = select_prompts(load_prompts(prompts), None, max_prompts)
        llm = jaxspec.LLM(model, draft=draft, method="swiftspec", target_devices=1, draft_devices=1)
        if timed:
            for degree in temperature or (0.6, 1.0):
                sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=degree, top_p=top_p, seed=0)
                ranked: dict[str, Method] = {
                    f"{make.name} {kind}": make(ranking=kind)
                    for make in (jaxspec.SwiftSpec, jaxspec.SpecExec) for kind in RANKINGS
                }  # fmt: skip
                Console().print(time_methods(llm, ranked, chosen, sampling), soft_wrap=True)
            return
        table = Table(title="tokens per target pass")
        for name in ("temperature", "method", *RANKINGS, "equal to plain"):
            table.add_column(name)
        for degree in temperature or (0.6, 1.0):
            shapes: dict[str, Any] = {"beside": {"depth": 6, "refill": 1},
                                      "in turn": {"depth": 3, "overlap": False, "reuse": False}}  # fmt: skip
            methods = {
                f"{name} {ranking}": jaxspec.SwiftSpec(ranking=ranking, **shape)
                for name, shape in shapes.items() for ranking in RANKINGS
            }  # fmt: skip
            found = measure(llm, methods, chosen, max_tokens, None, degree)
            for name in shapes:
                rows = [found[f"{name} {ranking}"] for ranking in RANKINGS]
                equal = "yes" if all(row.equal for row in rows) else "NO"
                table.add_row(str(degree), name, *(f"{row.length:.3f}" for row in rows), equal)
        Console().print(table, soft_wrap=True)

    run_command(NAME, run)


def time_methods(
    llm: jaxspec.LLM, methods: Mapping[str, Method], prompts: Sequence[BenchPrompt], sampling: jaxspec.SamplingParams
) -> Table:
    """Speed of methods and of plain decoding, measured in one interleaved run."""
    columns = [Column(BASELINE, jaxspec.Autoregressive()), *(Column(name, own) for name, own in methods.items())]
    measured = time_columns(llm, columns, prompts, sampling, 1)
    found = make_report(measured, NAME, str(llm.model_path), str(llm.draft_path), 1)["overall"]["columns"]
    table = Table(title=f"temperature {sampling.temperature}, top-p {sampling.top_p}")
    for name in ("column", "tokens/s", "tokens per target pass"):
        table.add_column(name, justify="right" if table.columns else "left")
    for label, values in found.items():
        table.add_row(label, f"{_speed(values):.1f}", f"{values['acceptance_length']:.2f}")
    return table


@app.command()
def ablation(
    model: Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft's checkpoint [the shipped one].")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines in Spec-Bench's form [the mini suite].")] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Of all categories in turn.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    target_devices: Annotated[int, typer.Option(min=1, help="Of the split.")] = 1,
    draft_devices: Annotated[int, typer.Option(min=1, help="Of the split.")] = 1,
    kernels: Annotated[str, typer.Option(help="What is compared with XLA.")] = "auto",
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown here.")] = None,
) -> None:
    """Speed of serial, parallel only, kernels only and full, and the ratios that the paper prints."""

    def run() -> None:
        chosen = select_prompts(load_prompts(prompts), None, max_prompts)
        sampling = jaxspec.SamplingParams(max_tokens=max_tokens)
        rows: dict[str, Mapping[str, Any]] = {}
        for label, (own, parallel) in SYSTEMS.items():
            shared = {"method": "chain", "target_devices": target_devices + draft_devices}
            split = {"method": "swiftspec", "target_devices": target_devices, "draft_devices": draft_devices}
            placed: Any = split if parallel else shared
            llm = jaxspec.LLM(model, draft=draft, kernels=kernels if own else "xla", **placed)
            columns = [Column(BASELINE, jaxspec.Autoregressive())]
            columns.append(Column(label, jaxspec.SwiftSpec(overlap=parallel, reuse=parallel)))
            measured = time_columns(llm, columns, chosen, sampling, repeats)
            report = make_report(measured, NAME, str(llm.model_path), str(llm.draft_path), placed["target_devices"])
            rows[label] = report["overall"]["columns"]
            del llm, columns, measured
            gc.collect()
        head, *cells = ablation_cells(rows)
        table = Table(title="ablation")
        for name in head:
            table.add_column(name)
        for line in cells:
            table.add_row(*line)
        Console().print(table)
        for line in ratio_lines(rows):
            print(line)
        if markdown is not None:
            lines = [head, ["---"] * len(head), *cells]
            text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
            markdown.write_text(text + "\n\n" + "\n".join(ratio_lines(rows)) + "\n", encoding="utf-8")

    run_command(NAME, run)


def ablation_cells(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table, its head first; `rows` holds the columns of a report by system."""
    found = [["system", "tokens/s", "plain decoding beside it", "acceptance length"]]
    for label, columns in rows.items():
        own, plain = columns[label], columns[BASELINE]
        found.append([
            label, f"{_speed(own):.1f}", f"{_speed(plain):.1f}", f"{own['acceptance_length']:.2f}",
        ])  # fmt: skip
    return found


def ratio_lines(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ratios of speeds beside the paper's, which are of eight H800 and other models."""
    speeds = {label: _speed(columns[label]) for label, columns in rows.items()}
    return [
        f"{one} / {other}: {speeds[one] / speeds[other]:.2f} (paper: {ratio})"
        for (one, other), ratio in PAPER_RATIOS.items()
    ]


def _speed(column: Mapping[str, Any]) -> float:
    if column["tokens_per_s"] is None:
        raise ConfigError("no answer is long enough to be timed: raise --max-tokens or give other --prompts")
    return column["tokens_per_s"]["mean"]


def measure(
    llm: jaxspec.LLM, methods: Mapping[str, Method], prompts: Sequence[BenchPrompt], max_tokens: int, path: Path | None,
    temperature: float = 0.0,
) -> dict[str, Answers]:  # fmt: skip
    """Every method's answers; `path` holds those that are there already, and gets the others one by one.

    At a temperature above 0 each prompt has a seed of its own.
    """
    asked = {"max_tokens": max_tokens, "prompts": [prompt.question_id for prompt in prompts]}
    known: dict[str, Any] = {"asked": asked, "answers": {}}
    if path is not None:
        asked["model"], asked["draft"] = str(llm.model_path), digest_of(llm.draft_path)
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["asked"] != asked:
                raise ConfigError(
                    f"{path} holds answers of another model or draft, to other prompts or of another length: "
                    "name another file"
                )
    ids = [llm.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    seeded = [jaxspec.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=n) for n in range(len(ids))]
    asks = list(zip(ids, seeded, strict=True))
    expected = known.get("plain")
    if expected is None:
        plain = llm.with_method("ar")
        expected = known["plain"] = [plain.generate(*ask).token_ids for ask in asks]
    for label, method in methods.items():
        if label not in known["answers"]:
            decoder = llm.with_method(method)
            completions = [decoder.generate(*ask) for ask in track(asks, label, console=Console(stderr=True))]
            known["answers"][label] = dataclasses.asdict(_summarise(label, completions, expected))
            if path is not None:
                path.write_text(json.dumps(known) + "\n", encoding="utf-8")
    return {label: Answers(**_frozen(known["answers"][label])) for label in methods}


def digest_of(checkpoint: Path | str | None) -> str | None:
    """SHA-256 of a checkpoint's files, Markdown excluded: a draft may be replaced where it lies."""
    if checkpoint is None:
        return None
    place, digest = Path(checkpoint), hashlib.sha256()
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file() and file.suffix != ".md":
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest() + file.name.encode())
    return digest.hexdigest()


def table_of(rows: Iterable[Answers], categories: Sequence[str]) -> Table:
    """A line for each schedule: pooled lengths by category and in all."""
    names = list(dict.fromkeys(categories))
    table = Table(title="tokens per target pass")
    for name in ("schedule", *names, TOTAL, "95 %", "exposed passes", "evaluated", "equal to plain"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for row in rows:
        low, high = interval_of(row)
        shown = [pooled(row, [c == name for c in categories]) for name in names]
        chosen = "" if row.choice is None or row.label != "default" else f" ({_describe(row.choice)})"
        table.add_row(
            row.label + chosen, *(f"{length:.2f}" for length in shown), f"{row.length:.3f}",
            f"{low:.2f} to {high:.2f}", f"{row.exposed:.2f}", f"{row.hit:.0%}", "yes" if row.equal else "NO",
        )  # fmt: skip
    return table


def pooled(row: Answers, mine: Sequence[bool]) -> float:
    """Length over some prompts."""
    return sum(np.compress(mine, row.tokens)) / sum(np.compress(mine, row.passes))


def interval_of(row: Answers) -> tuple[float, float]:
    """95 % interval of the length: prompts are drawn anew, with replacement and a fixed seed."""
    tokens, passes = np.asarray(row.tokens, np.float64), np.asarray(row.passes, np.float64)
    drawn = np.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    low, high = np.percentile(tokens[drawn].sum(axis=1) / passes[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _summarise(label: str, completions: Sequence[Any], expected: Sequence[Sequence[int]]) -> Answers:
    counters = [c.stats.speculative_decoding for c in completions]
    steps = [c["num_spec_steps"] for c in counters]
    # The first round of an answer is in no rate.
    later = [max(n - 1, 0) for n in steps]

    def mean(name: str) -> float:
        shares = [(c["draft_tree"][name] or 0.0) * n for c, n in zip(counters, later, strict=True)]
        return sum(shares) / max(sum(later), 1)

    equal = all(list(c.token_ids) == list(e) for c, e in zip(completions, expected, strict=True))
    choice = completions[0].stats.choice
    return Answers(
        label, tuple(len(c.token_ids) for c in completions), tuple(steps), mean("exposed_passes_per_round"),
        mean("evaluated_hit_rate"), equal, choice and {k: choice[k] for k in choice if k != "rounds"},
    )  # fmt: skip


def _describe(choice: Mapping[str, Any]) -> str:
    return f"depth {choice['depth']}, refill {choice['refill']}, {choice['draft_passes_per_verification']} passes fit"


def _frozen(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _numbers(name: str, text: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} must be integers with commas between them") from error
    if min(numbers) < least:
        raise ConfigError(f"{name} {text!r}: at least {least}")
    return numbers


if __name__ == "__main__":
    app()
