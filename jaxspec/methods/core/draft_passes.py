"""Passes of a draft model inside a program: it takes in what was verified, and proposes children of its nodes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.methods.core.copies import Text
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.kv_cache import KVCache, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.models.vocab import VocabShard
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.choose import choose, rank_draws
from jaxspec.sampling.processors import Histories, History, adjust, log_mass, shift, update_history
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Tree, add_rows, pending_tokens, pick_leaves, picked_mask, plant


@pytree
class PathHistory:
    """Histories of w rows, in the form from which they can be made."""

    text: History  # tokens of the verified text, the root included; over the whole vocabulary
    token: Array  # int32 [M], tokens of the tree
    on_path: Array  # bool [w, M], which of them lie below the root on each row's path, the row included

    def over(self, vocab: VocabShard) -> Histories:
        """Histories of the w rows over the columns of `vocab`."""

        def build() -> History:
            text = jax.tree.map(vocab.narrow, self.text)
            return jax.vmap(lambda mask: update_history(text, self.token, mask, vocab, generated=True))(self.on_path)

        return build


# (logits [w, V_local], path histories, request, position int32 [w] of the proposed tokens) -> tokens int32 [w, k],
# log-probabilities float32 [w, k], at most 0.
Propose = Callable[[Array, PathHistory, Request, Array], tuple[Array, Array]]

# What the prefixes of a tree are ranked by; see `tree_proposals`.
Ranking = Literal["noise", "probability", "sampling"]
RANKINGS = get_args(Ranking)


class DraftModel(NamedTuple):
    """A draft model inside a program: what its passes need in addition to a cache and rows."""

    params: Params
    placement: Placement
    propose: Propose
    request: Request


def same_draw(vocab: VocabShard, *, scored: bool) -> Propose:
    """The one child is what plain decoding would draw if the draft were the target: same processors, same noise.

    Under rule R4 a tree may depend on anything, the noise of its own positions included (docs/algorithms.md).
    """

    def propose(logits: Array, paths: PathHistory, request: Request, position: Array) -> tuple[Array, Array]:
        processors = request.processors
        if scored:
            variant = processors.variant and dataclasses.replace(processors.variant, logprob=True)
            processors = dataclasses.replace(processors, want_logprob=jnp.bool_(True), variant=variant)
        token, logprob = choose(logits, processors, paths.over(vocab), request.key, position, vocab)
        return token[:, None], logprob[:, None]

    return propose


def tree_proposals(ranking: Ranking, vocab: VocabShard, branch: int, *, loss: float = 0.0) -> Propose:
    """The children of a tree's nodes, `branch` (k) of them, and what they are ranked by.

    "noise" is `same_draws`, "probability" is `most_probable`, and "sampling" too, at the request's temperature. `loss`,
    at most 0, is added to every log-probability: the logarithm of a decay per level.
    """
    if ranking == "noise":
        return same_draws(vocab, branch, loss=loss)
    return most_probable(vocab, branch, loss=loss, sampling_temperature=ranking == "sampling")


def same_draws(vocab: VocabShard, branch: int, *, loss: float = 0.0) -> Propose:
    """Children are the `branch` likeliest tokens given the noise that the target chooses with, after all processors.

    A child's log-probability is its chance to be the target's choice, see `rank_draws`; `loss` is added to it. At
    temperature 0 these are the children of `most_probable`.
    """

    def propose(logits: Array, paths: PathHistory, request: Request, position: Array) -> tuple[Array, Array]:
        histories = paths.over(vocab)
        token, chance = rank_draws(logits, request.processors, histories, request.key, position, vocab, branch)
        return token, chance + loss

    return propose


def most_probable(vocab: VocabShard, branch: int, *, loss: float = 0.0, sampling_temperature: bool = False) -> Propose:
    """Children are the draft's `branch` most probable tokens, after the request's penalties and bias.

    `loss` is added to every log-probability, at most 0: the logarithm of a decay per level. Probabilities are at
    temperature 1, or at the request's with `sampling_temperature`.
    """

    def propose(logits: Array, paths: PathHistory, request: Request, position: Array) -> tuple[Array, Array]:
        processors = request.processors
        z = adjust(logits, processors, paths.over(vocab), vocab, position)
        if not sampling_temperature:
            processors = dataclasses.replace(processors, temperature=jnp.float32(1))
        scores = shift(z, processors, vocab)
        best, token = vocab.top_k(scores - log_mass(scores, vocab), branch)
        return token, best + loss

    return propose


def catch_up(
    params: Params, cfg: ModelConfig, cache: KVCache, pending: Array, num_pending: Array
) -> tuple[Array, Array, KVCache]:
    """Run the verified tokens that a draft has not seen, one or two, the last of which is the new root.

    The cache holds every verified token but `pending`, int32 [2], of which `num_pending` count. Returns the root, int32
    []; what the head sees of it, float32 [1, D]; and the cache, whose window slot 0 is the root.
    """
    position = cache.length + jnp.arange(2, dtype=jnp.int32)
    hidden, cache = forward(params, cfg, pending, position, cache, jnp.tril(jnp.ones((2, 2), bool)))
    hidden = jax.lax.dynamic_slice_in_dim(hidden, num_pending - 1, 1)
    return pending[num_pending - 1], hidden, commit_rows(cache, num_pending - 1)


def run_draft(
    params: Params, cfg: ModelConfig, token: Array, states: Array | None, position: Array, cache: KVCache,
    window_mask: Array, **window: Array | None,
) -> tuple[Array, Array | None, KVCache]:  # fmt: skip
    """A pass of a draft of either kind: what the head sees, the rows' own states, and the cache.

    `states`, float32 [T, D], are those of the rows' parents; None for a draft that is not fed them, as is the second
    result then. `window` are further arguments of `forward`.
    """
    if states is None:
        hidden, cache = forward(params, cfg, token, position, cache, window_mask, **window)
        return hidden, None, cache
    return forward_draft(params, cfg, token, states, position, cache, window_mask, **window)


def keep_states(states: Array | None, own: Array | None, first: Array) -> Array | None:
    """Own states [w, D] of a pass among those of all nodes, [M, D], from row `first` on."""
    return None if states is None or own is None else jax.lax.dynamic_update_slice(states, own, (first, jnp.int32(0)))


class Root(NamedTuple):
    """A draft's root, evaluated: what its tree begins with."""

    token: Array  # int32 []
    hidden: Array  # float32 [1, D], what the head sees of it
    states: Array | None  # float32 [1, D], its own, of a feature draft; else None
    sequence: SequenceState  # window slot 0 of its cache is the root
    produced: Array  # int32 [], position of its children in the text


def run_root(
    params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified, reached: Array,
    taken: tuple[Array, Array] | None = None,
) -> Root:  # fmt: skip
    """Take in what was verified, unless it was `taken` in: what the head sees of the root, and the root's own state.

    For one shard. A plain draft knows `reached` rows of its window, see `follow`.

    A feature draft runs everything that was verified with the target's true states. Rows that it ran with its own
    states are computed again: what they stand on were guesses.
    """
    with jax.named_scope("draft/root"):
        if cfg.features is None:
            pending, num_pending = pending_tokens(verified.tokens, verified.count, reached)
            token, hidden, cache = catch_up(params, cfg, sequence.cache, pending, num_pending)
            return Root(token, hidden, None, dataclasses.replace(sequence, cache=cache), cache.length + 1)
        if taken is None:
            hidden, own, sequence = run_verified(params, cfg, sequence, verified)
            taken = hidden, own
        return Root(verified.tokens[verified.count - 1], *taken, sequence, sequence.seen)


def run_verified(
    params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified, masked: int = 0
) -> tuple[Array, Array, SequenceState]:
    """Run everything that was verified through a feature draft, see `run_root`, and `masked` rows of P-EAGLE after it.

    Returns what the head sees of the root and of these rows, float32 [1 + masked, D], the root's own state, float32
    [1, D], and the sequence.
    """
    features, states = cfg.features, verified.states
    assert features is not None and states is not None
    last = verified.count - 1
    if features.kind == "assistant":
        # The cache takes the keys of every token before the root, and one row joins the root to the state before it.
        sequence = feed_block(params, cfg, sequence, verified)
        state = jnp.take(states, last[None], axis=0, mode="clip")[:, : features.target_dim]
        token, nothing = verified.tokens[last][None], jnp.zeros((1, 1), bool)
        hidden, own, cache = forward_draft(params, cfg, token, state, token, sequence.cache, nothing)
        return hidden, own, dataclasses.replace(sequence, cache=cache)
    # The root of the round before lies in the window, with true states.
    known = jnp.maximum(sequence.seen - 1, 0) - sequence.cache.length
    cache: KVCache = commit_rows(sequence.cache, known)
    rows, count = verified.tokens.shape[0] + masked, verified.count + masked
    position = cache.length + jnp.arange(rows, dtype=jnp.int32)
    token = verified.tokens
    if masked:
        is_known = jnp.arange(rows) < verified.count
        token = jnp.where(is_known, jnp.pad(token, (0, masked)), features.mask_token)
        states = jnp.where(is_known[:, None], jnp.pad(states, ((0, masked), (0, 0))), params["mask_hidden"])
    hidden, own, cache = forward_draft(
        params, cfg, token, fuse(params, cfg, states, count), position, cache,
        jnp.tril(jnp.ones((rows, rows), bool)), active_rows=count,
    )  # fmt: skip
    seen = sequence.seen + verified.count
    hidden = jnp.take(hidden, last + jnp.arange(1 + masked), axis=0, mode="clip")
    own = jnp.take(own, last[None], axis=0, mode="clip")
    return hidden, own, dataclasses.replace(sequence, cache=commit_rows(cache, last), seen=seen)


def feed_block(params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified) -> SequenceState:
    """Commit the states that came with what was verified to a draft: those of every token before the root."""
    assert verified.states is not None
    # A text that begins with its root has no state yet.
    count = verified.count - (sequence.seen == 0)
    states = fuse(params, cfg, verified.states, jnp.maximum(count, 1))
    cache = prefill_draft(params, cfg, verified.tokens, states, count, sequence.cache)
    return dataclasses.replace(sequence, cache=cache, seen=sequence.seen + verified.count)


@pytree
class Unfed:
    """Hidden states of the text's last tokens, which a draft that is fed them has not taken yet.

    A draft that is not asked for long never takes earlier ones: for it, these tokens are not there.
    """

    states: Array  # float32 [W, n * D], see `Verified.states`; W is a multiple of its P rows
    count: Array  # int32 [], tokens that they belong to

    def append(self, verified: Verified) -> "Unfed":
        """The same with what was verified; without room for it the older half goes."""
        assert verified.states is not None
        half = self.states.shape[0] // 2

        def drop(unfed: Unfed) -> Unfed:
            left = unfed.states[half:]
            return Unfed(unfed.states.at[: left.shape[0]].set(left), unfed.count - half)

        # A loop of at most one turn: a conditional would copy the states.
        kept = jax.lax.while_loop(lambda unfed: ~unfed.has_room(verified), drop, self)
        states = jax.lax.dynamic_update_slice(kept.states, verified.states, (kept.count, jnp.int32(0)))
        return Unfed(states, kept.count + verified.count)

    def has_room(self, verified: Verified) -> Array:
        """Whether all rows of a round fit, bool []."""
        return self.count + verified.tokens.shape[0] <= self.states.shape[0]


def feed(
    params: Params, cfg: ModelConfig, text: Text, sequence: SequenceState, unfed: Unfed, verified: Verified,
    wanted: Array,
) -> tuple[SequenceState, Unfed, tuple[Array, Array], Array]:  # fmt: skip
    """Run the tokens of `text` that a feature draft has not taken, the root last, where `wanted`, bool [].

    An assistant, whose keys have the target's positions, takes them when there is no room for more, too. They run in
    pieces of P rows. Returns the sequence; what is left; what the head sees of the root, float32 [1, D],
    and the root's own state, where they ran; and the number of passes.
    """
    rows, first = verified.tokens.shape[0], text.length - unfed.count
    assert cfg.features is not None
    runs = wanted if cfg.features.kind != "assistant" else wanted | ~unfed.has_room(verified)
    # A text's first token has no state and no row, unless it is the root.
    alone = (runs & (sequence.seen == 0) & (unfed.count > 1)).astype(jnp.int32)

    def run(sequence: SequenceState, done: Array) -> tuple[Array, Array, SequenceState]:
        left_out = jnp.where(done == 0, alone, 0)
        token = jax.lax.dynamic_slice_in_dim(text.token, first + done + left_out, rows)
        states = jax.lax.dynamic_slice_in_dim(unfed.states, done + left_out, rows)
        count = jnp.minimum(unfed.count - done, rows) - left_out
        taken = dataclasses.replace(verified, tokens=token, count=count, states=states)
        return run_verified(params, cfg, sequence, taken)

    def run_next(carry: tuple) -> tuple:
        _, sequence, passes = carry
        hidden, own, sequence = run(sequence, passes * rows)
        return (hidden, own), sequence, passes + 1

    hidden, own, _ = jax.eval_shape(run, sequence, unfed.count)
    blank = jnp.zeros(hidden.shape, hidden.dtype), jnp.zeros(own.shape, own.dtype)
    sequence = dataclasses.replace(sequence, seen=sequence.seen + alone)
    with jax.named_scope("draft/catch_up"):
        root, sequence, passes = jax.lax.while_loop(
            lambda carry: runs & (carry[2] * rows < unfed.count), run_next, (blank, sequence, jnp.int32(0))
        )
    return sequence, Unfed(unfed.states, jnp.where(runs, 0, unfed.count)), root, passes


def num_places(placement: Placement) -> int:
    """D: places of a round that a draft fills in one pass; 0 for a draft that takes a pass for each."""
    return 0 if placement.cfg.features is None else placement.cfg.features.places


def block_rows(placement: Placement, path: int) -> int:
    """Rows of the pass of such a draft, 0 for others; `path` (P) are the most that were verified before it."""
    features = placement.cfg.features
    if features is None or not features.block:
        return 0
    return features.block if features.kind == "block" else features.block + path


class Rows(NamedTuple):
    """Evaluated rows of a tree whose children are to be proposed."""

    token: Array  # int32 [M], tokens of the tree, the rows included
    depth: Array  # int32 [M]
    sees: Array  # bool [w, M], the rows' ancestors and they themselves
    child_depth: Array  # int32 [w]


# (rows, children int32 [w, k], log-probabilities float32 [w, k]) -> scores below each row, float32 [w, k] and at most
# 0, and kinds, int32 [w, k]
Correct = Callable[[Rows, Array, Array], tuple[Array, Array]]


@pytree
class Grown:
    """A draft's cache, the tree in its window, and the states of its nodes."""

    cache: KVCache
    tree: Tree
    states: Array | None  # float32 [M, D], own states of the rows of a feature draft; else None
    kind: Array | None = None  # int32 [M, k], see `Correct`; None where scores are not corrected


def plant_children(
    model: DraftModel, tree: Tree, token: Array, hidden: Array, history: History, produced: Array,
    correct: Correct | None = None,
) -> tuple[Tree, Array | None]:  # fmt: skip
    """A tree of the root `token`, int32 [], and its proposals, in the arrays of `tree`; also `Grown.kind`.

    `hidden`, float32 [1, D], is what the head sees of the root; `produced` is the position of its children.
    """
    logits = vocab_logits(model.params, model.placement.cfg, hidden)
    paths = PathHistory(history, tree.token, jnp.zeros((1, tree.rows), bool))
    child_token, child_logprob = model.propose(logits, paths, model.request, produced[None])
    kind = None
    if correct is not None:
        sees = jnp.arange(tree.rows)[None] == 0
        rows = Rows(tree.token, jnp.zeros_like(tree.depth), sees, jnp.ones(1, jnp.int32))
        child_logprob, first = correct(rows, child_token, child_logprob)
        kind = jnp.zeros_like(tree.child_token).at[0].set(first[0])
    return plant(tree, token, child_token[0], child_logprob[0]), kind


def expand(
    model: DraftModel, grown: Grown, history: History, produced: Array, *, width: int, min_score: float = -math.inf,
    value: Array | None = None, correct: Correct | None = None,
) -> Grown:  # fmt: skip
    """Evaluate the `width` best leaves that score at least `min_score`; `tree.size + width` must not exceed M.

    The tree's root is evaluated. The cache's prefix holds the verified text without the root, its window the tree;
    `history` holds the root, too. `produced` is the position of the root's children in the text, int32 []. `value`,
    float32 [M * k], ranks the leaves in place of their scores; those of value 0 are not evaluated.
    """
    cache, tree = grown.cache, grown.tree
    picked = pick_leaves(tree, width, min_score, value)
    mask = picked_mask(tree, picked)
    # The rows see themselves, and are not in the tree yet.
    token = jax.lax.dynamic_update_slice(tree.token, picked.token, (tree.size,))
    slot_depth = jax.lax.dynamic_update_slice(tree.depth, picked.depth, (tree.size,))
    above = None if grown.states is None else grown.states[picked.parent]
    hidden, own, cache = run_draft(
        model.params, model.placement.cfg, picked.token, above, cache.length + picked.depth, cache, mask,
        window_position=cache.length + slot_depth, offset=tree.size,
    )  # fmt: skip
    paths = PathHistory(history, token, mask.at[:, 0].set(False))
    logits = vocab_logits(model.params, model.placement.cfg, hidden)
    child_token, child_logprob = model.propose(logits, paths, model.request, produced + picked.depth)
    kind = grown.kind
    if correct is not None and kind is not None:
        child_logprob, new = correct(Rows(token, slot_depth, mask, picked.depth + 1), child_token, child_logprob)
        kind = jax.lax.dynamic_update_slice(kind, new, (tree.size, jnp.int32(0)))
    states = keep_states(grown.states, own, tree.size)
    return Grown(cache, add_rows(tree, picked, mask, child_token, child_logprob), states, kind)
