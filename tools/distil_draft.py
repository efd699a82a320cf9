"""Make a draft model for any target: sample text from the target, train on its logits, write a draft that loads.

    python tools/distil_draft.py sample DATA --tokens 1000000
    python tools/distil_draft.py train DATA RUN --layers 0,1,29 --head 8192 --steps 1000
    python tools/distil_draft.py measure RUN FRESH_DATA
    python tools/distil_draft.py curve RUN --plot curve.png
    python tools/distil_draft.py export RUN DRAFT --quantize q8_0
    jaxspec-decode --draft-model DRAFT ...

A draft is some of the target's own layers, or with `train --kind eagle3` a head that is fed the target's hidden states.
Each command can be killed and run again: it goes on where it was, and ends with the same bytes. `--model` names the
target; without it, it is the default model. Needs the extra `train` (optax).
"""

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from distil.batches import Packer, choose_head, split_held_out
from distil.eagle import HeadTrainer, head_config, init_head, measure_head, whole_leaves
from distil.export import save_draft, save_head
from distil.runs import (
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
from distil.sample import Sampler, SampleSettings, answers_of, sample_shards, target_digest
from distil.shards import write_meta
from distil.states import KeptStates, StateSource, TargetStates
from distil.student import init_student, student_config
from distil.train import (
    Quality,
    Trainer,
    TrainSettings,
    latest_step,
    measure_quality,
    restore_params,
)

from jaxspec import LLM
from jaxspec.checkpoint.shipped import vocabulary_digest
from jaxspec.errors import JaxspecError
from jaxspec.models.config import ModelConfig
from jaxspec.models.features import default_layers
from jaxspec.models.params import Params

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)

Model = Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")]
TargetDtype = Annotated[str, typer.Option(help="Of the target's weights: float32, or bfloat16 on a GPU.")]


class Kind(enum.StrEnum):
    """What a draft is."""

    LAYERS = "layers"
    EAGLE3 = "eagle3"


# What `--layers` is where it is not given: of the default model.
OWN_LAYERS = "0,1,29"
UNROLL = 4


@app.command()
def sample(
    data: Annotated[Path, typer.Argument(help="Folder of the sampled conversations.")],
    model: Model = None,
    target_dtype: TargetDtype = "float32",
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
    llm = _open_target(model, target_dtype)
    shards = range(math.ceil(tokens / (branches * steps)))
    try:
        sampler = Sampler(llm, settings, answers_of(llm, passages) if passages else ())
        write_meta(data, sampler.meta())
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
    kind: Annotated[Kind, typer.Option(help="Layers of the target, or a head that is fed its hidden states.")] = (
        Kind.LAYERS
    ),
    layers: Annotated[
        str | None,
        typer.Option(
            help=f"Layers of the target that the draft starts from [{OWN_LAYERS}]; with --kind eagle3, layers whose "
            "inputs it is fed [the 3rd, the middle one, the 3rd from the end]."
        ),
    ] = None,
    unroll: Annotated[
        int | None, typer.Option(min=1, help=f"Steps on its own states, for --kind eagle3 [{UNROLL}].")
    ] = None,
    learn_head: Annotated[
        bool, typer.Option("--learn-head", help="Learn the head's rows too; for --kind eagle3, else the target's stay.")
    ] = False,
    keep_states: Annotated[
        Path | None, typer.Option(help="Folder that keeps the target's hidden states; for --kind eagle3.")
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
    if kind is not Kind.EAGLE3 and (unroll is not None or learn_head or keep_states is not None):
        raise typer.BadParameter("--unroll, --learn-head and --keep-states are for --kind eagle3")
    settings = TrainSettings(steps=steps, rows=rows, learning_rate=learning_rate, seed=seed, dtype=dtype)
    llm = _open_target(model, target_dtype)
    vocab_size, digest = llm.engine.target.cfg.vocab_size, target_digest(llm)
    chosen = _parse_layers(layers, kind, llm.engine.target.cfg.num_layers)
    # A run with a checkpoint of its own needs the weights that it began with no more.
    begun = latest_step(run / CHECKPOINTS) is not None
    made_of: dict[str, Any] = {"kind": str(kind), "layers": chosen}
    if kind is Kind.EAGLE3:
        made_of |= {"unroll": unroll or UNROLL, "learn_head": learn_head, "keeps_states": keep_states is not None}
    base = _base_settings(begin_with, digest, made_of) if begin_with is not None and not begun else {}
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
        "data": metas, "conversations": len(conversations), "held_out": len(held_out),
        "tokens": sum(len(c.token) for c in learned),
    }  # fmt: skip
    old = earlier_settings(run, noted, begun)
    student = _open_student(llm, noted, length, keep_states)
    params = student.params
    if begin_with is not None and not begun:
        noted["begin_step"] = old.get("begin_step", base["latest"])
        try:
            params = restore_params(params, as_settings(base), begin_with / CHECKPOINTS, noted["begin_step"])
        except FileNotFoundError as error:
            raise typer.BadParameter(f"{error}, which {run} began with; name another run") from error
    if not begun:
        noted["seen"] = sorted({*base.get("seen", ()), *(meta["seed"] for meta in metas)})
        keep_settings(run, noted, goes_on=bool(old))
    trainer = student.trainer(params, packer, learned, settings, run / CHECKPOINTS, save_every)
    curve = Curve(run / CURVE, trainer.step)

    def look(step: int) -> None:
        curve.add(step, rows * length, student.quality(trainer.params, packer, held_out, rows))

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
        if student.states is not None:
            if quantize is not None:
                raise typer.BadParameter("--quantize: an EAGLE-3 folder holds numbers; run jaxspec-convert on it")
            num_bytes = save_head(draft, student.cfg, whole_leaves(trained, student.head))
        else:
            digest = vocabulary_digest(llm.tokenizer.token_strings())
            num_bytes = save_draft(draft, trained, student.cfg, digest, llm.eos_ids, quantize).num_bytes
    except JaxspecError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{draft}: {num_bytes / 1e6:.1f} MB")


@app.command()
def measure(
    run: Annotated[Path, typer.Argument(help="Folder of a run's checkpoints.")],
    data: Annotated[Path, typer.Argument(help="Conversations that the run has not seen, of another seed.")],
    model: Model = None,
    target_dtype: TargetDtype = "float32",
) -> None:
    """Compare the newest checkpoint of a run with the target on the answers of other conversations."""
    llm = _open_target(model, target_dtype)
    [meta] = read_metas([data], target_digest(llm))
    if meta["seed"] in read_settings(run).get("seen", ()):
        raise typer.BadParameter(f"{data}: the run has learned from text of seed {meta['seed']}; sample with another")
    conversations, prefix = read_conversations([data], 0), meta["prefix"]
    length = len(prefix) - 1 + max(len(c.token) for c in conversations)
    student, trained = _trained_student(llm, run, length)
    vocab_size = llm.engine.target.cfg.vocab_size
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


def _open_target(model: str | None, dtype: str) -> LLM:
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"--target-dtype {dtype!r}: must be float32 or bfloat16")
    return LLM(model, method="ar", dtype=dtype)


def _head_rows(llm: LLM, head_ids: np.ndarray) -> jax.Array:
    """The target's rows of a student's head, [V_head, D]."""
    return jnp.asarray(np.asarray(llm.params.get("head", llm.params["embed"]))[head_ids])


@dataclasses.dataclass
class _Student:
    """A draft in training.

    Attributes:
      cfg: its geometry.
      params: what it begins with.
      embed: the target's embedding.
      head: the target's rows of its head.
      states: gives the target's hidden states; None for a draft that is fed none.
      unroll: steps on its own states.
    """

    cfg: ModelConfig
    params: Params
    embed: jax.Array
    head: jax.Array
    states: StateSource | None = None
    unroll: int = 0

    def trainer(self, params: Params, *words: Any) -> Trainer:
        """`words` are those of `Trainer` from `packer` on."""
        if self.states is None:
            return Trainer(params, self.cfg, self.embed, self.head, *words)
        return HeadTrainer(params, self.cfg, self.embed, self.head, self.states, self.unroll, *words)

    def quality(self, params: Params, *words: Any) -> Quality:
        """`words` are those of `measure_quality` from `packer` on."""
        if self.states is None:
            return measure_quality(params, self.cfg, self.embed, self.head, *words)
        return measure_head(params, self.cfg, self.embed, self.head, self.states, *words)


def _open_student(llm: LLM, settings: dict[str, Any], length: int, keep_states: Path | None = None) -> _Student:
    """The student that a run's settings describe, for rows of `length` tokens; runs of earlier versions have no kind.

    Without a length its states cannot be asked for.
    """
    target, layers = llm.engine.target.cfg, settings["layers"]
    head_ids = settings["head_ids"]
    embed, head = llm.params["embed"], _head_rows(llm, np.array(head_ids or range(target.vocab_size), np.int32))
    if settings.get("kind", Kind.LAYERS) == Kind.LAYERS:
        return _Student(student_config(target, layers, head_ids), init_student(llm.params, layers), embed, head)
    cfg = head_config(target, layers, head_ids)
    params = init_head(llm.params, cfg) | ({"head": head.astype(jnp.float32)} if settings["learn_head"] else {})
    computed = TargetStates(llm, layers, length)
    try:
        states = computed if keep_states is None else KeptStates(computed, keep_states)
    except ValueError as error:
        raise typer.BadParameter(f"--keep-states {error}") from error
    return _Student(cfg, params, embed, head, states, settings["unroll"])


def _trained_student(llm: LLM, run: Path, length: int = 1) -> tuple[_Student, Params]:
    """A run's student and its newest parameters."""
    settings = read_settings(run)
    if settings["target"] != target_digest(llm):
        raise typer.BadParameter(f"{run}: was trained for another target")
    student = _open_student(llm, settings, length)
    try:
        return student, restore_params(student.params, as_settings(settings), run / CHECKPOINTS)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


def _parse_layers(text: str | None, kind: Kind, num_layers: int) -> list[int]:
    # A head may also be fed what leaves the last layer.
    last = num_layers if kind is Kind.EAGLE3 else num_layers - 1
    if text is None:
        text = ",".join(map(str, default_layers(num_layers))) if kind is Kind.EAGLE3 else OWN_LAYERS
    try:
        layers = [int(layer) for layer in text.split(",")]
    except ValueError:
        layers = []
    if not layers or not all(0 <= layer <= last for layer in layers):
        raise typer.BadParameter(f"--layers {text!r}: must be numbers from 0 to {last}, with commas between")
    return layers


def _base_settings(base: Path, target: str, made_of: dict[str, Any]) -> dict[str, Any]:
    """What the run that another begins with was made with, and the step of its newest checkpoint, `latest`."""
    settings = read_settings(base)
    if settings["target"] != target:
        raise typer.BadParameter(f"--begin-with {base}: was trained for another target")
    if (kind := settings.get("kind", str(Kind.LAYERS))) != made_of["kind"]:
        raise typer.BadParameter(f"--begin-with {base}: is of --kind {kind}")
    if settings["layers"] != made_of["layers"]:
        theirs = ",".join(map(str, settings["layers"]))
        raise typer.BadParameter(f"--begin-with {base}: has the target's layers {theirs}; give the same --layers")
    if settings.get("learn_head", False) != made_of.get("learn_head", False):
        raise typer.BadParameter(f"--begin-with {base}: only one of the two has --learn-head")
    latest = latest_step(base / CHECKPOINTS)
    if latest is None:
        raise typer.BadParameter(f"--begin-with {base}: holds no checkpoint yet")
    return {**settings, "latest": latest}


if __name__ == "__main__":
    app()
