"""The draft's half of a round: the contract of drafters, the drafter with a model, and the passes that drafts share.

Longer than 400 lines because passes of drafts with and without hidden states are one path.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.copies import NO_ANSWERS, Text
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.proposals import DraftModel, PathHistory
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.core.sequence import ModelSequence, PromptStates, SequenceState
from jaxspec.methods.core.verify import Draft, draft_shapes
from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.kv_cache import KVCache, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import read_scalar
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import History, history_shapes
from jaxspec.sampling.request import Request, request_shapes
from jaxspec.tree.grow import add_rows, pick_leaves, picked_mask, plant
from jaxspec.tree.reroot import pending_tokens
from jaxspec.tree.tree import Tree

# How a drafter makes a batch, for one shard: (parameters of the draft, state, what the last round verified, history,
# request, further operands) -> state, batch.
Propose = Callable[..., tuple[Any, Draft]]


class Pending(NamedTuple):
    """A prompt that a draft model may take after the first token."""

    tokens: np.ndarray  # int32 [n], all but the root
    states: PromptStates | None  # the target's, of those of them that it computed, for a feature draft
    known: int = 0  # tokens that the draft's cache holds already
    begins: int = 0  # tokens of the text before them, which are not there for the draft


class Drafter(abc.ABC):
    """The draft's half of a method."""

    shapes: Draft  # of what `draft` gives
    state: Any  # shapes of what `start` gives
    programs: Sequence[Program]  # everything that it may call
    idles: bool = False  # whether a round decodes several tokens where it proposed none; else the root is a batch
    slots: int = 0  # of the draft's cache; 0 without a model
    defers: bool = False  # whether its model takes a prompt with `fill`, which may come after the first token
    rests: bool = False  # whether rounds may come before that, see `rest`
    unfed_rows: int = 0  # W, hidden states of the latest tokens that are kept for a model that is not asked
    propose: Propose | None = None  # what `draft` runs; None where rounds have a dispatch each
    skips: bool = False  # whether `skip` works after every round: it takes in tokens that it did not propose
    drops: bool = False  # whether a round may verify another batch than `draft` proposed
    placement: Placement | None = None  # of its model
    operands: Any = ()  # what else `propose` takes
    learned: Any = None  # `AcceptanceStats.all` of an earlier process, which the first text begins with
    draft_program: Program | None = None  # that `draft` dispatches
    earlier: np.ndarray = NO_ANSWERS  # answers that copies may come from, each with -1 at its end

    @abc.abstractmethod
    def start(self, root: int, state: Any | None) -> Any:
        """State of an empty sequence; `state` is donated."""

    def resume(
        self, params: ModelParams, state: Any, tokens: np.ndarray, common: int, states: PromptStates | None = None,
        same_text: bool = False, taken: Verified | None = None,
    ) -> tuple[Any, int]:  # fmt: skip
        """See `Runner.resume`; the default, of a drafter without a model, begins anew.

        `states` are the target's, for a feature draft. `same_text`: no round has run on `state`, whose prompt goes on;
        what was learned keeps its weight. A drafter that `drops` takes in `taken` at once, as by `skip`. The second
        result counts the tokens that `fill` need not take, where the drafter `defers`; nothing is waited for.
        """
        return state if same_text else self.start(int(tokens[-1]), state), 0

    @abc.abstractmethod
    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        """Take in what the last round verified, and propose a batch for the next; dispatches only.

        `state` is donated. A draft made of the target's own layers runs in the target's cache: so is `target` then.
        """

    def fill(self, params: ModelParams, state: Any, pending: Pending) -> Any:
        """Run the rest of a prompt through the draft model, where `resume` leaves it to be done later."""
        return state

    def use_costs(self, costs: CostModel) -> None:
        """Weigh drafts with these figures from now on; the default weighs nothing."""
        return None

    def rest(self, resting: bool) -> None:
        """Whether the model has no part in the drafts that follow; the default always has a part."""
        return None

    def skip(self, params: ModelParams, state: Any, verified: Verified, flush: bool = False) -> Any:
        """Take in what the last round verified, and propose nothing: the next round decodes plainly.

        With `flush` a draft that is fed hidden states takes all that are kept for it.
        """
        raise NotImplementedError

    def drop(self, state: Any) -> Any:
        """Another batch is verified than `draft` proposed last: nothing is to be learned from what becomes of that."""
        return state

    def num_rows_kept(self, state: Any) -> int:
        """Rows of the draft's cache; waits for what runs on `state`."""
        raise NotImplementedError

    def num_unfed(self, state: Any) -> int:
        """Tokens whose hidden states are kept until the draft takes them; waits for what runs on `state`."""
        return 0

    def num_missing(self, state: Any) -> int:
        """Tokens of the text whose hidden states the draft did not take, and never will; waits likewise."""
        return 0


class ModelDrafter(Drafter):
    """A `Drafter` with a model of its own; the state of its cache is `sequence` in its state."""

    def __init__(self, placement: Placement, slots: int, num_rows: int, extra: Any = None, *, keeps_text: bool = False):
        """Declare the programs of a cache of `slots` slots; `extra` are shapes of `Draft.extra`."""
        self.placement: Placement = placement
        self._sequence = ModelSequence(placement, slots, "draft", keeps_text=keeps_text)
        self.slots = slots
        self.shapes = draft_shapes(placement, num_rows, extra)
        self.programs = tuple(self._sequence.programs)

    def declare(self, verified: Verified, state: Any, draft: Callable[..., Any]) -> None:
        """Declare how a batch is proposed: a function of parameters, state, `verified`, history and request."""
        placement, self.state = self.placement, state
        args = [placement.params(), state, verified, history_shapes(placement), request_shapes(placement)]
        self.draft_program = Program("draft", draft, placement.plan, args, (state, self.shapes), donate=[1])
        self.propose = lambda *arguments: draft(*arguments[:-1])
        self.programs = (*self.programs, self.draft_program)

    def declare_begin(self, state: Any, begin: Callable[[SequenceState], Any]) -> None:
        """Declare how the state of an empty sequence is made."""
        plan = self.placement.plan
        self._begin = Program("draft begin", begin, plan, [self._sequence.state], state, donate=[0])
        self.programs = (*self.programs, self._begin)

    def start(self, root: int, state: Any | None) -> Any:
        return self._begin(self._sequence.start(root, None if state is None else state.sequence))

    def resume(
        self, params: ModelParams, state: Any, tokens: np.ndarray, common: int, states: PromptStates | None = None,
        same_text: bool = False, taken: Verified | None = None,
    ) -> tuple[Any, int]:  # fmt: skip
        assert params.draft is not None
        return self._begin(self._sequence.resume(params.draft, state.sequence, tokens, common, states)[0]), 0

    def num_rows_kept(self, state: Any) -> int:
        return read_scalar(state.sequence.cache.length)

    def draft(
        self, params: ModelParams, target: SequenceState, state: Any, verified: Verified, request: Request
    ) -> tuple[SequenceState, Any, Draft]:
        assert self.draft_program is not None
        return target, *self.draft_program(params.draft, state, verified, target.history, request)


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


def run_root(params: Params, cfg: ModelConfig, sequence: SequenceState, verified: Verified, reached: Array) -> Root:
    """Take in what was verified; for one shard. A plain draft knows `reached` rows of its window, see `follow`.

    A feature draft runs everything that was verified with the target's true states. Rows that it ran with its own
    states are computed again: what they stand on were guesses.
    """
    with jax.named_scope("draft/root"):
        if cfg.features is None:
            pending, num_pending = pending_tokens(verified.tokens, verified.count, reached)
            token, hidden, cache = catch_up(params, cfg, sequence.cache, pending, num_pending)
            return Root(token, hidden, None, dataclasses.replace(sequence, cache=cache), cache.length + 1)
        hidden, own, sequence = run_verified(params, cfg, sequence, verified)
        return Root(verified.tokens[verified.count - 1], hidden, own, sequence, sequence.seen)


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
