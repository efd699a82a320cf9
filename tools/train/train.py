"""Training a student on the teacher's cached logits: KL divergence, AdamW, checkpoints that resume exactly."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params, leaf_name
from pallas_kernels.linear.api import linear
from pallas_kernels.registry import using
from train.batches import Packer, Rows, epoch
from train.shards import Conversation
from train.student import KERNELS, student_hidden


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How a student is trained.

    Attributes:
      steps: updates.
      rows: of a batch.
      learning_rate: its peak; a linear warm-up over `warmup` steps, then a cosine down to a twentieth.
      warmup: steps.
      weight_decay: of the matrices.
      seed: of the order of the data.
      dtype: of the operands of the matrix products; weights, sums and everything else are float32.
    """

    steps: int = 1000
    rows: int = 16
    learning_rate: float = 1.5e-2
    warmup: int = 60
    weight_decay: float = 0.01
    seed: int = 0
    dtype: str = "bfloat16"


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Muon for the matrices (arXiv 2502.16982), Adam for the norms, after a clip of the gradient's norm to 1."""
    warmup = min(settings.warmup, settings.steps // 10)
    peak = settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, settings.steps, peak / 20)
    muon = optax.contrib.muon(
        schedule,
        weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=_matrices,  # pyright: ignore[reportArgumentType]
        # Updates of the size that Adam's have, so that one rate serves both.
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


# Inputs and outputs of the matrices that a leaf holds; gate and up are two.
_MATRICES = {
    "fc": optax.contrib.MuonDimensionNumbers((1,), (0,)),
    "fc_own": optax.contrib.MuonDimensionNumbers((1,), (0,)),
    "head": optax.contrib.MuonDimensionNumbers((1,), (0,)),
    "qkv": optax.contrib.MuonDimensionNumbers((3,), (0, 1, 2)),
    "out": optax.contrib.MuonDimensionNumbers((1, 2, 3), (0,)),
    "gate_up": optax.contrib.MuonDimensionNumbers((2,), (1,)),
    "down": optax.contrib.MuonDimensionNumbers((1,), (0,)),
}


def _matrices(params: Params) -> Any:
    return jax.tree.map_with_path(lambda path, _: _MATRICES.get(leaf_name(path).rsplit(".", 1)[-1]), params)


def student_logprob(params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, rows: Rows) -> jax.Array:
    """Log-probabilities over the student's head, [R, T, V_head]; products in the dtype of the matrices."""
    token, position, segment = (jnp.asarray(x) for x in (rows.token, rows.position, rows.segment))
    hidden = student_hidden(params, cfg, embed, token, position, segment)
    with using(KERNELS):
        logits = linear(hidden.reshape(-1, cfg.embed_dim), head)
    return jax.nn.log_softmax(logits, axis=-1).reshape(*token.shape, -1)


def round_matrices(params: Params, head: jax.Array, dtype: str) -> tuple[Params, jax.Array]:
    """The student's matrices and its head in another dtype; norms and biases stay as they are."""
    names = jax.tree.map_with_path(lambda path, _: leaf_name(path).rsplit(".", 1)[-1] in _MATRICES, params)
    rounded = jax.tree.map(lambda leaf, matrix: leaf.astype(dtype) if matrix else leaf, params, names)
    return rounded, head.astype(dtype)


def distil_loss(params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, rows: Rows) -> jax.Array:
    """Mean KL divergence of the student from the teacher's top tokens, as far as the student's head has them."""
    logprob = student_logprob(params, cfg, embed, head, rows)
    has = rows.teacher_column < head.shape[0]
    own = jnp.take_along_axis(logprob, jnp.minimum(rows.teacher_column, head.shape[0] - 1), axis=-1)
    teacher = jnp.where(has, jnp.exp(rows.teacher_logprob), 0.0)
    divergence = jnp.where(has, teacher * (rows.teacher_logprob - own), 0.0).sum(-1)
    return (rows.weight * divergence).sum() / rows.weight.sum()


@functools.partial(jax.jit, static_argnames=("cfg", "settings"), donate_argnums=(0, 1))
def train_step(
    params: Params, opt_state: Any, embed: jax.Array, head: jax.Array, rows: Rows, *, cfg: ModelConfig, settings: Any
) -> tuple[Params, Any, jax.Array]:
    """One update; returns the loss before it."""

    def loss_of(params: Params) -> jax.Array:
        rounded, rounded_head = round_matrices(params, head, settings.dtype)
        return distil_loss(rounded, cfg, embed, rounded_head, rows)

    return update_params(loss_of, params, opt_state, settings)


def update_params(
    loss_of: Callable[[Params], jax.Array], params: Params, opt_state: Any, settings: TrainSettings,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Params, Any, jax.Array]:  # fmt: skip
    """One update by the gradient of a loss; `rates` multiply the updates of some leaves."""
    loss, gradient = jax.value_and_grad(loss_of)(params)
    found, opt_state = make_optimizer(settings).update(gradient, opt_state, params)
    updates = cast(Params, found)
    updates |= {name: rate * updates[name] for name, rate in rates.items() if name in updates}
    return cast(Params, optax.apply_updates(params, updates)), opt_state, loss


def teacher_loss(
    logprob: jax.Array, column: jax.Array, teacher: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy with the teacher's distribution over the head's tokens, less its least value; and its weight.

    The teacher's top tokens [..., K] that the head has are renormalised. Where the head lacks the teacher's first
    choice nothing is learned.
    """
    has = column < logprob.shape[-1]
    share = jnp.where(has, jnp.exp(teacher), 0.0)
    share = share / jnp.maximum(share.sum(-1, keepdims=True), 1e-9)
    own = jnp.take_along_axis(logprob, jnp.minimum(column, logprob.shape[-1] - 1), axis=-1)
    divergence = jnp.where(share > 0, share * (jnp.log(jnp.where(share > 0, share, 1.0)) - own), 0.0).sum(-1)
    weight = weight * has[..., 0]
    return (weight * divergence).sum(), weight.sum()


def batches(packer: Packer, conversations: Sequence[Conversation], settings: TrainSettings) -> Iterator[Rows]:
    """Batches without end, epoch after epoch.

    Raises:
      ValueError: the first epoch fills no batch. (A later one that fills none, for its conversations are packed in
        another order, is passed over.)
    """
    for number in itertools.count():
        empty = True
        for rows in epoch(packer, conversations, settings.rows, settings.seed, number):
            empty = False
            yield packer.pack(rows)
        if empty and not number:
            raise ValueError(f"{len(conversations)} conversations do not fill one batch of {settings.rows} rows")


@jax.jit
def _all_finite(state: Any) -> jax.Array:
    """Whether every weight and every number of the optimizer's is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


class Trainer:
    """Trains one student; kill it at any time and run it again: the weights will be the same."""

    def __init__(
        self, params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, packer: Packer,
        conversations: Sequence[Conversation], settings: TrainSettings, folder: Path | None = None,
        save_every: int = 200,
    ):  # fmt: skip
        """`folder` holds the checkpoints (none are kept without it); the last one there is where training goes on."""
        self.cfg, self.settings = cfg, settings
        self.step, self._state = 0, _begin(params, settings)
        if isinstance(embed.sharding, NamedSharding):
            # Where a step leaves them: else the second step compiles again.
            self._state = jax.device_put(self._state, NamedSharding(embed.sharding.mesh, PartitionSpec()))
        self._tables = (embed, head)
        self._packer, self._conversations = packer, conversations
        self._save_every = save_every
        self._manager = None
        if folder is not None:
            self._manager = _open_checkpoints(folder)
            if (latest := self._manager.latest_step()) is not None:
                self.step, self._state = latest, _restore(self._manager, latest, self._state)

    @property
    def params(self) -> Params:
        """The student's own parameters after `step` updates."""
        return self._state["params"]

    def update(self, state: dict[str, Any], rows: Rows) -> tuple[Params, Any, jax.Array]:
        """One step on a batch: from `params` and `optimizer` to the next ones, and the loss before it."""
        params, optimizer = state["params"], state["optimizer"]
        return train_step(params, optimizer, *self._tables, rows, cfg=self.cfg, settings=self.settings)

    def run(self, report: Callable[[int, float], None] = lambda step, loss: None) -> Params:
        """Train to the end; `report` is told the step and its loss, before the step is saved.

        Raises:
          FloatingPointError: a loss, or what a step made of the weights, is not finite; that step is not saved.
        """
        stream = itertools.islice(batches(self._packer, self._conversations, self.settings), self.step, None)
        while self.step < self.settings.steps:
            params, optimizer, loss = self.update(self._state, next(stream))
            self.step, self._state = self.step + 1, {"params": params, "optimizer": optimizer}
            if not math.isfinite(float(loss)):
                raise FloatingPointError(f"step {self.step}: the loss is {float(loss)}")
            if not _all_finite(self._state):
                raise FloatingPointError(f"step {self.step}: the weights are no longer finite")
            report(self.step, float(loss))
            if self._manager is not None and (self.step % self._save_every == 0 or self.step == self.settings.steps):
                self._manager.save(self.step, args=ocp.args.StandardSave(self._state))
        return self.params


def latest_step(folder: Path) -> int | None:
    """Step of a run's newest checkpoint; None where there is none yet."""
    return _open_checkpoints(folder).latest_step() if folder.is_dir() else None


def restore_params(params: Params, settings: TrainSettings, folder: Path, step: int | None = None) -> Params:
    """The student's parameters in a checkpoint of a run that began with `params`: the newest, or that of `step`.

    Raises:
      FileNotFoundError: there is none.
    """
    manager = _open_checkpoints(folder) if folder.is_dir() else None
    if manager is None or (latest := manager.latest_step()) is None:
        raise FileNotFoundError(f"{folder}: holds no checkpoint")
    if step is not None and step not in manager.all_steps():
        raise FileNotFoundError(f"{folder}: no longer holds the checkpoint of step {step}")
    return _restore(manager, latest if step is None else step, _begin(params, settings))["params"]


def _begin(params: Params, settings: TrainSettings) -> dict[str, Any]:
    params = jax.tree.map(jnp.array, params)
    return {"params": params, "optimizer": make_optimizer(settings).init(params)}


def _open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _restore(manager: ocp.CheckpointManager, step: int, state: dict[str, Any]) -> dict[str, Any]:
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return dict(manager.restore(step, args=ocp.args.StandardRestore(shapes)))


@dataclasses.dataclass(frozen=True)
class Quality:
    """Figures of a student on held-out answers, teacher forced.

    Attributes:
      loss: mean KL divergence, weighted as in training.
      agreement: share of the answers' positions where student and teacher find the same token most probable.
      by_depth: on greedy answers, the share of positions at which the d-th token of a chain is right among those whose
        first d - 1 were; d = 1, 2, ...; zeros without greedy answers of so many tokens.
      accepted: on greedy answers, mean accepted length of a chain of d tokens (without the bonus token).
      positions: how many positions that is.
    """

    loss: float
    agreement: float
    by_depth: tuple[float, ...]
    accepted: tuple[float, ...]
    positions: int


@functools.partial(jax.jit, static_argnames=("cfg",))
def _examine(params: Params, embed: jax.Array, head: jax.Array, rows: Rows, *, cfg: ModelConfig) -> tuple:
    best = jnp.argmax(student_logprob(params, cfg, embed, head, rows), axis=-1)
    loss = distil_loss(params, cfg, embed, head, rows)
    return best == rows.teacher_column[:, :, 0], loss


def measure_quality(
    params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, packer: Packer,
    held_out: Sequence[Conversation], rows: int = 8, depth: int = 8,
) -> Quality:  # fmt: skip
    """Compare a student with its teacher on held-out conversations.

    Raises:
      ValueError: none of them has an answer.
    """
    matches: list[np.ndarray] = []
    greedy: list[np.ndarray] = []
    losses = []
    for arrays, places in held_out_batches(packer, held_out, rows):
        hit, loss = _examine(params, embed, head, arrays, cfg=cfg)
        losses.append((float(loss), float(arrays.weight.sum())))
        for r, end, c in places:
            hits = np.asarray(hit[r, end - len(c.token) + c.answer - 1 : end - 1])
            matches.append(hits)
            if c.temperature == 0:
                greedy.append(hits)
    loss = float(np.average([x for x, _ in losses], weights=[n for _, n in losses]))
    return summarise(loss, matches, [_run_lengths(hits, depth) for hits in greedy], depth)


def held_out_batches(
    packer: Packer, held_out: Sequence[Conversation], rows: int
) -> Iterator[tuple[Rows, list[tuple[int, int, Conversation]]]]:
    """Batches of the conversations that have an answer: packed rows; and row, end and conversation of each text.

    Raises:
      ValueError: none of them has an answer.
    """
    answered = [c for c in held_out if c.answer < len(c.token)]
    if not answered:
        raise ValueError(f"none of {len(held_out)} held-out conversations has an answer; sample more")
    packed = packer.fill(answered)
    for start in range(0, len(packed), rows):
        batch = packed[start : start + rows]
        arrays = packer.pack(batch + [batch[-1]] * (rows - len(batch)))
        arrays.weight[len(batch) :] = 0
        ends = (itertools.accumulate(map(packer.tokens, row)) for row in batch)
        places = [(r, end, c) for r, row in enumerate(batch) for end, c in zip(next(ends), row, strict=True)]
        yield arrays, places


def summarise(loss: float, matches: Sequence[np.ndarray], run_lengths: Sequence[np.ndarray], depth: int) -> Quality:
    """The quality of a student.

    Args:
      loss: see `Quality`.
      matches: of each answer, whether each position's first choice is the teacher's.
      run_lengths: of each greedy answer, how many tokens of a chain of `depth` are right at each position.
      depth: tokens of a chain.
    """
    runs = np.concatenate([np.zeros(0, int), *run_lengths])
    reached = [float((runs >= d).mean()) if len(runs) else 0.0 for d in range(depth + 1)]
    return Quality(
        loss=loss,
        agreement=float(np.concatenate(matches).mean()),
        by_depth=tuple(reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, depth + 1)),
        accepted=tuple(float(np.minimum(runs, d).mean()) if len(runs) else 0.0 for d in range(1, depth + 1)),
        positions=int(sum(map(len, matches))),
    )


def _run_lengths(hits: np.ndarray, longest: int) -> np.ndarray:
    """How many hits in a row begin at each position that has `longest` positions after it."""
    count = max(0, len(hits) - longest + 1)
    windows = np.lib.stride_tricks.sliding_window_view(hits, longest) if count else np.zeros((0, longest), bool)
    return np.cumprod(windows, axis=1).sum(axis=1)
