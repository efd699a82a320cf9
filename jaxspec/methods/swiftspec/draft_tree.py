"""The draft's half of SwiftSpec: one tree that outlives the rounds (sections 3.3 and 3.4 of the paper).

Two programs act on it. `expand` needs nothing from the target, so it runs while the target verifies. `advance` takes in
what was verified: it moves the root, packs the surviving subtree after the prefix, catches up with at most two tokens,
and chooses the next batch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.methods.core.draft_passes import DraftModel, Grown, PathHistory, Propose, catch_up, expand, run_verified
from jaxspec.methods.core.drafter import ModelDrafter
from jaxspec.methods.core.round import DraftCounts
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.methods.swiftspec.messages import batch_shapes, pack_batch, unpack_verified
from jaxspec.models.feature_draft import forward_draft, fuse
from jaxspec.models.kv_cache import commit_rows, permute_window
from jaxspec.models.transformer import vocab_logits
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import update_history
from jaxspec.sampling.request import request_shapes
from jaxspec.tree.reroot import Rerooted, reroot
from jaxspec.tree.tree import Tree, init_tree, leaf_scores, pack_best, plant, proposals, renew_root

# Passes of the program that times one: several, so that its dispatch counts little.
PROBE_PASSES = 4


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the tree grows; the settings of `SwiftSpec` explain the terms."""

    num_rows: int  # bs, rows of a verification batch, the root included
    width: int  # w, leaves evaluated in one pass
    branch: int  # k, proposals per node
    depth: int  # d, passes while the target verifies one batch
    survivors: int  # most nodes that are kept when the root moves
    room: int  # passes that the tree has room for between two advances, at least `depth`
    reuse: bool  # whether anything is kept
    leaves: bool  # whether a batch may hold proposals that were not evaluated
    refill: int = 0  # passes of growth that a batch waits for after a root that the draft had not evaluated
    most_refill: int = 0  # passes that the tree has room for there, at least `refill`

    @property
    def rows(self) -> int:
        """M: what survives, what grows until the next advance, and the passes within it."""
        most = max(self.survivors, 1 + self.most_refill * self.width, self.num_rows + self.width)
        return most + self.room * self.width


@pytree
class DraftTreeState:
    """State of the draft's side."""

    # The draft's cache, whose window holds the tree, the history of the verified text, and the root.
    sequence: SequenceState
    tree: Tree  # evaluated nodes are rows of the cache's window
    passes: Array  # int32 [], since the last advance
    computed: Array  # int32 [], tokens that these ran
    # float32 [M, D], own states of the nodes of a feature draft. The root's row has true states of
    # the target; those below it stand on the draft's own.
    states: Array | None = None

    @property
    def produced(self) -> Array:
        """Position of the root's children in the text, int32 []."""
        return self.sequence.cache.length + 1 if self.states is None else self.sequence.seen


class SwiftSpecDrafter(ModelDrafter):
    """Compiled functions of the draft's side, for one placement and capacity."""

    def __init__(self, placement: Placement, slots: int, propose: Propose, growth: Growth, *, path: int):
        """Declare the programs of a sequence; nothing is compiled yet.

        `slots` is the capacity of the draft's cache, at least M and P (`path`) more than the longest text. The programs
        of a round follow in `declare_rounds`. `probe` makes `PROBE_PASSES` passes, to time one.
        """
        super().__init__(placement, slots, growth.num_rows, keeps_text=True)
        self._propose, features = propose, placement.cfg.features
        scalar = placement.array((), jnp.int32)
        tree = placement.replicated(jax.eval_shape(lambda: init_tree(growth.rows, growth.branch)))
        width = None if features is None else features.own_dim(placement.cfg.embed_dim)
        states = None if width is None else placement.array((growth.rows, width), jnp.float32)
        state = DraftTreeState(self._sequence.state, tree, scalar, scalar, states)
        batch = batch_shapes(placement, growth.num_rows)
        counts = placement.array((len(DraftCounts._fields),), jnp.int32)
        verified: Any = placement.array((1 + path,), jnp.int32)
        if features is not None:
            verified = verified, placement.array((path, features.states_dim), jnp.float32)

        def begin(text):
            states = None if width is None else jnp.zeros((growth.rows, width))
            return DraftTreeState(text, init_tree(growth.rows, growth.branch), jnp.int32(0), jnp.int32(0), states)

        self._growth = growth
        self.state = state  # shapes
        self._shapes = state, batch, counts, verified
        self.declare_begin(state, begin)
        self.probe = self._declare_expand("probe", growth, PROBE_PASSES)

    def declare_rounds(self, depth: int, refill: int) -> None:
        """Declare the programs of a round: `depth` is at most `room`, `refill` at most `most_refill`."""
        state, batch, counts, verified = self._shapes
        placement, propose = self.placement, self._propose
        growth = dataclasses.replace(self._growth, depth=depth, refill=refill)

        def advance_by(passes, params, state, packed, request):
            model = DraftModel(params, placement, propose, request)
            advanced, moved, exposed = follow_verified(model, state, packed, growth)
            if passes:
                advanced, exposed = expand_tree(model, advanced, growth, passes), exposed + passes
            return choose_batch(model, advanced, exposed, moved, state.tree.size, growth)

        args, out = [placement.params(), state, verified, request_shapes(placement)], (state, batch, counts)

        def declare(name: str, passes: int) -> Program:
            return Program(name, functools.partial(advance_by, passes), placement.plan, args, out, donate=[1])

        self.advance = declare("advance", 0)
        self.advance_and_expand = declare("advance and expand", depth)
        self.expand = self._declare_expand("expand", growth, depth)
        self.expand_once = self._declare_expand("expand once", growth, 1)

    def _declare_expand(self, name: str, growth: Growth, passes: int) -> Program:
        placement, state = self.placement, self._shapes[0]

        def expand_by(params, state, request):
            model = DraftModel(params, placement, self._propose, request)
            grown = expand_tree(model, state, growth, passes)
            return grown, grown.tree.size

        args, out = [placement.params(), state, request_shapes(placement)], (state, placement.array((), jnp.int32))
        return Program(name, expand_by, placement.plan, args, out, donate=[1])


def expand_tree(model: DraftModel, state: DraftTreeState, growth: Growth, passes: int | Array) -> DraftTreeState:
    """EXPAND a number of times; there must be room for them. Written for one shard, as all that follows."""

    def once(_: Array, grown: Grown) -> Grown:
        return expand(model, grown, state.sequence.history, state.produced, width=growth.width)

    with jax.named_scope("draft/grow"):
        grown = jax.lax.fori_loop(0, passes, once, Grown(state.sequence.cache, state.tree, state.states))
    computed = state.computed + grown.tree.size - state.tree.size
    text = dataclasses.replace(state.sequence, cache=grown.cache)
    return DraftTreeState(text, grown.tree, state.passes + passes, computed, grown.states)


def follow_verified(
    model: DraftModel, state: DraftTreeState, message: Any, growth: Growth
) -> tuple[DraftTreeState, Rerooted, Array]:
    """REROOT, COMPACT and CATCH_UP; the last result is the number of passes that the target waits for, int32 []."""
    packed, sent = (message, None) if state.states is None else message
    tokens, count = unpack_verified(packed)
    moved = reroot(state.tree, tokens, count, limit=growth.survivors, reuse=growth.reuse)
    cache = state.sequence.cache
    if sent is None:
        with jax.named_scope("draft/compact"):
            order = moved.order[: growth.rows]
            live = moved.committed + moved.tree.size
            cache = commit_rows(permute_window(cache, order, growth.rows, live), moved.committed)
    # What a sequence begins with is a root that the history has already.
    fresh = (jnp.arange(tokens.shape[0]) < count) & (state.tree.size > 0)
    history = update_history(state.sequence.history, tokens, fresh, model.placement.text_vocab, generated=True)
    text = dataclasses.replace(state.sequence, cache=cache, history=history, root=tokens[count - 1])
    missed = moved.num_pending > 0
    grown = dataclasses.replace(state, sequence=text, tree=moved.tree)
    with jax.named_scope("draft/catch_up"):
        if sent is not None:
            grown = replace_path(model, grown, moved, tokens, count, sent)
        else:
            grown = advance_on_miss(model, grown, moved)
    exposed = jnp.int32(1) if sent is not None else missed.astype(jnp.int32)
    grown = dataclasses.replace(grown, passes=grown.passes + exposed)
    if growth.refill:
        wanted = missed * growth.refill
        grown, exposed = expand_tree(model, grown, growth, wanted), exposed + wanted
    return grown, moved, exposed


def replace_path(
    model: DraftModel, state: DraftTreeState, moved: Rerooted, tokens: Array, count: Array, sent: Array
) -> DraftTreeState:
    """Run what was verified with the states that were `sent`, float32 [P, n * D]; what survives goes after it.

    The path's rows are computed again, because they stood on the draft's own states, and so is the new root's, whose
    proposals and state its further children take. Nodes below the new root stay as they are (`moved.tree`). It is
    planted where nothing survives. One pass of fixed shape in every case.
    """
    cfg, text, M = model.placement.cfg, state.sequence, moved.tree.rows
    at = jnp.arange(M, dtype=jnp.int32)
    if cfg.features is not None and cfg.features.kind == "assistant":  # its nodes have no keys to move
        verified = Verified(tokens, count, tokens, jnp.zeros(tokens.shape), states=sent)
        hidden, own, text = run_verified(model.params, cfg, text, verified)
    else:
        hidden, own, text = _replace_rows(model, text, moved, tokens, count, sent)
    assert state.states is not None
    states = state.states[jnp.clip(moved.order[jnp.clip(moved.committed + at, 0, moved.order.shape[0] - 1)], 0, M - 1)]
    paths = PathHistory(text.history, moved.tree.token, jnp.zeros((1, M), bool))
    child_token, child_logprob = model.propose(
        vocab_logits(model.params, cfg, hidden), paths, model.request, text.seen[None]
    )
    planted = plant(moved.tree, text.root, child_token[0], child_logprob[0])
    renewed = renew_root(moved.tree, child_token[0], child_logprob[0])
    missed = moved.tree.size == 0
    return dataclasses.replace(
        state,
        sequence=text,
        tree=jax.tree.map(lambda a, b: jnp.where(missed, a, b), planted, renewed),
        computed=state.computed + count,
        states=states.at[0].set(own[0]),
    )


def _replace_rows(
    model: DraftModel, text: SequenceState, moved: Rerooted, tokens: Array, count: Array, sent: Array
) -> tuple[Array, Array, SequenceState]:
    """Run the path's rows, and put what survives after them; the results are those of `run_verified`."""
    cfg, rows, M = model.placement.cfg, tokens.shape[0], moved.tree.rows
    # Whether the old root, which has true states, lies in slot 0.
    known = jnp.maximum(text.seen - 1, 0) - text.cache.length
    place, slot = jnp.arange(rows, dtype=jnp.int32), jnp.arange(M + rows, dtype=jnp.int32)
    # Beyond the tree, so that nothing of it is lost.
    beyond = slot - M
    mask = ((slot == 0) & (known > 0))[None, :] | ((beyond >= 0)[None, :] & (beyond[None, :] <= place[:, None]))
    start = text.cache.length + known
    hidden, own, cache = forward_draft(
        model.params, cfg, tokens, fuse(model.params, cfg, sent, count), start + place, text.cache, mask,
        window_position=jnp.where(beyond >= 0, start + beyond, text.cache.length), offset=jnp.int32(M),
        active_rows=count,
    )  # fmt: skip
    path = known + count  # the old root, if it counts, and what was verified
    at = jnp.arange(M, dtype=jnp.int32)
    survivors = moved.order[jnp.clip(moved.committed + at - path + 1, 0, moved.order.shape[0] - 1)]
    order = jnp.where(at < known, 0, jnp.where(at < path, M + at - known, survivors))
    live = path + jnp.maximum(moved.tree.size - 1, 0)
    cache = commit_rows(permute_window(cache, order, M + rows, live), path - 1)
    hidden, own = (jnp.take(x, (count - 1)[None], axis=0, mode="clip") for x in (hidden, own))
    return hidden, own, dataclasses.replace(text, cache=cache, seen=text.seen + count)


def advance_on_miss(model: DraftModel, state: DraftTreeState, moved: Rerooted) -> DraftTreeState:
    """Run the tokens that the draft has not seen, if there are any, and plant the root."""

    def unplanted(carry: tuple) -> Array:
        return carry[1].size == 0

    def plant_root(carry: tuple) -> tuple:
        cache, tree, computed = carry
        root, hidden, cache = catch_up(model.params, model.placement.cfg, cache, moved.pending, moved.num_pending)
        logits = vocab_logits(model.params, model.placement.cfg, hidden)
        nowhere = jnp.zeros((1, tree.rows), bool)
        paths = PathHistory(state.sequence.history, tree.token, nowhere)
        child_token, child_logprob = model.propose(logits, paths, model.request, (cache.length + 1)[None])
        return cache, plant(tree, root, child_token[0], child_logprob[0]), computed + moved.num_pending

    # A loop of at most one turn: a conditional would copy the cache.
    carry = (state.sequence.cache, state.tree, state.computed)
    cache, tree, computed = jax.lax.while_loop(unplanted, plant_root, carry)
    return dataclasses.replace(
        state, sequence=dataclasses.replace(state.sequence, cache=cache), tree=tree, computed=computed
    )


def choose_batch(
    model: DraftModel, state: DraftTreeState, exposed: Array, moved: Rerooted, old_size: Array, growth: Growth
) -> tuple[DraftTreeState, Array, Array]:
    """SELECT, after growing on demand where a batch holds evaluated nodes only; the counts start anew.

    Returns the state, the packed batch, and `DraftCounts` as int32 [n].
    """
    grown, passes = Grown(state.sequence.cache, state.tree, state.states), jnp.int32(0)
    if not growth.leaves:

        def short(carry: tuple) -> Array:
            tree = carry[0].tree
            return (tree.size < growth.num_rows) & (leaf_scores(tree).max() > -jnp.inf)

        def refill(carry: tuple) -> tuple:
            more = expand(model, carry[0], state.sequence.history, state.produced, width=growth.width)
            return more, carry[1] + 1

        with jax.named_scope("draft/refill"):
            grown, passes = jax.lax.while_loop(short, refill, (grown, passes))
    cache, tree = grown.cache, grown.tree
    candidates = proposals(tree)
    if not growth.leaves:
        evaluated = tree.child_row.reshape(-1) >= 0
        candidates = dataclasses.replace(candidates, score=jnp.where(evaluated, candidates.score, -jnp.inf))
    batch = pack_best(tree.token[0], candidates, growth.num_rows)
    counts = DraftCounts(
        passes=state.passes + passes,
        exposed=exposed + passes,
        computed=state.computed + tree.size - state.tree.size,
        caught_up=moved.num_pending,
        kept=moved.tree.size,
        committed=moved.committed,
        dropped=old_size - moved.committed - moved.tree.size,
        token_hit=moved.token_hit,
        evaluated_hit=moved.num_pending == 0,
        nodes=tree.size,
    )
    zero = jnp.int32(0)
    text = dataclasses.replace(state.sequence, cache=cache)
    packed = jnp.stack([jnp.asarray(count, jnp.int32) for count in counts])
    return DraftTreeState(text, tree, zero, zero, grown.states), pack_batch(batch), packed
