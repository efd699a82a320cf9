"""Drafting by best-first search: one pass over the best leaves, and a fresh tree in every round."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.methods.core.drafter import ModelDrafter, catch_up, keep_states, run_draft, take_verified
from jaxspec.methods.core.proposals import DraftModel, PathHistory, Propose
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.methods.core.verify import Draft
from jaxspec.models.kv_cache import KVCache, commit_path
from jaxspec.models.transformer import vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import History
from jaxspec.tree.grow import add_rows, is_complete, pick_leaves, picked_mask, plant
from jaxspec.tree.reroot import follow, pending_tokens
from jaxspec.tree.select import select_batch
from jaxspec.tree.tree import Tree, init_tree


@struct.dataclass
class BestFirstState:
    """The draft's sequence and the tree of the last round, whose nodes lie in the cache's window."""

    sequence: SequenceState
    tree: Tree


class BestFirstDrafter(ModelDrafter):
    """Grows a fresh tree in every round; deterministic, so that `match` keeps the output equal to plain decoding."""

    def __init__(
        self, placement: Placement, slots: int, propose: Propose, verified: Verified, *, num_rows: int, width: int,
        branch: int, depth: int, min_score: float,
    ):  # fmt: skip
        """Declare the programs; `propose` turns logits into `branch` (k) children of a node.

        One draft pass evaluates `width` leaves, but none that scores below `min_score`, -inf for no bound. At most
        `depth` passes run, so no token lies deeper. The batch has `num_rows` (bs) rows, the root included.
        """
        super().__init__(placement, slots, num_rows)
        capacity = tree_rows(width, depth)
        tree = placement.replicated(jax.eval_shape(lambda: init_tree(capacity, branch)))
        state = BestFirstState(self._sequence.state, tree)

        def begin(sequence: SequenceState) -> BestFirstState:
            return BestFirstState(sequence, init_tree(capacity, branch))

        def draft(params, state, verified, history, request):
            model = DraftModel(params, placement, propose, request)
            state, passes = search(
                model, state, verified, history, num_rows=num_rows, width=width, depth=depth, min_score=min_score
            )
            return state, Draft(select_batch(state.tree, num_rows), passes)

        self.declare(verified, state, draft)
        self.declare_begin(state, begin)


def tree_rows(width: int, depth: int) -> int:
    """M: the root, and `width` nodes in each further pass."""
    return 1 + width * (depth - 1)


@struct.dataclass
class Grown:
    """A draft's cache, the tree in its window, and the states of its nodes."""

    cache: KVCache
    tree: Tree
    states: jax.Array | None  # float32 [M, D], own states of the rows of a feature draft; else None


def plant_root(
    model: DraftModel, sequence: SequenceState, tree: Tree, history: History, verified: Verified, reached: jax.Array
) -> tuple[Grown, SequenceState, jax.Array]:
    """Take in what was verified, of which the first `reached` rows of a plain draft's window are known; plant the root.

    Returns the tree of one node, the sequence, and the position of the root's children in the text.
    """
    cfg = model.placement.cfg
    with jax.named_scope("draft/root"):
        if cfg.features is None:
            pending, num_pending = pending_tokens(verified.tokens, verified.count, reached)
            token, logits, cache = catch_up(model.params, cfg, sequence.cache, pending, num_pending)
            sequence, states, produced = dataclasses.replace(sequence, cache=cache), None, cache.length + 1
        else:
            root = take_verified(model.params, cfg, sequence, verified)
            token, logits, sequence, produced = root.token, root.logits, root.sequence, root.produced
            states = jnp.zeros((tree.rows, cfg.embed_dim)).at[0].set(root.states[0])
    nowhere = jnp.zeros((1, tree.rows), bool)
    paths = PathHistory(history, tree.token, nowhere)
    child_token, child_logprob = model.propose(logits, paths, model.request, produced[None])
    return Grown(sequence.cache, plant(tree, token, child_token[0], child_logprob[0]), states), sequence, produced


def expand(
    model: DraftModel, grown: Grown, history: History, produced: jax.Array, *, width: int, min_score: float = -math.inf
) -> Grown:
    """Evaluate the `width` best leaves that score at least `min_score`; `tree.size + width` must not exceed M.

    The tree's root is evaluated. The cache's prefix holds the verified text without the root, its window the tree;
    `history` holds the root, too. `produced` is the position of the root's children in the text, int32 [].
    """
    cache, tree = grown.cache, grown.tree
    picked = pick_leaves(tree, width, min_score)
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
    states = keep_states(grown.states, own, tree.size)
    return Grown(cache, add_rows(tree, picked, mask, child_token, child_logprob), states)


def search(
    model: DraftModel, state: BestFirstState, verified: Verified, history: History, *, num_rows: int, width: int,
    depth: int, min_score: float,
) -> tuple[BestFirstState, jax.Array]:  # fmt: skip
    """Keep what the last tree knows of the verified path, plant the new root, grow until the batch is certain.

    A feature draft keeps nothing: its nodes stand on states of its own. Returns the state with the
    tree in the window of its cache, and the number of draft passes.
    """
    sequence, reached = state.sequence, jnp.int32(0)
    if model.placement.cfg.features is None:
        path, reached = follow(state.tree, verified.tokens, verified.count)
        # The bonus token is evaluated anew as root, in the rare case that the old tree had it.
        reached = jnp.minimum(reached, verified.count)
        with jax.named_scope("draft/commit"):
            sequence = dataclasses.replace(sequence, cache=commit_path(sequence.cache, path, reached))
    planted, sequence, produced = plant_root(model, sequence, state.tree, history, verified, reached)

    def go_on(carry: tuple) -> jax.Array:
        grown, passes = carry
        return (passes < depth) & ~is_complete(grown.tree, num_rows - 1, min_score)

    def grow(carry: tuple) -> tuple:
        grown, passes = carry
        return expand(model, grown, history, produced, width=width, min_score=min_score), passes + 1

    with jax.named_scope("draft/grow"):
        # A chain is complete after its last pass and never before, unless it stops at an improbable token.
        start = (planted, jnp.int32(1))
        chain = width == 1 and state.tree.branch == 1 and min_score == -math.inf and num_rows - 1 >= depth
        if depth > 1 and chain and not model.placement.plan.kernels.branches:
            grown, passes = jax.lax.fori_loop(1, depth, lambda _, carry: grow(carry), start)
        elif depth > 1:
            # Accelerators loop until data says so, too: a pass that is spared saves more than the wait costs.
            grown, passes = jax.lax.while_loop(go_on, grow, start)
        else:
            grown, passes = start
    return BestFirstState(dataclasses.replace(sequence, cache=grown.cache), grown.tree), passes
