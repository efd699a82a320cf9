"""Folders of sampled conversations and of runs, as the tool finds and leaves them.

What a user can set right is a `typer.BadParameter`.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from train.batches import Packer
from train.shards import Conversation, read_meta, read_shard, replace_text
from train.train import Quality, TrainSettings, batches

SETTINGS = "settings.json"
CHECKPOINTS = "checkpoints"
CURVE = "curve.jsonl"


def read_settings(run: Path) -> dict[str, Any]:
    """Settings that a run was begun with."""
    path = run / SETTINGS
    if not path.is_file():
        raise typer.BadParameter(f"{run}: holds no run; begin one with `train`")
    return json.loads(path.read_text())


def as_settings(settings: dict[str, Any]) -> TrainSettings:
    """The part of a run's settings that says how it is trained."""
    return TrainSettings(**{field.name: settings[field.name] for field in dataclasses.fields(TrainSettings)})


class Curve:
    """Quality on held-out text against tokens seen, one JSON object a line; a run that goes on cuts what it redoes."""

    def __init__(self, path: Path, step: int):
        """Open the curve of a run that is at `step`."""
        self._path = path
        # What was cut off in the middle of a line has no end of line.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        replace_text(path, "".join(kept))
        self._losses: list[float] = []
        self._start = time.monotonic()
        self.last = kept[-1].rstrip() if kept else ""

    def loss(self, loss: float) -> None:
        """Note a step's loss."""
        self._losses.append(loss)

    def add(self, step: int, places: int, quality: Quality) -> None:
        """Write what held-out text says after a step; `places` are the tokens of a batch."""
        seconds = round(time.monotonic() - self._start, 1)
        entry: dict[str, Any] = {"step": step, "places": step * places, "seconds": seconds}
        if self._losses:
            entry["training_loss"] = float(np.mean(self._losses))
        self._losses.clear()
        self.last = json.dumps(entry | dataclasses.asdict(quality))
        with open(self._path, "a") as file:
            file.write(self.last + "\n")


def read_metas(folders: Sequence[Path], target: str) -> list[dict[str, Any]]:
    """Settings that conversations were sampled with; all of one target, template and number of logits."""
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


def read_conversations(folders: Sequence[Path], tokens: int) -> list[Conversation]:
    """The conversations of all folders, in order; those of the first shards that have so many tokens, if not 0."""
    conversations: list[Conversation] = []
    for path in (path for folder in folders for path in sorted(folder.glob("shard-*.npz"))):
        if tokens and sum(len(c.token) for c in conversations) >= tokens:
            break
        conversations += read_shard(path)
    if not conversations:
        raise typer.BadParameter(f"{', '.join(map(str, folders))}: no conversations yet; run `sample` first")
    return conversations


def earlier_settings(run: Path, settings: dict[str, Any], begun: bool) -> dict[str, Any]:
    """Settings of a run that goes on; empty for a new one, and for one that may begin anew.

    That is one without a checkpoint whose settings were others; with a checkpoint (`begun`) it is refused.
    """
    path = run / SETTINGS
    if not path.exists():
        if begun:
            raise typer.BadParameter(f"{run}: holds checkpoints, but no {SETTINGS}; name another run")
        return {}
    old = read_settings(run)
    # `begin_step` and `seen` are noted later.
    differing = sorted(key for key in {*old} & {*settings} if old[key] != settings[key])
    if differing and begun:
        raise typer.BadParameter(f"{run}: was begun with other settings ({', '.join(differing)}); name another run")
    return {} if differing else old


def keep_settings(run: Path, settings: dict[str, Any], goes_on: bool) -> None:
    """Note what a run without a checkpoint is made with; what was measured with other settings is forgotten."""
    run.mkdir(parents=True, exist_ok=True)
    if not goes_on:
        (run / CURVE).unlink(missing_ok=True)
    replace_text(run / SETTINGS, json.dumps(settings) + "\n")


def plot_curves(runs: Sequence[Path], plot: Path) -> tuple[int, float]:
    """Draw the curves of runs, each begun with the one before; returns the number of points and the last agreement."""
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
    return len(places), agreement[-1]


def check_enough(
    packer: Packer, learned: Sequence[Conversation], held_out: Sequence[Conversation], settings: TrainSettings
) -> None:
    """There must be a batch to learn from and an answer to measure with."""
    if all(c.answer == len(c.token) for c in held_out):
        raise typer.BadParameter(f"none of {len(held_out)} held-out conversations has an answer; sample more")
    try:
        next(batches(packer, learned, settings))
    except ValueError as error:
        raise typer.BadParameter(f"--rows {settings.rows}: {error}") from error


def show_progress() -> Progress:
    """A bar with what is done, what there is, and the time that is left."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )
