"""Best-first growth: evaluate the leaves of highest score, and store what they propose (SwiftSpec, SpecExec)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.pytree import pytree
from jaxspec.tree.tree import Tree


@pytree
class Picked:
    """Leaves to be evaluated next; those that are not valid are fillers."""

    token: Array  # int32 [w]
    parent: Array  # int32 [w], rows
    depth: Array  # int32 [w]
    score: Array  # float32 [w], -inf where not valid; valid ones come first, best first
    proposal: Array  # int32 [w], row * k + place of each

    @property
    def valid(self) -> Array:
        """Which of them are leaves, bool [w]."""
        return self.score > -jnp.inf


def leaf_scores(tree: Tree) -> Array:
    """Scores of the leaves, -inf for everything else, float32 [M * k]."""
    return jnp.where(tree.child_row < 0, tree.child_score, -jnp.inf).reshape(-1)


def pick_leaves(tree: Tree, width: int, min_score: Array | float = -jnp.inf, value: Array | None = None) -> Picked:
    """The `width` leaves of highest score, if it is at least `min_score`; the earlier proposal on a tie.

    `value`, float32 [M * k], ranks them in place of their scores, where given; those of value 0 are left.
    """
    scores = leaf_scores(tree)
    if value is None:
        score, proposal = jax.lax.top_k(scores, width)
        score = jnp.where(score >= min_score, score, -jnp.inf)
    else:
        rank, proposal = jax.lax.top_k(value, width)
        score = jnp.where(rank > 0, scores[proposal], -jnp.inf)
    parent = (proposal // tree.branch).astype(jnp.int32)
    return Picked(
        token=tree.child_token.reshape(-1)[proposal],
        parent=parent,
        depth=tree.depth[parent] + 1,
        score=score,
        proposal=proposal.astype(jnp.int32),
    )


def picked_mask(tree: Tree, picked: Picked) -> Array:
    """Window slots that each picked leaf sees once it is row `tree.size + i`, bool [w, M]: its ancestors and itself."""
    slot = jnp.arange(tree.rows, dtype=jnp.int32)
    own = tree.size + jnp.arange(picked.token.shape[0], dtype=jnp.int32)
    return tree.ancestors[picked.parent] | (own[:, None] == slot[None, :])


def add_rows(tree: Tree, picked: Picked, mask: Array, child_token: Array, child_logprob: Array) -> Tree:
    """Append evaluated leaves, from `pick_leaves`, and their proposals; `tree.size + w` must not exceed M.

    Fillers are written after the valid rows, where the next call overwrites them. `mask` is from `picked_mask`.
    `child_token`, int32 [w, k], are distinct within a row; `child_logprob`, float32 [w, k], are at most 0, and -inf
    where there is no proposal.
    """
    width = picked.token.shape[0]
    row = tree.size + jnp.arange(width, dtype=jnp.int32)

    def put(array: Array, rows: Array) -> Array:
        start = (tree.size, *[jnp.int32(0)] * (array.ndim - 1))
        return jax.lax.dynamic_update_slice(array, rows.astype(array.dtype), start)

    # A probability a little above 1 by rounding must not lift a child above its parent.
    child_score = picked.score[:, None] + jnp.minimum(child_logprob, 0.0)
    proposal = jnp.where(picked.valid, picked.proposal, tree.rows * tree.branch)
    return Tree(
        token=put(tree.token, picked.token),
        parent=put(tree.parent, picked.parent),
        depth=put(tree.depth, picked.depth),
        score=put(tree.score, picked.score),
        ancestors=put(tree.ancestors, mask),
        child_token=put(tree.child_token, child_token),
        child_score=put(tree.child_score, child_score),
        child_row=put(
            tree.child_row.reshape(-1).at[proposal].set(row, mode="drop").reshape(tree.child_row.shape),
            jnp.full((width, tree.branch), -1),
        ),
        size=tree.size + picked.valid.sum(dtype=jnp.int32),
    )


def plant(tree: Tree, token: Array, child_token: Array, child_logprob: Array) -> Tree:
    """Start over in the arrays of `tree` with an evaluated root, int32 [], and its proposals.

    `child_token`, int32 [k], are distinct; `child_logprob` is float32 [k].
    """
    score, child_score = jnp.full_like(tree.score, -jnp.inf), jnp.full_like(tree.child_score, -jnp.inf)
    child_row = jnp.full_like(tree.child_row, -1)
    empty = dataclasses.replace(tree, score=score, child_score=child_score, child_row=child_row, size=jnp.int32(0))
    zero = jnp.zeros(1, jnp.int32)
    nowhere = jnp.full(1, tree.rows * tree.branch, jnp.int32)
    root = Picked(token=token[None], parent=zero, depth=zero, score=jnp.zeros(1), proposal=nowhere)
    mask = jnp.arange(tree.rows)[None, :] == 0
    return add_rows(empty, root, mask, child_token[None], child_logprob[None])


def renew_root(tree: Tree, child_token: Array, child_logprob: Array) -> Tree:
    """Give the root other proposals, of `plant`'s shapes; the nodes below it stay.

    Children that are nodes stay among the k proposals, proposed anew or not. Such a child takes its new score; where it
    is not proposed, the lower of its old score and the lowest new one. Its descendants' scores move along. The best
    other new proposals fill what is left of the k; the others are lost.
    """
    old_token, old_score, row = tree.child_token[0], tree.child_score[0], tree.child_row[0]
    score = jnp.minimum(child_logprob, 0.0)
    evaluated = row >= 0
    same = (old_token[:, None] == child_token[None, :]) & (score > -jnp.inf)[None, :]
    renewed = jnp.where(same, score[None, :], -jnp.inf).max(axis=1)
    lowest = jnp.minimum(old_score, jnp.where(score > -jnp.inf, score, 0.0).min())
    renewed = jnp.where(same.any(axis=1), renewed, lowest)
    # The other new proposals, best first, go to the places without a node in order.
    others = jnp.where((same & evaluated[:, None]).any(axis=0), -jnp.inf, score)
    other_score, other = jax.lax.top_k(others, tree.branch)
    place = jnp.clip(jnp.cumsum(~evaluated) - 1, 0, tree.branch - 1)
    change = jnp.where(evaluated, renewed - jnp.where(evaluated, old_score, 0.0), 0.0)
    shift = jnp.zeros(tree.rows).at[jnp.where(evaluated, row, tree.rows)].set(change, mode="drop")
    # Each row lies below one child of the root, or is that child.
    shift = jnp.where(tree.ancestors, shift[None, :], 0.0).sum(axis=1)
    child_score = tree.child_score + shift[:, None]
    # A child's score is rounded as those of the rows below it are, so that none of them is above it.
    return dataclasses.replace(
        tree,
        score=tree.score + shift,
        child_token=tree.child_token.at[0].set(jnp.where(evaluated, old_token, child_token[other[place]])),
        child_score=child_score.at[0].set(jnp.where(evaluated, old_score + change, other_score[place])),
    )


def is_complete(tree: Tree, budget: int, min_score: Array | float = -jnp.inf) -> Array:
    """Whether no further growth can change the `budget` best proposals: the exact stop test of SpecExec.

    Children never score above their parents, so what the frontier may still bring scores at most its best leaf.
    Leaves below `min_score` are not grown and count as no frontier.
    """
    best = leaf_scores(tree).max()
    settled = (tree.child_score >= best).sum() >= budget
    return (best < min_score) | (best == -jnp.inf) | settled
