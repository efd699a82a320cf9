"""What `Swift` reaches on the default model, as JSON: the sets that its search finds, speeds, the cost of the search.

`matchness` and `deep --find-only` time nothing. `speed`, `deep` and `share` need an idle machine:
`python tools/swift_results.py speed swift-speed.json`.
"""

import copy
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.bench.prompts import load_prompts, select_prompts
from jaxspec.bench.report import make_report
from jaxspec.bench.run import BASELINE, Column, measure
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.llm import LLM
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.swift.search import SearchRule, SearchSettings
from jaxspec.methods.swift.settings import Swift
from jaxspec.models.layer_set import uniform_layers
from jaxspec.models.params import Params
from jaxspec.tune.swift import LayerScorer, Passage, search_layers, write_passages

# Name, rule of the search, and every how many candidates one is Bayesian (0 for the given number, else never).
KINDS: tuple[tuple[str, SearchRule, int], ...] = (
    ("search", "budget", 0), ("random", "budget", 10**6), ("paper", "paper", 0),
)  # fmt: skip
# What inserted layers add is this much of what the layers add that they are copies of.
TINY = 1e-3

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Output = Annotated[Path, typer.Argument(help="JSON file to write.")]


@app.command()
def matchness(
    out: Output,
    ratio: Annotated[float, typer.Option(help="r, share of the blocks that is skipped.")] = 0.45,
    steps: Annotated[int, typer.Option(help="Candidates of each search.")] = 200,
    interval: Annotated[int, typer.Option(help="Every how many candidates one is Bayesian.")] = 25,
    seeds: Annotated[int, typer.Option(help="Searches of each kind.")] = 5,
    num_prompts: Annotated[int, typer.Option(help="Of the mini suite; a third is kept for judging.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 100,
) -> None:
    """Compare the sets of both rules with the uniform set and the best of as many random sets, on other texts."""
    llm = LLM(method="ar", draft="none")
    prompts = select_prompts(load_prompts(), None, num_prompts)
    passages = [*write_passages(llm, prompts, SamplingParams(max_tokens=max_tokens))]
    kept = num_prompts // 3
    judged, seen = passages[::3][:kept], [p for i, p in enumerate(passages) if i % 3]
    scorer = _scorer(llm, passages)
    settings = SearchSettings(ratio=ratio, steps=steps, tolerance=steps, interval=interval)
    runs = []
    for seed in range(seeds):
        for kind, rule, every in KINDS:
            changed = dataclasses.replace(settings, rule=rule, interval=every or interval)
            search = search_layers(scorer, seen, changed, seed)
            layers = search.incumbent.layers
            [judgement] = scorer.matchness(judged, [layers])
            run = {
                "kind": kind, "seed": seed, "matchness": judgement, "layers": str(layers), "steps": search.steps,
                "stopped": search.stopped, "history": search.history,
            }  # fmt: skip
            runs.append(run)
            typer.echo(f"{kind} {seed}: {judgement:.3f} after {search.steps} steps")
    [uniform] = scorer.matchness(judged, [uniform_layers(scorer.num_layers)])
    medians = {k: statistics.median(r["matchness"] for r in runs if r["kind"] == k) for k, _, _ in KINDS}
    tokens = sum(len(p.windows(scorer.window)) for p in judged) * scorer.window
    settings_used = {"ratio": ratio, "steps": steps, "interval": interval, "judged_tokens": tokens}
    _write(out, settings_used | {"uniform": uniform, "medians": medians, "runs": runs})
    typer.echo(f"uniform {uniform:.3f}, medians {medians}")


@app.command()
def speed(
    out: Output,
    found: Annotated[list[Path] | None, typer.Option(help="Output of `matchness`; repeatable.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Of the mini suite.")] = 6,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    repeats: Annotated[int, typer.Option(help="Of every answer.")] = 3,
) -> None:
    """Time `swift` with default settings, and with sets that were found, beside plain decoding."""
    llm = LLM(method="ar", draft="none")
    with tempfile.TemporaryDirectory() as folder:
        columns = [
            Column(BASELINE, Autoregressive()),
            Column("swift", Swift(layers_file=f"{folder}/sets.json")),
        ]
        for path in found or []:
            report = json.loads(path.read_text(encoding="utf-8"))
            best = max((run for run in report["runs"] if run["kind"] == "search"), key=lambda run: run["matchness"])
            name = f"ratio {report['ratio']:g}"
            columns += [
                Column(f"{name}, adaptive", Swift(layers=best["layers"])),
                Column(f"{name}, always drafts", Swift(layers=best["layers"], adaptive=False)),
            ]
        _write(out, _time(llm, columns, num_prompts, SamplingParams(max_tokens=max_tokens), repeats))


@app.command()
def deep(
    out: Output,
    real: Annotated[int, typer.Option(help="Layers of the default model that are kept, half from each end.")] = 4,
    inserted: Annotated[int, typer.Option(help="Near-identity layers between them.")] = 44,
    ratio: Annotated[float, typer.Option(help="r, share of the blocks that is skipped.")] = 0.7,
    steps: Annotated[int, typer.Option(help="Candidates of the search.")] = 200,
    interval: Annotated[int, typer.Option(help="Every how many candidates one is Bayesian.")] = 8,
    find_only: Annotated[bool, typer.Option("--find-only", help="Time nothing.")] = False,
    repeats: Annotated[int, typer.Option(help="Of every answer.")] = 3,
) -> None:
    """Search a deep model with many layers that add nearly nothing, and time what was found beside plain decoding."""
    llm = deepen(LLM(method="ar", draft="none", dtype="float32"), real, inserted)
    # Half of a model does not know when to end.
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    prompts = select_prompts(load_prompts(), None, 6)
    passages = [*write_passages(llm, prompts, sampling)]
    scorer = _scorer(llm, passages)
    settings = SearchSettings(ratio=ratio, steps=steps, tolerance=steps, interval=interval)
    search = search_layers(scorer, passages[1:], settings)
    layers = search.incumbent.layers
    middle = {f"layer {index}" for index in range(real // 2, real // 2 + inserted)}
    left_out = [
        f"layer {index}" for kind in (layers.attention, layers.mlp) for index, runs in enumerate(kind) if not runs
    ]
    [held_out, uniform] = scorer.matchness(passages[:1], [layers, uniform_layers(scorer.num_layers)])
    report: dict[str, Any] = {
        "layers": scorer.num_layers, "inserted": inserted, "ratio": ratio, "skipped": str(layers),
        "num_skipped": len(left_out), "num_skipped_of_inserted": sum(name in middle for name in left_out),
        "matchness": held_out, "uniform": uniform, "steps": search.steps, "stopped": search.stopped,
        "history": search.history,
    }  # fmt: skip
    typer.echo({name: value for name, value in report.items() if name not in ("skipped", "history")})
    if not find_only:
        columns = [Column(BASELINE, Autoregressive()), Column("swift", Swift(layers=str(layers)))]
        report["speed"] = _time(llm, columns, 6, dataclasses.replace(sampling, max_tokens=200), repeats)
    _write(out, report)


@app.command()
def share(
    out: Output,
    tokens: Annotated[int, typer.Option(help="To decode with the search, and again without.")] = 2000,
) -> None:
    """Measure the share of the time that the search takes with default settings, and compare it with its own count."""
    answer = SamplingParams(max_tokens=250, ignore_eos=True)
    prompts = select_prompts(load_prompts(), None, -(-tokens // 250))
    loaded = LLM(method="ar", draft="none")
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "with": Swift(layers_file=f"{folder}/a.json"),
            "without": Swift(layers_file=f"{folder}/b.json", share=0),
        }
        llms = {name: loaded.with_method(method) for name, method in kinds.items()}
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        choice: dict[str, Any] = {}
        for index, prompt in enumerate(prompts):
            written = []
            for name in sorted(llms, reverse=bool(index % 2)):
                start = time.perf_counter()
                completion: Any = llms[name].chat([{"role": "user", "content": prompt.turns[0]}], answer)
                seconds[name].append(time.perf_counter() - start - completion.stats.compile_s)
                written.append(completion.token_ids)
                if name == "with":
                    choice = completion.stats.choice
            if written[0] != written[1]:
                typer.echo(f"prompt {prompt.question_id}: the texts differ")
    longer = statistics.median(a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)) - 1
    report = {
        "tokens": len(prompts) * 250, "seconds": {name: sum(each) for name, each in seconds.items()},
        "longer": longer, "answers": seconds,
        "search_share": choice["search_share"], "search_passes": choice["search_passes"], "steps": choice["steps"],
    }  # fmt: skip
    _write(out, report)
    typer.echo({name: value for name, value in report.items() if name != "answers"})


def deepen(llm: LLM, real: int, inserted: int) -> LLM:
    """The first and last layers of a float32 model, `real` of them, with near-identity layers in between."""
    target = llm.engine.target
    if llm.draft_params is not None or not 2 <= real <= target.cfg.num_layers or target.storage is not None:
        raise typer.BadParameter(f"a float32 model without a draft has 2 to {target.cfg.num_layers} layers to keep")

    def damp(layer: Params) -> Params:
        return layer | {name: layer[name] * TINY for name in ("out", "down")}

    own = llm.params["layers"]
    middle = [damp(own[index % len(own)]) for index in range(inserted)]
    layers = [*own[: real // 2], *middle, *own[len(own) - (real - real // 2) :]]
    made = copy.copy(llm)
    made.model_params = ModelParams(llm.params | {"layers": layers})
    placement = dataclasses.replace(target, cfg=dataclasses.replace(target.cfg, num_layers=len(layers)))
    made.engine = Engine(Models(placement), Autoregressive())
    made.engine.prepare()
    return made


def _time(llm: LLM, columns: list[Column], num_prompts: int, sampling: SamplingParams, repeats: int) -> dict[str, Any]:
    """Answers of all columns in turn, as `jaxspec-bench` reports them."""
    prompts = select_prompts(load_prompts(), None, num_prompts)
    measured = measure(llm, columns, prompts, sampling, repeats)
    report = make_report(measured, "tools/swift_results.py", str(llm.model_path), None, llm.engine.target.plan.tensor)
    for label, row in report["overall"]["columns"].items():
        typer.echo(f"{label}: speed-up {row['speedup']}, exact {row['exact']}")
    return report


def _scorer(llm: LLM, passages: list[Passage]) -> LayerScorer:
    longest = max(len(passage.tokens) for passage in passages)
    return LayerScorer(llm.engine.target, llm.params, longest, SearchSettings().window)


def _write(out: Path, report: dict[str, Any]) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
