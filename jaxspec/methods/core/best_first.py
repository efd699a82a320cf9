"""Drafting by best-first search: one pass over the best leaves, and a fresh tree in every round."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.methods.core.proposals import DraftModel, PathHistory, Propose
from jaxspec.methods.core.runner import ModelDrafter
from jaxspec.methods.core.sequence import SequenceState, catch_up
from jaxspec.methods.core.verify import Draft
from jaxspec.models.kv_cache import KVCache, commit_path
from jaxspec.models.transformer import forward, vocab_logits
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
        branch: int, depth: int, least: float,
    ):  # fmt: skip
        """Declare the programs; `propose` turns logits into `branch` (k) children of a node.

        One draft pass evaluates `width` leaves, but none that scores below `least`, -inf for no bound. At most `depth`
        passes run, so no token lies deeper. The batch has `num_rows` (bs) rows, the root included.
        """
        super().__init__(placement, slots, num_rows)
        capacity = tree_rows(width, depth)
        tree = placement.replicated(jax.eval_shape(lambda: init_tree(capacity, branch)))
        state = BestFirstState(self._sequence.state, tree)

        def begin(sequence: SequenceState) -> BestFirstState:
            return BestFirstState(sequence, init_tree(capacity, branch))

        def draft(params, state, verified, history, request):
            model = DraftModel(params, placement, propose, request)
            cache, tree, passes = search(
                model, state, verified, history, num_rows=num_rows, width=width, depth=depth, least=least
            )
            return BestFirstState(SequenceState(cache), tree), Draft(select_batch(tree, num_rows), passes)

        self.declare(verified, state, draft)
        self.declare_begin(state, begin)


def tree_rows(width: int, depth: int) -> int:
    """M: the root, and `width` nodes in each further pass."""
    return 1 + width * (depth - 1)


def expand(
    model: DraftModel, cache: KVCache, tree: Tree, history: History, *, width: int, least: float = -math.inf
) -> tuple[KVCache, Tree]:
    """Evaluate the `width` best leaves that score at least `least`; `tree.size + width` must not exceed M.

    The tree's root is evaluated. The cache's prefix holds the verified text without the root, its window the tree;
    `history` holds the root, too.
    """
    picked = pick_leaves(tree, width, least)
    mask = picked_mask(tree, picked)
    # The rows see themselves, and are not in the tree yet.
    token = jax.lax.dynamic_update_slice(tree.token, picked.token, (tree.size,))
    slot_depth = jax.lax.dynamic_update_slice(tree.depth, picked.depth, (tree.size,))
    hidden, cache = forward(
        model.params, model.placement.cfg, picked.token, cache.length + picked.depth, cache, mask,
        window_position=cache.length + slot_depth, offset=tree.size,
    )  # fmt: skip
    paths = PathHistory(history, token, mask.at[:, 0].set(False))
    produced = cache.length + 1 + picked.depth
    child_token, child_logprob = model.propose(vocab_logits(model.params, hidden), paths, model.request, produced)
    return cache, add_rows(tree, picked, mask, child_token, child_logprob)


def search(
    model: DraftModel, state: BestFirstState, verified: Verified, history: History, *, num_rows: int, width: int,
    depth: int, least: float,
) -> tuple[KVCache, Tree, jax.Array]:  # fmt: skip
    """Keep what the last tree knows of the verified path, plant the new root, grow until the batch is certain.

    Returns the draft's cache with the tree in its window, the tree, and the number of draft passes.
    """
    path, reached = follow(state.tree, verified.tokens, verified.count)
    # The bonus token is evaluated anew as root, in the rare case that the old tree had it.
    reached = jnp.minimum(reached, verified.count)
    with jax.named_scope("draft/commit"):
        cache = commit_path(state.sequence.cache, path, reached)
    pending, num_pending = pending_tokens(verified.tokens, verified.count, reached)
    with jax.named_scope("draft/root"):
        root, logits, cache = catch_up(model.params, model.placement.cfg, cache, pending, num_pending)
    produced = cache.length + 1  # position of the root's children
    nowhere = jnp.zeros((1, state.tree.rows), bool)
    paths = PathHistory(history, state.tree.token, nowhere)
    child_token, child_logprob = model.propose(logits, paths, model.request, produced[None])
    tree = plant(state.tree, root, child_token[0], child_logprob[0])

    def go_on(carry: tuple) -> jax.Array:
        _, tree, passes = carry
        return (passes < depth) & ~is_complete(tree, num_rows - 1, least)

    def grow(carry: tuple) -> tuple:
        cache, tree, passes = carry
        cache, tree = expand(model, cache, tree, history, width=width, least=least)
        return cache, tree, passes + 1

    with jax.named_scope("draft/grow"):
        if depth > 1:
            cache, tree, passes = jax.lax.while_loop(go_on, grow, (cache, tree, jnp.int32(1)))
        else:
            passes = jnp.int32(1)
    return cache, tree, passes
