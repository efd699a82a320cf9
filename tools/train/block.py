"""A draft that fills a block, in training: its geometry, its first weights, and the loss over blocks of a text.

Anchors lie evenly in each row, from a place that its tokens say. Each is the root of one block, whose rows see the
states of the text before it and each other: a pass of the library's own layers over a window with one block for each
anchor, so that what is trained is what decodes. The token before a place, which the correction takes, is the text's own
(DSpark, arXiv 2607.05147); a chain takes the draft's choice.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import fuse
from jaxspec.models.features import FeatureConfig
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import Window, finish_rows, run_layers
from pallas_kernels.linear.api import linear
from pallas_kernels.registry import using
from train.batches import Packer, Rows
from train.eagle import HeadTrainer, on_each_row
from train.shards import Conversation
from train.states import StateSource
from train.student import KERNELS, init_student, student_config
from train.train import (
    Quality,
    TrainSettings,
    held_out_batches,
    round_matrices,
    summarise,
    teacher_loss,
    update_params,
)

# Tokens from one anchor of a row to the next.
STRIDE = 8
# Places after which a token counts 1/e of what the first one counts.
DECAY = 3.0
NOISE = 0.02


def block_config(
    target: ModelConfig, layers: Sequence[int], states: Sequence[int], head_ids: Sequence[int], block: int, markov: int
) -> ModelConfig:
    """Geometry of a draft of the given layers of its target that fills `block` places, with DSpark's correction.

    Token 0 stands for a masked place. `markov` is the rank of the correction, at least 1.

    Raises:
      ConfigError: see `student_config` and `FeatureConfig`.
    """
    features = FeatureConfig(
        target.embed_dim, tuple(states), "block", own_head=False, block=block, first_row=0, markov_rank=markov
    )  # fmt: skip
    plain = replace(student_config(target, layers, head_ids), tied=False)
    return replace(plain, features=features.resolve(target.num_layers))


def init_block(target: Params, cfg: ModelConfig, layers: Sequence[int], seed: int = 0) -> Params:
    """First weights, float32: the target's layers take its last state, and nothing is corrected."""
    features, D = cfg.features, cfg.embed_dim
    assert features is not None
    keys = jax.random.split(jax.random.key(seed), 2)
    rows = len(cfg.head_ids) or cfg.vocab_size
    fc = NOISE * jax.random.normal(keys[0], (D, features.states_dim))
    return init_student(target, layers) | {
        "fc": fc.at[:, -D:].set(jnp.eye(D)), "hidden_norm": jnp.asarray(target["layers"][layers[0]]["attn_norm"]),
        "markov_in": NOISE * jax.random.normal(keys[1], (cfg.vocab_size, features.markov_rank)),
        "markov_out": jnp.zeros((rows, features.markov_rank)),
    }  # fmt: skip


class Blocks(NamedTuple):
    """Blocks of a batch: R rows with A anchors each, B places."""

    hidden: jax.Array  # float32 [R, A, B, D], what the head sees
    place: jax.Array  # int32 [R, A, B], of the token before each
    counts: jax.Array  # float32 [R, A, B], 0 where the text ends before


def fill_blocks(params: Params, cfg: ModelConfig, embed: jax.Array, states: jax.Array, rows: Rows) -> Blocks:
    """The blocks of all anchors of a batch; `states` are [R, T, n * D_target]."""
    features = cfg.features
    assert features is not None
    B, T = features.block, rows.token.shape[1]
    token, position, segment = (jnp.asarray(x) for x in (rows.token, rows.position, rows.segment))
    first = token.sum(axis=1, keepdims=True) % STRIDE
    anchor = first + STRIDE * jnp.arange(T // STRIDE)  # [R, A], some beyond the end
    place = anchor[..., None] + jnp.arange(B)
    inside = jnp.minimum(place, T - 1)
    own = jnp.take_along_axis(segment, jnp.minimum(anchor, T - 1), axis=1)
    same = (
        jnp.take_along_axis(segment, inside.reshape(len(segment), -1), axis=1).reshape(inside.shape) == own[..., None]
    )
    counts = (same & (place < T) & (own >= 0)[..., None]).astype(jnp.float32)
    whole = params | {"embed": embed}
    run = functools.partial(_fill_row, whole, cfg)
    hidden = on_each_row(run, token, position, segment, states, jnp.minimum(anchor, T - 1))
    return Blocks(hidden, inside, counts)


def _fill_row(whole, cfg, token, position, segment, states, anchor):
    """What the head sees of all blocks of one row, [A, B, D]."""
    B, T, A = cfg.features.block, token.shape[0], anchor.shape[0]
    state = fuse(whole, cfg, states.astype(jnp.float32))
    cache = init_cache(cfg, cfg.num_kv_heads, T + A * B, jnp.dtype("float32"))
    enter = lambda _: (state, state)  # noqa: E731
    _, cache, _ = run_layers(whole, cfg, token, position, cache, None, None, enter=enter, keys_only=True)
    of = jnp.repeat(jnp.arange(A), B)
    place = jnp.tile(jnp.arange(B), A)
    before = (segment == segment[anchor][:, None]) & (jnp.arange(T) < anchor[:, None])  # [A, T]
    mask = jnp.concatenate([before[of], of[:, None] == of], axis=1)
    where = position[anchor][of] + place
    window = Window(mask, jnp.concatenate([position, where]), jnp.int32(T), None)
    filled = jnp.where(place == 0, token[anchor][of], cfg.features.mask_token)
    x, _, _ = run_layers(whole, cfg, filled, where, cache, window, None)
    return finish_rows(whole, cfg, x).reshape(A, B, -1)


def _at(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Entries of [R, T, ...] at int32 [R, A, B]."""
    return rows[jnp.arange(rows.shape[0])[:, None, None], place]


def _logprob(params: Params, head: jax.Array, hidden: jax.Array, before: jax.Array) -> jax.Array:
    """Log-probabilities of places [..., V_head] after int32 [...] tokens."""
    with using(KERNELS):
        own = linear(hidden.reshape(-1, hidden.shape[-1]), head)
        bias = linear(params["markov_in"][before.reshape(-1)], params["markov_out"])
    return jax.nn.log_softmax(own + bias, axis=-1).reshape(*before.shape, -1)


def block_loss(
    params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """`teacher_loss` of all places, the later ones with less weight."""
    blocks = fill_blocks(params, cfg, embed, states, rows)
    logprob = _logprob(params, head, blocks.hidden, _at(jnp.asarray(rows.token), blocks.place))
    column, teacher = (_at(jnp.asarray(x), blocks.place) for x in (rows.teacher_column, rows.teacher_logprob))
    weight = _at(jnp.asarray(rows.weight), blocks.place) * blocks.counts
    return teacher_loss(logprob, column, teacher, weight * jnp.exp(-jnp.arange(weight.shape[-1]) / DECAY))


@functools.partial(jax.jit, static_argnames=("cfg", "settings"), donate_argnums=(0, 1))
def train_step(
    params: Params, opt_state: Any, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows,
    *, cfg: ModelConfig, settings: TrainSettings,
) -> tuple[Params, Any, jax.Array]:  # fmt: skip
    """One update; returns the loss before it."""

    def loss_of(params: Params) -> jax.Array:
        rounded, rounded_head = round_matrices(params, head, settings.dtype)
        total, weight = block_loss(rounded, cfg, embed, rounded_head, states, rows)
        return total / jnp.maximum(weight, 1e-9)

    return update_params(loss_of, params, opt_state, settings)


class BlockTrainer(HeadTrainer):
    """A `Trainer` of a draft that fills a block."""

    def update(self, state: dict[str, Any], rows: Rows) -> tuple[Params, Any, jax.Array]:
        """See `Trainer.update`."""
        return train_step(
            state["params"], state["optimizer"], *self._tables, self._states(rows), rows,
            cfg=self.cfg, settings=self.settings,
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("cfg",))
def _examine(
    params: Params, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows, *, cfg: ModelConfig
) -> tuple[jax.Array, ...]:
    blocks = fill_blocks(params, cfg, embed, states, rows)
    column = _at(jnp.asarray(rows.teacher_column), blocks.place)[..., 0]
    ids = jnp.asarray(cfg.head_ids or range(cfg.vocab_size), jnp.int32)
    token, hits = _at(jnp.asarray(rows.token), blocks.place[..., :1]), []
    for place in range(column.shape[-1]):
        logprob = _logprob(params, head, blocks.hidden[:, :, place : place + 1], token)
        best = jnp.argmax(logprob, axis=-1)
        hits.append(best == column[..., place : place + 1])
        token = ids[best]
    total, weight = block_loss(params, cfg, embed, head, states, rows)
    return jnp.concatenate(hits, axis=-1), blocks.place, blocks.counts, total, weight


def measure_block(
    params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, states: StateSource, packer: Packer,
    held_out: Sequence[Conversation], rows: int = 8,
) -> Quality:  # fmt: skip
    """Compare chains of a draft with its teacher on held-out conversations; see `Quality`.

    Raises:
      ValueError: no conversation has an answer.
    """
    assert cfg.features is not None
    matches: list[np.ndarray] = []
    runs: list[np.ndarray] = []
    losses = []
    for arrays, places in held_out_batches(packer, held_out, rows):
        hit, place, counts, *loss = _examine(params, embed, head, states(arrays), arrays, cfg=cfg)
        losses.append([float(part) for part in loss])
        hits, place = np.asarray(hit), np.asarray(place)
        whole = np.all(np.asarray(counts) > 0, axis=-1)
        for r, end, c in places:
            answer = end - len(c.token) + c.answer - 1
            own = whole[r, :] & (place[r, :, 0] >= answer) & (place[r, :, -1] < end - 1)
            matches.append(hits[r, own, 0])
            if c.temperature == 0:
                runs.append(np.cumprod(hits[r, own], axis=1).sum(axis=1))
    total, count = np.sum(losses, axis=0)
    return summarise(total / count if count else 0.0, matches, runs, cfg.features.places)
