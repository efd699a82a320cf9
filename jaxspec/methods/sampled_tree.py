"""Drafting by sampling: trees of fixed shape whose children are drawn from q, for the rejection rules."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.block import fill_block, place_logits
from jaxspec.methods.core.draft_passes import (
    PathHistory,
    Root,
    feed_block,
    keep_states,
    run_draft,
    run_root,
    run_verified,
)
from jaxspec.methods.core.drafter import ModelDrafter
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.methods.core.verify import Draft, Rule
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import commit_path
from jaxspec.models.params import Params
from jaxspec.models.transformer import vocab_logits
from jaxspec.models.vocab import VocabShard
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Decide, RowLogits, Verified, draw_children, rejection_rule
from jaxspec.sampling.processors import History, process
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Batch


@dataclasses.dataclass(frozen=True)
class SampledShape:
    """Rows of a tree in which every node of level l has `expansion[l]` children; level by level, the root first.

    Children of a row are consecutive rows, in the order in which they are drawn.
    """

    expansion: tuple[int, ...]

    @functools.cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Rows per level, the root's included."""
        return tuple(math.prod(self.expansion[:level]) for level in range(len(self.expansion) + 1))

    @functools.cached_property
    def level_starts(self) -> tuple[int, ...]:
        """First row of each level."""
        return tuple(int(start) for start in np.cumsum((0, *self.level_sizes[:-1])))

    @property
    def rows(self) -> int:
        """bs: all rows."""
        return sum(self.level_sizes)

    @property
    def inner_rows(self) -> int:
        """Rows that have children; the draft runs these."""
        return self.rows - self.level_sizes[-1]

    @property
    def width(self) -> int:
        """Rows of a draft pass: the widest level of inner rows."""
        return max(self.level_sizes[:-1])

    @property
    def draws(self) -> int:
        """Most children of a row."""
        return max(self.expansion)

    def parents(self) -> np.ndarray:
        """Parent of each row, int32 [bs]; 0 for the root."""
        parent = [0]
        for level, children in enumerate(self.expansion):
            rows = range(self.level_starts[level], self.level_starts[level + 1])
            parent += [row for row in rows for _ in range(children)]
        return np.array(parent, np.int32)

    def depths(self) -> np.ndarray:
        """Depth of each row, int32 [bs]."""
        return np.repeat(np.arange(len(self.level_sizes), dtype=np.int32), self.level_sizes)

    def ancestors(self) -> np.ndarray:
        """Which rows are ancestors of which, themselves included, bool [bs, bs]."""
        matrix = np.eye(self.rows, dtype=bool)
        for row, parent in enumerate(self.parents()):
            matrix[row] |= matrix[parent]
        return matrix


@pytree
class SampledState:
    """The draft's sequence, and how many rows of the last batch lie in its cache's window (the first ones)."""

    sequence: SequenceState
    evaluated: Array


@pytree
class _Growth:
    """A tree half drawn: tokens, which rows exist, their cumulative log q, log q of the inner rows' children."""

    token: Array
    valid: Array
    score: Array
    draft_logprob: Array


class SampledDrafter(ModelDrafter):
    """Draws a tree level by level."""

    def __init__(
        self, placement: Placement, slots: int, shape: SampledShape, verified: Verified, *, replacement: bool,
        min_score: float,
    ):  # fmt: skip
        """Declare the programs; `replacement` says whether siblings are drawn independently.

        Rows whose cumulative log q is below `min_score` get no children. That depends on the row, not on what would be
        drawn next, as the rejection rules demand.
        """
        q = placement.array((shape.inner_rows + shape.width, placement.padded_vocab), jnp.float32, None, TENSOR_AXIS)
        super().__init__(placement, slots, shape.rows, q)
        state = SampledState(self._sequence.state, placement.array((), jnp.int32))

        def begin(sequence: SequenceState) -> SampledState:
            return SampledState(sequence, jnp.int32(0))

        def draft(params, state, verified, history, request):
            return draw_tree(
                params, placement, state, verified, history, request, shape,
                replacement=replacement, min_score=min_score,
            )  # fmt: skip

        self.declare(verified, state, draft)
        self.declare_begin(state, begin)


def draw_tree(
    params: Params, placement: Placement, state: SampledState, verified: Verified, history: History, request: Request,
    shape: SampledShape, *, replacement: bool, min_score: float,
) -> tuple[SampledState, Draft]:  # fmt: skip
    """Commit what the last batch shares with the verified path, catch up, and draw a new tree; for one shard."""
    cfg, vocab, width = placement.cfg, placement.vocab, shape.width
    levels, columns = len(shape.expansion), placement.padded_vocab // placement.plan.tensor
    starts, sizes, fans = (jnp.array(x, jnp.int32) for x in (shape.level_starts, shape.level_sizes, shape.expansion))
    parent, depth = jnp.array(shape.parents()), jnp.array(shape.depths())
    # Fillers of a pass that is wider than its level see themselves only.
    padded = np.eye(shape.rows + width, dtype=bool)
    padded[: shape.rows, : shape.rows] = shape.ancestors()
    window = shape.inner_rows + width
    above_rows = jnp.pad(parent, (0, width))
    ancestors = jnp.array(padded[:, :window])

    sequence, reached = state.sequence, jnp.int32(0)
    if cfg.features is None:
        known = (verified.path < state.evaluated) & (jnp.arange(verified.path.shape[0]) < verified.count)
        reached = jnp.cumprod(known.astype(jnp.int32)).sum()
        with jax.named_scope("draft/commit"):
            cache = commit_path(sequence.cache, verified.path, reached, shape.rows)
            sequence = dataclasses.replace(sequence, cache=cache)
    block, features = None, cfg.features
    if features is not None and features.block:
        token, masked = verified.tokens[verified.count - 1], None
        if features.kind == "block":
            sequence = feed_block(params, cfg, sequence, verified)
        else:
            masked, _, sequence = run_verified(params, cfg, sequence, verified, features.block - 1)
        block, cache = fill_block(params, cfg, vocab, token, sequence.cache, levels, masked)
        sequence = dataclasses.replace(sequence, cache=cache)
        root = Root(token, block.hidden[:1], None, sequence, sequence.seen)
    else:
        root = run_root(params, cfg, sequence, verified, reached)
    sequence, produced, cache = root.sequence, root.produced, root.sequence.cache
    states = None if root.states is None else jnp.zeros((window, root.states.shape[1])).at[0].set(root.states[0])

    def sample(growth: _Growth, level: Array, logits: Array, on_path: Array) -> _Growth:
        """Draw the children of a level from its rows' logits `[w, V_local]`."""
        rows = starts[level] + jnp.arange(logits.shape[0])
        real = jnp.arange(logits.shape[0]) < sizes[level]
        histories = PathHistory(history, growth.token, on_path).over(vocab)
        position = jnp.broadcast_to(produced + level, rows.shape)
        logprob = process(logits, request.processors, histories, vocab, position)
        token, valid = draw_children(
            logprob, request.key, position, shape.draws, replacement, request.processors, vocab
        )
        place = jnp.arange(shape.draws)
        child = starts[level + 1] + jnp.arange(logits.shape[0])[:, None] * fans[level] + place[None, :]
        child = jnp.where(real[:, None] & (place < fans[level])[None, :], child, shape.rows)
        own = jnp.minimum(rows, shape.rows - 1)
        grown = growth.valid[own] & (growth.score[own] >= min_score)
        score = growth.score[own][:, None] + jnp.stack([vocab.take(logprob, t) for t in token.T], axis=1)
        return _Growth(
            token=growth.token.at[child].set(token, mode="drop"),
            valid=growth.valid.at[child].set(valid & grown[:, None], mode="drop"),
            score=growth.score.at[child].set(score, mode="drop"),
            draft_logprob=jax.lax.dynamic_update_slice(
                growth.draft_logprob, vocab.widen(logprob, columns, -jnp.inf), (starts[level], 0)
            ),
        )

    def go_on(carry: tuple) -> Array:
        _, _, growth, level = carry
        here = (depth == level) & growth.valid & (growth.score >= min_score)
        return (level < levels) & here.any()

    def run_level(carry: tuple) -> tuple:
        cache, states, growth, level = carry
        token = jax.lax.dynamic_slice_in_dim(jnp.pad(growth.token, (0, width)), starts[level], width)
        mask = jax.lax.dynamic_slice_in_dim(ancestors, starts[level], width)
        slot_depth = jnp.minimum(jnp.pad(depth, (0, width), mode="edge"), level)[:window]
        above = None if states is None else states[jax.lax.dynamic_slice_in_dim(above_rows, starts[level], width)]
        hidden, own, cache = run_draft(
            params, cfg, token, above, jnp.broadcast_to(cache.length + level, (width,)), cache, mask,
            window_position=cache.length + slot_depth, offset=starts[level],
        )  # fmt: skip
        states = keep_states(states, own, starts[level])
        on_path = jnp.pad(mask, ((0, 0), (0, shape.rows)))[:, : shape.rows].at[:, 0].set(False)
        return cache, states, sample(growth, level, vocab_logits(params, cfg, hidden), on_path), level + 1

    empty = _Growth(
        token=jnp.zeros(shape.rows, jnp.int32).at[0].set(root.token),
        valid=jnp.arange(shape.rows) == 0,
        score=jnp.zeros(shape.rows),
        draft_logprob=jnp.full((window, columns), -jnp.inf),
    )
    if block is not None:
        growth, passes = empty, jnp.int32(1)
        for level, (start, size) in enumerate(zip(shape.level_starts[:-1], shape.level_sizes, strict=False)):
            rows = slice(start, start + size)
            on_path = jnp.array(padded[rows, : shape.rows]).at[:, 0].set(False)
            logits = place_logits(params, cfg, vocab, block, level, growth.token[rows])
            growth = sample(growth, jnp.int32(level), logits, on_path)
    else:
        first = vocab_logits(params, cfg, root.hidden)
        growth = sample(empty, jnp.int32(0), first, jnp.zeros((1, shape.rows), bool))
        with jax.named_scope("draft/levels"):
            start = (cache, states, growth, jnp.int32(1))
            cache, _, growth, passes = jax.lax.while_loop(go_on, run_level, start)

    rows = jnp.arange(shape.rows, dtype=jnp.int32)
    batch = Batch(
        token=growth.token,
        parent=jnp.where(growth.valid, parent, rows),
        depth=jnp.where(growth.valid, depth, 0),
        count=jnp.max(jnp.where(growth.valid, rows, 0)) + 1,
    )
    sequence = dataclasses.replace(sequence, cache=cache)
    return SampledState(sequence, starts[passes]), Draft(batch, passes, growth.draft_logprob)


def rejection(shape: SampledShape, *, replacement: bool) -> Rule:
    """The `Rule` of sampled trees: `rejection_rule`."""

    def rule(logits: RowLogits, drafted: Draft, request: Request, position: Array, vocab: VocabShard) -> Decide:
        return rejection_rule(
            logits, drafted.batch, drafted.extra, request, position, vocab, draws=shape.draws, replacement=replacement
        )

    return rule
