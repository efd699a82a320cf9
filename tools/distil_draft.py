"""Make a draft model for any target: sample text from the target, train on its logits, write a draft that loads.

    python tools/distil_draft.py sample DATA --tokens 1000000
    python tools/distil_draft.py train DATA RUN --layers 0,1,29 --head 8192 --steps 1000
    python tools/distil_draft.py measure RUN FRESH_DATA
    python tools/distil_draft.py curve RUN --plot curve.png
    python tools/distil_draft.py export RUN DRAFT --quantize q8_0
    jaxspec-decode --draft-model DRAFT ...

Each command can be killed and run again: it goes on where it was, and ends with the same bytes. `--model` names the
target; without it, it is the default model. Needs the extra `train` (optax).
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from distil.batches import Packer, choose_head, split_held_out
from distil.export import save_draft
from distil.sample import Sampler, SampleSettings, answers_of, sample_shards, target_digest
from distil.shards import Conversation, read_meta, read_shard, replace_text, write_meta
from distil.student import init_student, student_config
from distil.train import (
    Quality,
    Trainer,
    TrainSettings,
    batches,
    latest_step,
    measure_quality,
    restore_params,
)
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxspec import LLM
from jaxspec.checkpoint.shipped import vocabulary_digest
from jaxspec.errors import JaxspecError
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)

Model = Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")]
SETTINGS = "settings.json"
CHECKPOINTS = "checkpoints"
CURVE = "curve.jsonl"


@app.command()
def sample(
    data: Annotated[Path, typer.Argument(help="Folder of the sampled conversations.")],
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to sample, at least.")] = 1_000_000,
    branches: Annotated[int, typer.Option(min=1, help="Conversations side by side.")] = SampleSettings.branches,
    steps: Annotated[int, typer.Option(min=2, help="Passes of a shard.")] = SampleSettings.steps,
    top: Annotated[int, typer.Option(min=1, help="Teacher logits kept per token.")] = SampleSettings.top,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a conversation.")] = SampleSettings.longest,
    seed: Annotated[int, typer.Option(min=0, help="Of everything.")] = SampleSettings.seed,
    passages: Annotated[
        Path | None, typer.Option(help="Sampled conversations whose answers are texts to work on in these.")
    ] = None,
) -> None:
    """Let the target write conversations, and keep its top logits."""
    settings = SampleSettings(branches, steps, top, longest, seed)
    llm = LLM(model, method="ar", dtype="float32")
    shards = range(math.ceil(tokens / (branches * steps)))
    try:
        sampler = Sampler(llm, settings, answers_of(llm, passages) if passages else ())
        write_meta(data, sampler.meta())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _progress() as progress:
        task = progress.add_task("tokens", total=len(shards) * branches * steps)
        sample_shards(sampler, data, shards, lambda n: progress.advance(task, n))


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="Folder of the sampled conversations.")],
    run: Annotated[Path, typer.Argument(help="Folder of the checkpoints; an existing run goes on.")],
    model: Model = None,
    layers: Annotated[str, typer.Option(help="Layers of the target that the draft starts from.")] = "0,1,29",
    head: Annotated[
        int, typer.Option(min=0, help="Tokens that the draft can propose, the most frequent; 0 for all.")
    ] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = TrainSettings.steps,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = TrainSettings.rows,
    length: Annotated[int, typer.Option(min=0, help="Tokens of a row; 0 for what the longest conversation takes.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = TrainSettings.learning_rate,
    dtype: Annotated[str, typer.Option(help="Of the products' operands.")] = TrainSettings.dtype,
    begin_with: Annotated[
        Path | None,
        typer.Option(help="Another run of the same layers, whose newest weights this one starts from."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the data.")] = TrainSettings.seed,
    more_data: Annotated[list[Path] | None, typer.Option(help="Another folder of conversations; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Learn from the first shards of so many tokens; 0 for all.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between looks at held-out text.")] = 200,
) -> None:
    """Train a draft on the teacher's logits."""
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype {dtype!r}: must be bfloat16 or float32")
    # Not by `min=`, which lets NaN pass.
    if not 0 < learning_rate < math.inf:
        raise typer.BadParameter(f"--learning-rate {learning_rate}: must be a positive number")
    settings = TrainSettings(steps=steps, rows=rows, learning_rate=learning_rate, seed=seed, dtype=dtype)
    llm = LLM(model, method="ar", dtype="float32")
    vocab_size, digest = llm.engine.target.cfg.vocab_size, target_digest(llm)
    chosen = _parse_layers(layers, llm.engine.target.cfg.num_layers)
    # A run with a checkpoint of its own needs the weights that it began with no more.
    begun = latest_step(run / CHECKPOINTS) is not None
    base = _base_settings(begin_with, digest, chosen) if begin_with is not None and not begun else {}
    folders = [data, *(more_data or [])]
    metas = _read_metas(folders, digest)
    conversations, prefix = _read_conversations(folders, tokens), metas[0]["prefix"]
    longest = len(prefix) - 1 + max(len(c.token) for c in conversations)
    length = length or longest
    if length < longest:
        raise typer.BadParameter(f"--length {length}: the longest conversation takes {longest} tokens")
    learned, held_out = split_held_out(conversations)
    head_ids = choose_head(learned, vocab_size, head) if head else np.arange(vocab_size, dtype=np.int32)
    cfg = student_config(llm.engine.target.cfg, chosen, head_ids.tolist() if head else ())
    embed, head_rows = llm.params["embed"], _head_rows(llm, head_ids)
    packer = Packer(prefix, length, head_ids, vocab_size)
    _check_enough(packer, learned, held_out, settings)
    noted = {
        **dataclasses.asdict(settings), "target": digest, "layers": chosen,
        "head_ids": head_ids.tolist() if head else [], "length": length, "begin_with": str(begin_with or ""),
        "data": metas, "conversations": len(conversations), "held_out": len(held_out),
        "tokens": sum(len(c.token) for c in learned),
    }  # fmt: skip
    old = _earlier_settings(run, noted, begun)
    params = init_student(llm.params, chosen)
    if begin_with is not None and not begun:
        noted["begin_step"] = old.get("begin_step", base["latest"])
        try:
            params = restore_params(params, _as_settings(base), begin_with / CHECKPOINTS, noted["begin_step"])
        except FileNotFoundError as error:
            raise typer.BadParameter(f"{error}, which {run} began with; name another run") from error
    if not begun:
        noted["seen"] = sorted({*base.get("seen", ()), *(meta["seed"] for meta in metas)})
        _keep_settings(run, noted, goes_on=bool(old))
    trainer = Trainer(params, cfg, embed, head_rows, packer, learned, settings, run / CHECKPOINTS, save_every)
    curve = _Curve(run / CURVE, trainer.step)

    def look(step: int) -> None:
        quality = measure_quality(trainer.params, cfg, embed, head_rows, packer, held_out, rows)
        curve.add(step, rows * length, quality)

    with _progress() as progress:
        task = progress.add_task("steps", total=steps, completed=trainer.step)
        if not curve.last:
            look(trainer.step)

        def report(step: int, loss: float) -> None:
            curve.loss(loss)
            progress.update(task, completed=step, description=f"loss {loss:.3f}")
            if step % measure_every == 0 or step == steps:
                look(step)

        try:
            trainer.run(report)
        except FloatingPointError as error:
            raise typer.BadParameter(f"{error}; try a lower --learning-rate") from error
    typer.echo(curve.last)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run's checkpoints.")],
    draft: Annotated[Path, typer.Argument(help="The draft to write; a folder that does not exist yet.")],
    model: Model = None,
    quantize: Annotated[str | None, typer.Option(help="q8_0, q4_0, or leave out for float32.")] = None,
) -> None:
    """Write the newest checkpoint of a run as a draft that `--draft-model` takes."""
    llm = LLM(model, method="ar", dtype="float32")
    cfg, trained = _trained_student(llm, run)
    digest = vocabulary_digest(llm.tokenizer.token_strings())
    try:
        saved = save_draft(draft, trained, cfg, digest, llm.eos_ids, quantize)
    except JaxspecError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{draft}: {saved.num_bytes / 1e6:.1f} MB")


@app.command()
def measure(
    run: Annotated[Path, typer.Argument(help="Folder of a run's checkpoints.")],
    data: Annotated[Path, typer.Argument(help="Conversations that the run has not seen, of another seed.")],
    model: Model = None,
) -> None:
    """Compare the newest checkpoint of a run with the target on the answers of other conversations."""
    llm = LLM(model, method="ar", dtype="float32")
    [meta] = _read_metas([data], target_digest(llm))
    if meta["seed"] in _read_settings(run).get("seen", ()):
        raise typer.BadParameter(f"{data}: the run has learned from text of seed {meta['seed']}; sample with another")
    cfg, trained = _trained_student(llm, run)
    conversations, prefix = _read_conversations([data], 0), meta["prefix"]
    vocab_size = llm.engine.target.cfg.vocab_size
    head_ids = np.array(cfg.head_ids or range(vocab_size), np.int32)
    packer = Packer(prefix, len(prefix) - 1 + max(len(c.token) for c in conversations), head_ids, vocab_size)
    head = _head_rows(llm, head_ids)
    try:
        quality = measure_quality(trained, cfg, llm.params["embed"], head, packer, conversations)
    except ValueError as error:
        raise typer.BadParameter(f"{data}: {error}") from error
    typer.echo(json.dumps(dataclasses.asdict(quality)))


@app.command()
def curve(
    runs: Annotated[list[Path], typer.Argument(help="Runs, each begun with the weights of the one before.")],
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")],
) -> None:
    """Plot what held-out text says against the tokens seen (extra `plot`: matplotlib)."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    places, agreement, depths = [], [], []
    seen = 0
    for run in runs:
        entries = [json.loads(line) for line in (run / CURVE).read_text().splitlines()]
        for entry in entries:
            places.append((seen + entry["places"]) / 1e6)
            agreement.append(entry["agreement"])
            depths.append(entry["by_depth"])
        seen += entries[-1]["places"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    left.plot(places, agreement, marker="o", label="all answers, any position")
    for depth in (0, 1, 3):
        left.plot(places, [d[depth] for d in depths], marker=".", label=f"greedy answers, token {depth + 1} of a chain")
    left.set(xlabel="million tokens seen", ylabel="right, of those tried", ylim=(0, 1))
    left.legend(fontsize=8)
    right.plot(range(1, len(depths[-1]) + 1), depths[-1], marker="o", label="at the end")
    right.plot(range(1, len(depths[0]) + 1), depths[0], marker=".", label="at the beginning")
    right.set(xlabel="token of a chain, if those before it were right")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(plot, dpi=130)
    typer.echo(f"{plot}: {len(places)} points, last agreement {agreement[-1]:.3f}")


def _head_rows(llm: LLM, head_ids: np.ndarray) -> jax.Array:
    """The target's rows of a student's head, [V_head, D]."""
    return jnp.asarray(np.asarray(llm.params.get("head", llm.params["embed"]))[head_ids])


def _trained_student(llm: LLM, run: Path) -> tuple[ModelConfig, Params]:
    """Geometry and newest parameters of a run."""
    settings = _read_settings(run)
    if settings["target"] != target_digest(llm):
        raise typer.BadParameter(f"{run}: was trained for another target")
    cfg = student_config(llm.engine.target.cfg, settings["layers"], settings["head_ids"])
    params = init_student(llm.params, settings["layers"])
    try:
        return cfg, restore_params(params, _as_settings(settings), run / CHECKPOINTS)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


def _parse_layers(text: str, num_layers: int) -> list[int]:
    try:
        layers = [int(layer) for layer in text.split(",")]
    except ValueError:
        layers = []
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise typer.BadParameter(f"--layers {text!r}: must be numbers from 0 to {num_layers - 1}, with commas between")
    return layers


def _read_settings(run: Path) -> dict[str, Any]:
    path = run / SETTINGS
    if not path.is_file():
        raise typer.BadParameter(f"{run}: holds no run; begin one with `train`")
    return json.loads(path.read_text())


def _as_settings(settings: dict[str, Any]) -> TrainSettings:
    return TrainSettings(**{field.name: settings[field.name] for field in dataclasses.fields(TrainSettings)})


def _base_settings(base: Path, target: str, layers: list[int]) -> dict[str, Any]:
    """What the run that another begins with was made with, and the step of its newest checkpoint, `latest`."""
    settings = _read_settings(base)
    if settings["target"] != target:
        raise typer.BadParameter(f"--begin-with {base}: was trained for another target")
    if settings["layers"] != layers:
        theirs = ",".join(map(str, settings["layers"]))
        raise typer.BadParameter(f"--begin-with {base}: has the target's layers {theirs}; give the same --layers")
    latest = latest_step(base / CHECKPOINTS)
    if latest is None:
        raise typer.BadParameter(f"--begin-with {base}: holds no checkpoint yet")
    return {**settings, "latest": latest}


def _check_enough(
    packer: Packer, learned: Sequence[Conversation], held_out: Sequence[Conversation], settings: TrainSettings
) -> None:
    """There must be a batch to learn from and an answer to measure with."""
    if all(c.answer == len(c.token) for c in held_out):
        raise typer.BadParameter(f"none of {len(held_out)} held-out conversations has an answer; sample more")
    try:
        next(batches(packer, learned, settings))
    except ValueError as error:
        raise typer.BadParameter(f"--rows {settings.rows}: {error}") from error


class _Curve:
    """Quality on held-out text against tokens seen, one JSON object a line; a run that goes on cuts what it redoes."""

    def __init__(self, path: Path, step: int):
        self._path = path
        # What was cut off in the middle of a line has no end of line.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        replace_text(path, "".join(kept))
        self._losses: list[float] = []
        self._start = time.monotonic()
        self.last = kept[-1].rstrip() if kept else ""

    def loss(self, loss: float) -> None:
        self._losses.append(loss)

    def add(self, step: int, places: int, quality: Quality) -> None:
        seconds = round(time.monotonic() - self._start, 1)
        entry: dict[str, Any] = {"step": step, "places": step * places, "seconds": seconds}
        if self._losses:
            entry["training_loss"] = float(np.mean(self._losses))
        self._losses.clear()
        self.last = json.dumps(entry | dataclasses.asdict(quality))
        with open(self._path, "a") as file:
            file.write(self.last + "\n")


def _read_metas(folders: Sequence[Path], target: str) -> list[dict[str, Any]]:
    """What the folders' conversations were sampled with; all of the same target, template and number of logits."""
    metas = []
    for folder in folders:
        meta = read_meta(folder)
        if not meta:
            raise typer.BadParameter(f"{folder}: holds no sampled conversations; run `sample` first")
        if meta.get("target") != target:
            raise typer.BadParameter(f"{folder}: was sampled from another target")
        metas.append(meta)
    for name, what in (("prefix", "chat templates"), ("top", "numbers of teacher logits")):
        if any(meta[name] != metas[0][name] for meta in metas):
            raise typer.BadParameter(f"the folders were sampled with different {what}")
    return metas


def _read_conversations(folders: Sequence[Path], tokens: int) -> list[Conversation]:
    """The conversations of all folders, in order; those of the first shards that have so many tokens, if not 0."""
    conversations: list[Conversation] = []
    for path in (path for folder in folders for path in sorted(folder.glob("shard-*.npz"))):
        if tokens and sum(len(c.token) for c in conversations) >= tokens:
            break
        conversations += read_shard(path)
    if not conversations:
        raise typer.BadParameter(f"{', '.join(map(str, folders))}: no conversations yet; run `sample` first")
    return conversations


def _earlier_settings(run: Path, settings: dict[str, Any], begun: bool) -> dict[str, Any]:
    """What a run that goes on was begun with; empty for a new one, and for one that may begin anew.

    That is one without a checkpoint whose settings were others; with a checkpoint (`begun`) it is refused.
    """
    path = run / SETTINGS
    if not path.exists():
        if begun:
            raise typer.BadParameter(f"{run}: holds checkpoints, but no {SETTINGS}; name another run")
        return {}
    old = _read_settings(run)
    # What an earlier version of this tool did not note is not compared.
    differing = sorted(key for key in {*old} & {*settings} if old[key] != settings[key])
    if differing and begun:
        raise typer.BadParameter(f"{run}: was begun with other settings ({', '.join(differing)}); name another run")
    return {} if differing else old


def _keep_settings(run: Path, settings: dict[str, Any], goes_on: bool) -> None:
    """Note what a run without a checkpoint is made with; what was measured with other settings is forgotten."""
    run.mkdir(parents=True, exist_ok=True)
    if not goes_on:
        (run / CURVE).unlink(missing_ok=True)
    replace_text(run / SETTINGS, json.dumps(settings) + "\n")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )


if __name__ == "__main__":
    app()
