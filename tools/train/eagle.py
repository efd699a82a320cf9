"""A feature draft in training: its geometry, its first weights, and the loss over steps on its own states.

Training-time test (EAGLE-3, arXiv 2503.01840): step 0 feeds a row the target's states, as after a verification; each
later step feeds it the state that the step before left, as in a chain. The tokens are the text's own. A row sees the
true rows before it and its own earlier steps, which is what a branch of a draft tree sees: each step is a pass of
`forward_draft` over a tree window with one branch for each row, so that what is trained is what decodes.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.feature_draft import forward_draft, fuse
from jaxspec.models.features import FeatureConfig
from jaxspec.models.kv_cache import KVCache, init_cache
from jaxspec.models.params import Params, declare_params, is_info, leaf_name
from jaxspec.models.rope import RopeConfig
from pallas_kernels.linear.api import BATCHES, linear
from pallas_kernels.registry import Kernels, using
from pallas_kernels.rms_norm import rms_norm
from train.batches import Packer, Rows
from train.shards import Conversation
from train.states import StateSource
from train.student import KERNELS, init_student, student_config
from train.train import (
    Quality,
    Trainer,
    TrainSettings,
    held_out_batches,
    round_matrices,
    summarise,
    teacher_loss,
    update_params,
)

# What a step counts beside the one before it, as in the published training code.
STEP_WEIGHT = 0.8
# Size of the input of a feature draft's `fc`, so that its first updates do not drown the tokens.
STATE_SCALE = 0.1
# Learning rate of `fc_own` beside that of other weights: the states that it takes are large beside embeddings.
OWN_RATE = 0.05
# Standard deviation of weights that nothing is known about.
NOISE = 0.02


def head_config(target: ModelConfig, states: Sequence[int], head_ids: Sequence[int]) -> ModelConfig:
    """Geometry of a head for a target: one plain layer of its widths that proposes `head_ids` (all tokens if empty).

    `states` are the hidden states that it is fed, see `FeatureConfig.layers`.

    Raises:
      ConfigError: the target lacks one of them.
    """
    features = FeatureConfig(target.embed_dim, tuple(states)).resolve(target.num_layers)
    # What a folder in SafeAILab's layout can say.
    rope = target.rope if target.rope.scaling in ("default", "llama3") else RopeConfig(target.rope.theta)
    return ModelConfig(
        "llama", 1, target.embed_dim, target.mlp_dim, target.num_heads, target.num_kv_heads, target.head_dim,
        target.vocab_size, target.max_context, rope, target.norm_eps, shares_embedding=True,
        head_ids=tuple(head_ids), features=features,
    )  # fmt: skip


def init_head(target: Params, cfg: ModelConfig, seed: int = 0) -> Params:
    """First weights, float32, without the head's own rows, which begin as the target's.

    The layer is the target's last one where the shapes agree, fed the last of the states; what takes the token and the
    other states is noise.
    """
    key = jax.random.key(seed)
    D, last = cfg.embed_dim, target["layers"][-1]
    leaves, tree = jax.tree.flatten_with_path(declare_params(cfg, jnp.float32), is_leaf=is_info)

    def copied(name: str, shape: tuple[int, ...]) -> jax.Array | None:
        leaf = target.get(name) if name == "final_norm" else last.get(name)
        fits = isinstance(leaf, jax.Array) and leaf.shape == shape and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, jnp.float32) if fits else None

    def make(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        noise = NOISE * jax.random.normal(key, shape)
        if name == "fc":
            return noise.at[:, -D:].set(jnp.eye(D)) if cfg.features and cfg.features.target_dim == D else noise
        if name == "qkv":
            state_half = copied(name, (*shape[:-1], D))
            return noise if state_half is None else noise.at[..., D:].set(state_half)
        if name == "hidden_norm":
            norm = copied("attn_norm", shape)
        elif name == "attn_norm":
            norm = None
        else:
            norm = copied(name, shape)
        return norm if norm is not None else jnp.ones(shape) if name.endswith("norm") else noise

    keys = jax.random.split(key, len(leaves))
    names = [leaf_name(path).rsplit(".", 1)[-1] for path, _ in leaves]
    made = [make(name, info.shape, k) for name, (_, info), k in zip(names, leaves, keys, strict=True)]
    params = jax.tree.unflatten(tree, made)
    return {name: leaf for name, leaf in params.items() if name != "head"}


def fed_config(
    target: ModelConfig, layers: Sequence[int], states: Sequence[int], head_ids: Sequence[int]
) -> ModelConfig:
    """Geometry of an ordinary draft of the given layers of its target whose embeddings have states added to them.

    Raises:
      ConfigError: see `student_config` and `head_config`.
    """
    features = FeatureConfig(target.embed_dim, tuple(states), "added", own_head=False, fc_norm="each")
    plain = replace(student_config(target, layers, head_ids), tied=False)
    return replace(plain, features=features.resolve(target.num_layers))


def init_fed(target: Params, cfg: ModelConfig, layers: Sequence[int]) -> Params:
    """First weights, float32: those of an ordinary draft of these layers, which the states do not change yet."""
    features, D = cfg.features, cfg.embed_dim
    assert features is not None
    return init_student(target, layers) | {
        "fc": jnp.zeros((D, features.states_dim)), "fc_own": jnp.zeros((D, D)),
        "fc_norm": jnp.ones((features.num_states, features.target_dim)),
    }  # fmt: skip


def scale_states(cfg: ModelConfig, states: jax.Array, rows: Rows) -> jax.Array:
    """`fc_norm` [n, D] that gives each number of some texts' states [R, T, n * D] the size `STATE_SCALE`.

    A few numbers of a hidden state are far larger than the others, and nearly constant.
    """
    features = cfg.features
    assert features is not None
    parts = states[rows.segment >= 0].astype(jnp.float32).reshape(-1, features.num_states, features.target_dim)
    with using(KERNELS):
        normed = rms_norm(parts, jnp.ones(features.target_dim), cfg.norm_eps)
    return STATE_SCALE / jnp.sqrt(jnp.mean(normed**2, axis=0) + cfg.norm_eps)


def unroll(
    params: Params,
    cfg: ModelConfig,
    embed: jax.Array,  # [V, D]
    states: jax.Array,  # [R, T, n * D_target]
    rows: Rows,
    steps: int,
) -> Iterator[jax.Array]:  # [R, T, D] each
    """The head's input at each step: at step k, row i has read the token i + 1 + k and predicts the one after it."""
    token, position, segment = (jnp.asarray(x) for x in (rows.token, rows.position, rows.segment))
    T = token.shape[1]
    order = jnp.arange(T)
    true_rows = (segment[:, :, None] == segment[:, None, :]) & (order[:, None] >= order[None, :])
    own, whole = jnp.eye(T, dtype=bool), params | {"embed": embed}
    state = on_each_row(lambda states: fuse(params, cfg, states.astype(jnp.float32)), states)
    cache = on_each_row(lambda _: init_cache(cfg, cfg.num_kv_heads, 0, jnp.dtype("float32")), token)
    for step in range(steps):
        seen = jnp.concatenate([true_rows, *[jnp.broadcast_to(own, true_rows.shape)] * step], axis=2)
        slot_position = jnp.concatenate([position + earlier for earlier in range(step + 1)], axis=1)
        run = functools.partial(_run_step, whole, cfg, jnp.int32(step * T))
        words = (_shift(token, step + 1), state, position + step, _widen(cache, T), seen, slot_position)
        hidden, state, cache = on_each_row(run, *words)
        yield hidden


def _run_step(whole, cfg, offset, token, state, position, cache, seen, slot_position):
    return forward_draft(whole, cfg, token, state, position, cache, seen, slot_position, offset)


def on_each_row(function, *arrays):
    """A function of one shard for each row of a batch, which comes first in the `arrays`."""
    with using(Kernels("xla", BATCHES)):
        alone = jax.vmap(function)
        on_shard = jax.vmap(lambda _, *arrays: alone(*arrays), (0, *[None] * len(arrays)), axis_name=TENSOR_AXIS)
        return jax.tree.map(lambda x: x[0], on_shard(jnp.zeros(1), *arrays))


def _widen(cache: KVCache, slots: int) -> KVCache:
    """Room for more rows, after those that there are; [R, K, S, H] each."""

    def widen(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf, [(0, 0), (0, 0), (0, slots), (0, 0)])

    return replace(cache, key=tuple(map(widen, cache.key)), value=tuple(map(widen, cache.value)))


def _shift(x: jax.Array, by: int) -> jax.Array:
    """[R, T, ...] with what lies `by` places later; zeros at the end."""
    return jnp.pad(x[:, by:], [(0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)])


def step_logprobs(
    params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows, steps: int
) -> Iterator[jax.Array]:
    """Log-probabilities over the head's tokens at each step, [R, T, V_head]; `head` is for params without one."""
    weight = params.get("head", head)
    for hidden in unroll(params, cfg, embed, states, rows, steps):
        with using(KERNELS):
            logits = linear(hidden.reshape(-1, cfg.embed_dim), weight)
        yield jax.nn.log_softmax(logits, axis=-1).reshape(*hidden.shape[:2], -1)


def step_loss(logprob: jax.Array, rows: Rows, step: int) -> tuple[jax.Array, jax.Array]:
    """`teacher_loss` of a step."""
    ahead = step + 1
    segment = jnp.asarray(rows.segment)
    column, teacher = _shift(jnp.asarray(rows.teacher_column), ahead), _shift(jnp.asarray(rows.teacher_logprob), ahead)
    follows = (_shift(segment + 1, ahead) == segment + 1) & (segment >= 0)
    return teacher_loss(logprob, column, teacher, _shift(jnp.asarray(rows.weight), ahead) * follows)


def head_loss(
    params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows, steps: int
) -> jax.Array:
    """Mean over the steps, each a weighted mean over rows; a step counts `STEP_WEIGHT` times the one before it."""
    total, counted = jnp.float32(0), 0.0
    for step, logprob in enumerate(step_logprobs(params, cfg, embed, head, states, rows, steps)):
        loss, weight = step_loss(logprob, rows, step)
        total += STEP_WEIGHT**step * loss / jnp.maximum(weight, 1e-9)
        counted += STEP_WEIGHT**step
    return total / counted


@functools.partial(jax.jit, static_argnames=("cfg", "settings", "steps"), donate_argnums=(0, 1))
def train_step(
    params: Params, opt_state: Any, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows,
    *, cfg: ModelConfig, settings: TrainSettings, steps: int,
) -> tuple[Params, Any, jax.Array]:  # fmt: skip
    """One update; returns the loss before it."""

    def loss_of(params: Params) -> jax.Array:
        rounded, rounded_head = round_matrices(params, head, settings.dtype)
        return head_loss(rounded, cfg, embed, rounded_head, states, rows, steps)

    return update_params(loss_of, params, opt_state, settings, {"fc_own": OWN_RATE})


class HeadTrainer(Trainer):
    """A `Trainer` of a feature draft."""

    def __init__(
        self, params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, states: StateSource, steps: int,
        packer: Packer, conversations: Sequence[Conversation], settings: TrainSettings, folder: Path | None = None,
        save_every: int = 200,
    ):  # fmt: skip
        """`steps` of training-time test; the other arguments are those of `Trainer`."""
        super().__init__(params, cfg, embed, head, packer, conversations, settings, folder, save_every)
        self._states, self._unrolled = states, steps

    def update(self, state: dict[str, Any], rows: Rows) -> tuple[Params, Any, jax.Array]:
        """See `Trainer.update`."""
        return train_step(
            state["params"], state["optimizer"], *self._tables, self._states(rows), rows,
            cfg=self.cfg, settings=self.settings, steps=self._unrolled,
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("cfg", "depth"))
def _examine(
    params: Params, embed: jax.Array, head: jax.Array, states: jax.Array, rows: Rows, *, cfg: ModelConfig, depth: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    hits, column = [], jnp.asarray(rows.teacher_column)[:, :, 0]
    total, count = jnp.float32(0), jnp.float32(0)
    for step, logprob in enumerate(step_logprobs(params, cfg, embed, head, states, rows, depth)):
        hits.append(jnp.argmax(logprob, axis=-1) == _shift(column, step + 1))
        if step == 0:
            total, count = step_loss(logprob, rows, step)
    return jnp.stack(hits, axis=-1), total, count


def measure_head(
    params: Params, cfg: ModelConfig, embed: jax.Array, head: jax.Array, states: StateSource, packer: Packer,
    held_out: Sequence[Conversation], rows: int = 8, depth: int = 8,
) -> Quality:  # fmt: skip
    """Compare a head with its teacher on held-out conversations; the loss is that of the first step.

    Chains run on the head's own states. On greedy answers, whose tokens are the teacher's choices, a chain of `depth`
    tokens is right as far as it would be accepted.

    Raises:
      ValueError: no conversation has an answer.
    """
    matches: list[np.ndarray] = []
    runs: list[np.ndarray] = []
    losses = []
    for arrays, places in held_out_batches(packer, held_out, rows):
        hit, *loss = _examine(params, embed, head, states(arrays), arrays, cfg=cfg, depth=depth)
        losses.append([float(part) for part in loss])
        hits = np.asarray(hit)
        for r, end, c in places:
            # Row i predicts token i + 2: from the row before the answer's first token's own on.
            own = hits[r, end - len(c.token) + c.answer - 2 : end - 2]
            matches.append(own[:, 0])
            if c.temperature == 0:
                runs.append(np.cumprod(own[: max(0, len(own) - depth + 1)], axis=1).sum(axis=1))
    total, count = np.sum(losses, axis=0)
    return summarise(total / count if count else 0.0, matches, runs, depth)


def whole_leaves(params: Params, head: jax.Array) -> dict[str, np.ndarray]:
    """Every leaf of a head by its name, with its own rows or, for params without them, those of `head`; float32."""
    leaves, _ = jax.tree.flatten_with_path({"head": head} | params)
    return {leaf_name(path): np.asarray(leaf, np.float32) for path, leaf in leaves}
