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
import numpy as np
from flax import struct
from jax import Array

from jaxspec.methods.core.best_first import expand
from jaxspec.methods.core.proposals import DraftModel, PathHistory, Propose
from jaxspec.methods.core.round import DraftCounts
from jaxspec.methods.core.sequence import ModelSequence, SequenceState, catch_up
from jaxspec.methods.swiftspec.messages import batch_shapes, pack_batch, unpack_verified
from jaxspec.models.kv_cache import commit_rows, permute_window
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import update_history
from jaxspec.tree.grow import add_rows, leaf_scores, pick_leaves, picked_mask, plant
from jaxspec.tree.reroot import Rerooted, reroot
from jaxspec.tree.select import pack_best, proposals
from jaxspec.tree.tree import Tree, init_tree


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
    # One pass in every advance, whatever happened, in place of a branch on whether there is something to catch up with.
    # Growth on demand, without `leaves`, is a loop on device data all the same.
    branch_free: bool

    @property
    def rows(self) -> int:
        """M: what survives, what grows until the next advance, and one pass more within it."""
        advanced = max(self.survivors + max(2, self.width), self.num_rows + self.width)
        return advanced + self.room * self.width


@struct.dataclass
class DraftTreeState:
    """State of the draft's side."""

    # The draft's cache, whose window holds the tree, the history of the verified text, and the root.
    text: SequenceState
    tree: Tree  # evaluated nodes are rows of the cache's window
    passes: Array  # int32 [], since the last advance
    computed: Array  # int32 [], tokens that these ran


class TreeDrafter:
    """Compiled functions of the draft's side, for one placement and capacity."""

    def __init__(self, placement: Placement, slots: int, propose: Propose, growth: Growth, *, path: int):
        """Declare the programs; nothing is compiled yet.

        `slots` is the capacity of the draft's cache, at least M and P (`path`) more than the longest text.
        """
        self._sequence = ModelSequence(placement, slots, "draft")
        scalar = placement.array((), jnp.int32)
        tree = placement.replicated(jax.eval_shape(lambda: init_tree(growth.rows, growth.branch)))
        state = DraftTreeState(self._sequence.state, tree, scalar, scalar)
        batch = batch_shapes(placement, growth.num_rows)
        counts = placement.array((len(DraftCounts._fields),), jnp.int32)
        verified = placement.array((1 + path,), jnp.int32)

        def begin(text):
            return DraftTreeState(text, init_tree(growth.rows, growth.branch), jnp.int32(0), jnp.int32(0))

        def expand_by(passes, params, state, request):
            grown = expand_tree(DraftModel(params, placement, propose, request), state, growth, passes)
            return grown, grown.tree.size

        def advance_by(passes, params, state, packed, request):
            model = DraftModel(params, placement, propose, request)
            advanced, moved, exposed = follow_verified(model, state, packed, growth)
            if passes:
                advanced, exposed = expand_tree(model, advanced, growth, passes), exposed + passes
            return choose_batch(model, advanced, exposed, moved, state.tree.size, growth)

        plan, params, request = placement.plan, placement.params(), placement.request()
        self._begin = Program("draft begin", begin, plan, [self._sequence.state], state, donate=[0])

        def declare(name: str, function: Any, passes: int, args: list, out: tuple) -> Program:
            return Program(name, functools.partial(function, passes), plan, args, out, donate=[1])

        args, out = [params, state, request], (state, scalar)
        self.expand = declare("expand", expand_by, growth.depth, args, out)
        self.expand_once = declare("expand once", expand_by, 1, args, out)
        args, out = [params, state, verified, request], (state, batch, counts)
        self.advance = declare("advance", advance_by, 0, args, out)
        self.advance_and_expand = declare("advance and expand", advance_by, growth.depth, args, out)
        self.programs = (*self._sequence.programs, self._begin)

    def start(self, root: int, state: DraftTreeState | None) -> DraftTreeState:
        """State of an empty sequence; `state` is donated."""
        return self._begin(self._sequence.start(root, None if state is None else state.text))

    def prefill(self, params: Params, state: DraftTreeState, tokens: np.ndarray) -> DraftTreeState:
        """Commit int32 `tokens` `[n]`."""
        return dataclasses.replace(state, text=self._sequence.prefill(params, state.text, tokens))


def expand_tree(model: DraftModel, state: DraftTreeState, growth: Growth, passes: int) -> DraftTreeState:
    """EXPAND a number of times; there must be room for them. Written for one shard, as all that follows."""

    def once(_: Array, carry: tuple) -> tuple:
        cache, tree = carry
        return expand(model, cache, tree, state.text.history, width=growth.width)

    with jax.named_scope("draft/grow"):
        cache, tree = jax.lax.fori_loop(0, passes, once, (state.text.cache, state.tree))
    computed = state.computed + tree.size - state.tree.size
    return DraftTreeState(dataclasses.replace(state.text, cache=cache), tree, state.passes + passes, computed)


def follow_verified(
    model: DraftModel, state: DraftTreeState, packed: Array, growth: Growth
) -> tuple[DraftTreeState, Rerooted, Array]:
    """REROOT, COMPACT and CATCH_UP; the last result is the number of passes that the target waits for, int32 []."""
    tokens, count = unpack_verified(packed)
    moved = reroot(state.tree, tokens, count, limit=growth.survivors, reuse=growth.reuse)
    with jax.named_scope("draft/compact"):
        order = moved.order[: growth.rows]
        live = moved.committed + moved.tree.size
        cache = commit_rows(permute_window(state.text.cache, order, live), moved.committed)
    # What a sequence begins with is a root that the history has already.
    fresh = (jnp.arange(tokens.shape[0]) < count) & (state.tree.size > 0)
    history = update_history(state.text.history, tokens, fresh, model.placement.text_vocab, generated=True)
    text = dataclasses.replace(state.text, cache=cache, history=history, root=tokens[count - 1])
    missed = moved.num_pending > 0
    grown = dataclasses.replace(state, text=text, tree=moved.tree)
    with jax.named_scope("draft/catch_up"):
        advance = advance_branch_free if growth.branch_free else advance_on_miss
        grown = advance(model, grown, moved, growth)
    exposed = jnp.int32(1) if growth.branch_free else missed.astype(jnp.int32)
    return dataclasses.replace(grown, passes=grown.passes + exposed), moved, exposed


def advance_on_miss(model: DraftModel, state: DraftTreeState, moved: Rerooted, growth: Growth) -> DraftTreeState:
    """Run the tokens that the draft has not seen, if there are any, and plant the root."""

    def unplanted(carry: tuple) -> Array:
        return carry[1].size == 0

    def plant_root(carry: tuple) -> tuple:
        cache, tree, computed = carry
        root, logits, cache = catch_up(model.params, model.placement.cfg, cache, moved.pending, moved.num_pending)
        nowhere = jnp.zeros((1, tree.rows), bool)
        paths = PathHistory(state.text.history, tree.token, nowhere)
        child_token, child_logprob = model.propose(logits, paths, model.request, (cache.length + 1)[None])
        return cache, plant(tree, root, child_token[0], child_logprob[0]), computed + moved.num_pending

    # A loop of at most one turn: a conditional would copy the cache.
    carry = (state.text.cache, state.tree, state.computed)
    cache, tree, computed = jax.lax.while_loop(unplanted, plant_root, carry)
    return dataclasses.replace(state, text=dataclasses.replace(state.text, cache=cache), tree=tree, computed=computed)


def advance_branch_free(model: DraftModel, state: DraftTreeState, moved: Rerooted, growth: Growth) -> DraftTreeState:
    """One pass of fixed shape: over the unseen tokens if there are any, else over the best leaves.

    On a GPU a branch on device data makes the host wait; here both cases share their rows.
    """
    cache, tree = state.text.cache, state.tree
    missed = moved.num_pending > 0
    rows = max(2, growth.width)
    place = jnp.arange(rows, dtype=jnp.int32)
    picked = pick_leaves(tree, rows)
    leaf_mask = picked_mask(tree, picked)
    slots = jnp.arange(tree.rows, dtype=jnp.int32)
    pending = jnp.where(place < moved.num_pending, moved.pending[jnp.minimum(place, 1)], moved.pending[0])
    token = jnp.where(missed, pending, picked.token)
    depth = jnp.where(missed, place, picked.depth)
    # An empty tree has size 0: the unseen tokens lie where its rows would.
    mask = jnp.where(missed, slots[None, :] <= place[:, None], leaf_mask)
    leaf_depth = jax.lax.dynamic_update_slice(tree.depth, picked.depth, (tree.size,))
    slot_depth = jnp.where(missed, slots, leaf_depth)
    hidden, cache = forward(
        model.params, model.placement.cfg, token, cache.length + depth, cache, mask,
        window_position=cache.length + slot_depth, offset=tree.size,
    )  # fmt: skip
    tree_token = jax.lax.dynamic_update_slice(tree.token, picked.token, (tree.size,))
    on_path = jnp.where(missed, False, leaf_mask.at[:, 0].set(False))
    paths = PathHistory(state.text.history, tree_token, on_path)
    produced = cache.length + 1 + depth
    child_token, child_logprob = model.propose(vocab_logits(model.params, hidden), paths, model.request, produced)
    last = jnp.maximum(moved.num_pending - 1, 0)
    planted = plant(tree, state.text.root, child_token[last], child_logprob[last])
    grown = add_rows(tree, picked, leaf_mask, child_token, child_logprob)
    tree = jax.tree.map(lambda a, b: jnp.where(missed, a, b), planted, grown)
    cache = commit_rows(cache, jnp.where(missed, last, 0))
    computed = jnp.where(missed, moved.num_pending, grown.size - state.tree.size)
    text = dataclasses.replace(state.text, cache=cache)
    return dataclasses.replace(state, text=text, tree=tree, computed=state.computed + computed)


def choose_batch(
    model: DraftModel, state: DraftTreeState, exposed: Array, moved: Rerooted, old_size: Array, growth: Growth
) -> tuple[DraftTreeState, Array, Array]:
    """SELECT, after growing on demand where a batch holds evaluated nodes only; the counts start anew.

    Returns the state, the packed batch, and `DraftCounts` as int32 [n].
    """
    cache, tree, passes = state.text.cache, state.tree, jnp.int32(0)
    if not growth.leaves:

        def short(carry: tuple) -> Array:
            return (carry[1].size < growth.num_rows) & (leaf_scores(carry[1]).max() > -jnp.inf)

        def refill(carry: tuple) -> tuple:
            grown = expand(model, carry[0], carry[1], state.text.history, width=growth.width)
            return *grown, carry[2] + 1

        with jax.named_scope("draft/refill"):
            cache, tree, passes = jax.lax.while_loop(short, refill, (cache, tree, passes))
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
    text = dataclasses.replace(state.text, cache=cache)
    packed = jnp.stack([jnp.asarray(count, jnp.int32) for count in counts])
    return DraftTreeState(text, tree, zero, zero), pack_batch(batch), packed
