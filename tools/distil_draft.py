"""Make a draft model for any target: sample text from the target, train on its logits, write a draft that loads.

    python tools/distil_draft.py sample DATA --tokens 1000000
    python tools/distil_draft.py train DATA RUN --layers 0,1,29 --head 8192 --steps 1000
    python tools/distil_draft.py measure RUN FRESH_DATA
    python tools/distil_draft.py curve RUN --plot curve.png
    python tools/distil_draft.py export RUN DRAFT --quantize q8_0
    jaxspec-decode --draft-model DRAFT ...

A draft is some of the target's own layers; with `train --kind added` such layers that are fed the target's hidden
states, too; or with `--kind eagle3` a head that is fed them; or with `--kind block` layers that fill a block of places
in one pass.
Each command can be killed and run again: it goes on where it was, and ends with the same bytes. `--model` names the
target; without it, it is the default model. Needs the extra `train` (optax).
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer
from train.batches import Packer, choose_head, split_held_out
from train.eagle import scale_states, whole_leaves
from train.export import begin_with_native, is_native, save_draft, save_head
from train.kinds import FED, Kind, Student, native_student, open_student
from train.runs import (
    CHECKPOINTS,
    CURVE,
    Curve,
    as_settings,
    check_enough,
    earlier_settings,
    keep_settings,
    plot_curves,
    read_conversations,
    read_metas,
    read_settings,
    show_progress,
)
from train.sample import Sampler, SampleSettings, answers_of, check_states, sample_shards
from train.shards import read_meta, write_meta
from train.states import STATES, target_digest
from train.train import TrainSettings, batches, latest_step, restore_params

from jaxspec import LLM
from jaxspec.config import DType
from jaxspec.errors import JaxspecError
from jaxspec.files import vocabulary_digest
from jaxspec.llm import internals
from jaxspec.models.features import default_layers
from jaxspec.models.params import Params

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)

Model = Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")]
TargetDtype = Annotated[str, typer.Option(help="Of the target's weights: float32, or bfloat16 on a GPU.")]
SampleDtype = Annotated[str, typer.Option(help="Of the target's weights: auto (as it decodes), float32, bfloat16.")]


# What `--layers` is where it is not given: of the default model.
OWN_LAYERS = "0,1,29"
UNROLL = 4
# Most held-out conversations that a look during training reads, evenly spread.
LOOKED_AT = 256


@app.command()
def sample(
    data: Annotated[Path, typer.Argument(help="Folder of the sampled conversations.")],
    model: Model = None,
    target_dtype: SampleDtype = "auto",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to sample, at least.")] = 1_000_000,
    branches: Annotated[int, typer.Option(min=1, help="Conversations side by side.")] = SampleSettings.branches,
    steps: Annotated[int, typer.Option(min=2, help="Passes of a shard.")] = SampleSettings.steps,
    top: Annotated[int, typer.Option(min=1, help="Teacher logits kept per token.")] = SampleSettings.top,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a conversation.")] = SampleSettings.longest,
    seed: Annotated[int, typer.Option(min=0, help="Of everything.")] = SampleSettings.seed,
    passages: Annotated[
        Path | None, typer.Option(help="Sampled conversations whose answers are texts to work on in these.")
    ] = None,
    states: Annotated[
        str | None, typer.Option(help="Layers whose inputs are kept beside the conversations, for drafts that are fed.")
    ] = None,
) -> None:
    """Let the target write conversations, and keep its top logits."""
    settings = SampleSettings(branches, steps, top, longest, seed)
    llm = _open_target(model, target_dtype, get_args(DType))
    last = internals(llm).target.cfg.num_layers
    kept = [] if states is None else _parse_numbers("--states", states, last)
    shards = range(math.ceil(tokens / (branches * steps)))
    try:
        sampler = Sampler(llm, settings, answers_of(llm, passages) if passages else (), kept)
        write_meta(data, sampler.meta())
        check_states(sampler, data, shards)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with show_progress() as progress:
        task = progress.add_task("tokens", total=len(shards) * branches * steps)
        sample_shards(sampler, data, shards, lambda n: progress.advance(task, n))


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="Folder of the sampled conversations.")],
    run: Annotated[Path, typer.Argument(help="Folder of the checkpoints; an existing run goes on.")],
    model: Model = None,
    target_dtype: TargetDtype = "float32",
    kind: Annotated[
        Kind,
        typer.Option(help="Layers of the target; a head that is fed its hidden states; or layers that are fed them."),
    ] = Kind.LAYERS,
    layers: Annotated[
        str | None, typer.Option(help=f"Layers of the target that the draft starts from [{OWN_LAYERS}].")
    ] = None,
    states: Annotated[
        str | None,
        typer.Option(help="Layers of the target whose inputs the draft is fed [the 3rd, middle, 3rd from the end]."),
    ] = None,
    unroll: Annotated[int | None, typer.Option(min=1, help=f"Steps on its own states [{UNROLL}].")] = None,
    block: Annotated[int, typer.Option(min=2, max=65, help="Places of a pass, for --kind block.")] = 5,
    markov: Annotated[int, typer.Option(min=1, help="Rank of the correction by the token before, for the same.")] = 64,
    learn_head: Annotated[
        bool, typer.Option("--learn-head", help="Learn the head's rows too; for --kind eagle3, else the target's stay.")
    ] = False,
    keep_states: Annotated[
        Path | None, typer.Option(help="Folder that keeps hidden states which `sample` did not.")
    ] = None,
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
        typer.Option(help="Another run of the same layers, or a draft in native format, to start from."),
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
    if kind not in FED and (states is not None or unroll is not None or keep_states is not None):
        raise typer.BadParameter("--states, --unroll and --keep-states are for --kind eagle3, added and block")
    if learn_head and kind is not Kind.EAGLE3:
        raise typer.BadParameter("--learn-head is for --kind eagle3")
    if layers is not None and kind is Kind.EAGLE3:
        raise typer.BadParameter("--layers: a head has no layers of the target; --states says which it is fed")
    settings = TrainSettings(steps=steps, rows=rows, learning_rate=learning_rate, seed=seed, dtype=dtype)
    llm = _open_target(model, target_dtype)
    vocab_size, digest = internals(llm).target.cfg.vocab_size, target_digest(llm)
    num_layers = internals(llm).target.cfg.num_layers
    # A run with a checkpoint of its own needs the weights that it began with no more.
    begun = latest_step(run / CHECKPOINTS) is not None
    made_of: dict[str, Any] = {"kind": str(kind)}
    if kind is not Kind.EAGLE3:
        made_of["layers"] = _parse_numbers("--layers", layers or OWN_LAYERS, num_layers - 1)
    if kind in FED:
        # It may also be fed what leaves the last layer.
        fed = default_layers(num_layers) if states is None else _parse_numbers("--states", states, num_layers)
        made_of |= {"states": list(fed), "unroll": unroll or UNROLL, "learn_head": learn_head}
        made_of["keeps_states"] = keep_states is not None
    if kind is Kind.BLOCK:
        made_of |= {"block": block, "markov": markov}
    begin_draft = begin_with if begin_with is not None and not begun and is_native(begin_with) else None
    begin_run = None if begun or begin_draft is not None else begin_with
    base = {} if begin_run is None else _base_settings(begin_run, digest, made_of)
    folders = [data, *(more_data or [])]
    metas = read_metas(folders, digest)
    conversations, prefix = read_conversations(folders, tokens), metas[0]["prefix"]
    longest = len(prefix) - 1 + max(len(c.token) for c in conversations)
    length = length or longest
    if length < longest:
        raise typer.BadParameter(f"--length {length}: the longest conversation takes {longest} tokens")
    learned, held_out = split_held_out(conversations)
    head_ids = choose_head(learned, vocab_size, head) if head else np.arange(vocab_size, dtype=np.int32)
    packer = Packer(prefix, length, head_ids, vocab_size)
    check_enough(packer, learned, held_out, settings)
    noted = {
        **dataclasses.asdict(settings), "target": digest, **made_of,
        "target_dtype": target_dtype, "head_ids": head_ids.tolist() if head else [], "length": length,
        "begin_with": str(begin_with or ""),
        "data": metas, "sampled_states": [read_meta(folder / STATES) for folder in folders],
        "conversations": len(conversations), "held_out": len(held_out),
        "tokens": sum(len(c.token) for c in learned),
    }  # fmt: skip
    old = earlier_settings(run, noted, begun)
    student = open_student(llm, noted, length, keep_states, folders)
    params = student.params
    if begin_draft is not None:
        digest_of_tokens = vocabulary_digest(llm.tokenizer.token_strings())
        params, is_fed = begin_with_native(params, student.cfg, begin_draft, digest_of_tokens)
    else:
        is_fed = begin_run is not None
    if kind is Kind.ADDED and student.states is not None and not begun and not is_fed:
        first = next(batches(packer, learned, settings))
        params = params | {"fc_norm": scale_states(student.cfg, student.states(first), first)}
    if begin_run is not None:
        noted["begin_step"] = old.get("begin_step", base["latest"])
        try:
            params = restore_params(params, as_settings(base), begin_run / CHECKPOINTS, noted["begin_step"])
        except FileNotFoundError as error:
            raise typer.BadParameter(f"{error}, which {run} began with; name another run") from error
    if not begun:
        noted["seen"] = sorted({*base.get("seen", ()), *(meta["seed"] for meta in metas)})
        keep_settings(run, noted, goes_on=bool(old))
    trainer = student.trainer(params, packer, learned, settings, run / CHECKPOINTS, save_every)
    curve = Curve(run / CURVE, trainer.step)
    looked_at = held_out[:: math.ceil(len(held_out) / LOOKED_AT)]

    def look(step: int) -> None:
        curve.add(step, rows * length, student.quality(trainer.params, packer, looked_at, rows))

    with show_progress() as progress:
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
    target_dtype: TargetDtype = "float32",
    quantize: Annotated[str | None, typer.Option(help="q8_0, q4_0, or leave out for float32.")] = None,
) -> None:
    """Write the newest checkpoint of a run as a draft that `--draft-model` takes."""
    llm = _open_target(model, target_dtype)
    student, trained = _trained_student(llm, run)
    try:
        if student.cfg.has_own_head:
            if quantize is not None:
                raise typer.BadParameter("--quantize: an EAGLE-3 folder holds numbers; run jaxspec-convert on it")
            num_bytes = save_head(draft, student.cfg, whole_leaves(trained, student.head))
        else:
            digest = vocabulary_digest(llm.tokenizer.token_strings())
            # Beyond the length at which it was trained, its attention is of no use.
            cfg = student.cfg
            if cfg.features is None or cfg.features.kind != "block":
                cfg = dataclasses.replace(cfg, sliding_window=read_settings(run)["length"])
            num_bytes = save_draft(draft, trained, cfg, digest, llm.eos_ids, quantize).num_bytes
    except JaxspecError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{draft}: {num_bytes / 1e6:.1f} MB")


@app.command()
def measure(
    run: Annotated[Path, typer.Argument(help="Folder of a run's checkpoints, or a draft in native format.")],
    data: Annotated[Path, typer.Argument(help="Conversations that it has not learned from, of another seed.")],
    model: Model = None,
    target_dtype: TargetDtype = "float32",
) -> None:
    """Compare the newest checkpoint of a run, or a draft, with the target on the answers of other conversations."""
    llm = _open_target(model, target_dtype)
    [meta] = read_metas([data], target_digest(llm))
    if not is_native(run) and meta["seed"] in read_settings(run).get("seen", ()):
        raise typer.BadParameter(f"{data}: the run has learned from text of seed {meta['seed']}; sample with another")
    conversations, prefix = read_conversations([data], 0), meta["prefix"]
    length = len(prefix) - 1 + max(len(c.token) for c in conversations)
    opens = native_student if is_native(run) else _trained_student
    student, trained = opens(llm, run, length, [data])
    vocab_size = internals(llm).target.cfg.vocab_size
    packer = Packer(prefix, length, np.array(student.cfg.head_ids or range(vocab_size), np.int32), vocab_size)
    try:
        quality = student.quality(trained, packer, conversations)
    except ValueError as error:
        raise typer.BadParameter(f"{data}: {error}") from error
    typer.echo(json.dumps(dataclasses.asdict(quality)))


@app.command()
def curve(
    runs: Annotated[list[Path], typer.Argument(help="Runs, each begun with the weights of the one before.")],
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")],
) -> None:
    """Plot what held-out text says against the tokens seen (extra `plot`: matplotlib)."""
    points, agreement = plot_curves(runs, plot)
    typer.echo(f"{plot}: {points} points, last agreement {agreement:.3f}")


def _open_target(model: str | None, dtype: str, possible: Sequence[str] = ("float32", "bfloat16")) -> LLM:
    if dtype not in possible:
        raise typer.BadParameter(f"--target-dtype {dtype!r}: must be {' or '.join(possible)}")
    return LLM(model, method="ar", dtype=cast(DType, dtype))


def _trained_student(llm: LLM, run: Path, length: int = 1, data: Sequence[Path] = ()) -> tuple[Student, Params]:
    """A run's student and its newest parameters."""
    settings = read_settings(run)
    if settings["target"] != target_digest(llm):
        raise typer.BadParameter(f"{run}: was trained for another target")
    student = open_student(llm, settings, length, data=data)
    try:
        return student, restore_params(student.params, as_settings(settings), run / CHECKPOINTS)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


def _parse_numbers(option: str, text: str, last: int) -> list[int]:
    try:
        layers = [int(layer) for layer in text.split(",")]
    except ValueError:
        layers = []
    if not layers or not all(0 <= layer <= last for layer in layers):
        raise typer.BadParameter(f"{option} {text!r}: must be numbers from 0 to {last}, with commas between")
    return layers


def _base_settings(base: Path, target: str, made_of: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that another begins with, and the step of its newest checkpoint, `latest`."""
    settings = read_settings(base)
    if settings["target"] != target:
        raise typer.BadParameter(f"--begin-with {base}: was trained for another target")
    if settings["kind"] != made_of["kind"]:
        raise typer.BadParameter(f"--begin-with {base}: is of --kind {settings['kind']}")
    for name in ("layers", "states", "block", "markov"):
        if settings.get(name) != made_of.get(name):
            theirs = settings.get(name, ())
            theirs = ",".join(map(str, theirs)) if isinstance(theirs, list | tuple) else theirs
            raise typer.BadParameter(f"--begin-with {base}: has the target's {name} {theirs}; give the same --{name}")
    if settings.get("learn_head", False) != made_of.get("learn_head", False):
        raise typer.BadParameter(f"--begin-with {base}: only one of the two has --learn-head")
    latest = latest_step(base / CHECKPOINTS)
    if latest is None:
        raise typer.BadParameter(f"--begin-with {base}: holds no checkpoint yet")
    return {**settings, "latest": latest}


if __name__ == "__main__":
    app()
