"""Tree: evaluated draft nodes and their proposals, in fixed arrays; how it grows; and the batch selected from it.

Letters: M rows (evaluated nodes), k proposals per row, bs rows of a verification batch, P longest path + 1.

A row is a *node*: its draft pass ran, and its keys and values lie in window slot = row. Proposals lie beside the row
that made them, so a *leaf* (a proposal without a row) owns no cache slot, and nothing needs pruning or moving while the
tree grows. Every token of the tree but the root is a proposal; `child_row` says which of them became rows.

Rows are in order of evaluation: parents precede children, and so do their proposals when numbered row * k + place.
Breaking ties by that number therefore prefers ancestors, which keeps selections closed under parents.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.pytree import pytree
from pallas_kernels import registry


@pytree
class Tree:
    """A draft tree below the root, the last verified token; rows from `size` on are unused."""

    token: Array  # int32 [M]
    parent: Array  # int32 [M], row of the parent; 0 for the root
    depth: Array  # int32 [M], 0 for the root
    score: Array  # float32 [M], sum of log-probabilities from the root; never increases along a path
    ancestors: Array  # bool [M, M], row i sees row j: its ancestors and itself
    child_token: Array  # int32 [M, k]
    child_score: Array  # float32 [M, k], score of the proposal; -inf where there is none
    child_row: Array  # int32 [M, k], the proposal's own row, or -1 for a leaf
    size: Array  # int32 [], rows in use; 0 only before the first root is evaluated

    @property
    def rows(self) -> int:
        """M: capacity."""
        return self.token.shape[0]

    @property
    def branch(self) -> int:
        """k: proposals per row."""
        return self.child_token.shape[1]


@pytree
class Batch:
    """Verification batch: row 0 is the root, the others are tree tokens closed under parents."""

    token: Array  # int32 [bs]
    # int32 [bs], row of the parent, which precedes the row; 0 for the root. Unused rows are their own parents.
    parent: Array
    depth: Array  # int32 [bs], 0 for the root
    count: Array  # int32 [], rows in use, at least 1

    @property
    def rows(self) -> int:
        """bs: capacity."""
        return self.token.shape[0]


@pytree
class Candidates:
    """Tokens of a tree below its root, N of them, parents before children."""

    token: Array  # int32 [N]
    parent: Array  # int32 [N], index of the parent; -1 for children of the root
    depth: Array  # int32 [N], at least 1
    score: Array  # float32 [N], never above the parent's; -inf where there is no token


def init_tree(rows: int, branch: int) -> Tree:
    """An empty tree."""
    per_row = jnp.zeros(rows, jnp.int32)
    per_child = jnp.zeros((rows, branch), jnp.int32)
    return Tree(
        token=per_row,
        parent=per_row,
        depth=per_row,
        score=jnp.full(rows, -jnp.inf),
        ancestors=jnp.zeros((rows, rows), bool),
        child_token=per_child,
        child_score=jnp.full((rows, branch), -jnp.inf),
        child_row=per_child - 1,
        size=jnp.int32(0),
    )


def ancestor_matrix(parent: Array, depth: int) -> Array:  # int32 [T] -> bool [T, T]
    """Which rows are ancestors of which, themselves included: the window mask of a verification batch.

    `parent` holds the row of each row's parent; a root is its own. `depth` is the largest depth that occurs. Pointer
    doubling takes log2(depth) gathers of rows, whatever the shape of the tree.
    """
    rows = jnp.arange(parent.shape[0], dtype=jnp.int32)
    # After step i, `seen` holds the nearest 2**i ancestors of a row and `jump` is its 2**i-th.
    seen = (rows[:, None] == rows[None, :]) | (parent[:, None] == rows[None, :])
    jump, reach = parent, 1
    while reach < depth:
        jump_rows = seen[jump]
        seen, jump, reach = seen | jump_rows, jump[jump], 2 * reach
    return seen


def select_batch(tree: Tree, rows: int) -> Batch:
    """The root and the `rows - 1` proposals of highest score, ties to ancestors (SwiftSpec, section 3: SELECT)."""
    return pack_best(tree.token[0], proposals(tree), rows)


def proposals(tree: Tree) -> Candidates:
    """All proposals of a tree, M * k of them."""
    made = jnp.arange(tree.rows * tree.branch, dtype=jnp.int32)
    # Which proposal each row came from; -1 for the root.
    row = jnp.where(tree.child_row >= 0, tree.child_row, tree.rows).reshape(-1)
    origin = jnp.full(tree.rows, -1, jnp.int32).at[row].set(made, mode="drop")
    maker = made // tree.branch
    return Candidates(tree.child_token.reshape(-1), origin[maker], tree.depth[maker] + 1, tree.child_score.reshape(-1))


def root_alone(root: Array, rows: int) -> Batch:
    """A batch of `rows` rows without a draft."""
    own = jnp.arange(rows, dtype=jnp.int32)
    return Batch(jnp.where(own == 0, root, 0), own, jnp.zeros_like(own), jnp.int32(1))


def pack_best(root: Array, candidates: Candidates, rows: int) -> Batch:
    """The root token, int32 [], and the `rows - 1` candidates of highest score, the earlier one on a tie, as a batch.

    Scores never increase along a path and parents come first, so every selected token's parent is selected too.
    """
    total = candidates.score.shape[0]
    wanted = min(rows - 1, total)
    score, chosen = jax.lax.top_k(candidates.score, wanted)
    # Back in their own order, parents first; what is not there comes last.
    chosen = jnp.sort(jnp.where(score > -jnp.inf, chosen, total))
    kept = chosen < total
    place = jnp.zeros(total, jnp.int32).at[chosen].set(jnp.arange(1, wanted + 1, dtype=jnp.int32), mode="drop")
    chosen = jnp.where(kept, chosen, 0)
    above = candidates.parent[chosen]

    def below_root(first: Array | int, others: Array) -> Array:
        column = jnp.concatenate([jnp.asarray(first, jnp.int32)[None], jnp.where(kept, others, 0)])
        return jnp.pad(column, (0, rows - 1 - wanted))

    row = jnp.arange(rows, dtype=jnp.int32)
    count = 1 + kept.sum(dtype=jnp.int32)
    parent = below_root(0, jnp.where(above >= 0, place[jnp.maximum(above, 0)], 0))
    return Batch(
        token=below_root(root, candidates.token[chosen]),
        parent=jnp.where(row < count, parent, row),
        depth=below_root(0, candidates.depth[chosen]),
        count=count,
    )


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


def follow(tree: Tree, tokens: Array, count: Array) -> tuple[Array, Array]:
    """Walk from the root along verified tokens as far as nodes go.

    `tokens`, int32 [P], are the `count` tokens verified since the root: accepted ones, then the bonus token. `count` is
    at least 1. The tree's root is the token before `tokens[0]`; an empty tree needs the root itself as `tokens`.

    Returns:
      rows: int32 [P + 1], the old root and the nodes reached, in order of depth; after `reached` arbitrary.
      reached: int32 [], nodes reached, the old root included; 0 if it was never evaluated.
    """
    if not registry.current().takes_cpu_forms:
        return _follow_at_once(tree, tokens, count)

    def step(state, token_and_place):
        row, reached = state
        token, place = token_and_place
        hit = (tree.child_token[row] == token) & (tree.child_row[row] >= 0)
        # Only a path without gaps: once a token has no row, no later one has.
        go_on = (reached == place + 1) & (place < count) & hit.any()
        row = jnp.where(go_on, tree.child_row[row][jnp.argmax(hit)], row)
        return (row, reached + go_on), row

    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    planted = (tree.size > 0).astype(jnp.int32)
    (_, reached), rows = jax.lax.scan(step, (jnp.int32(0), planted), (tokens, places))
    return jnp.concatenate([jnp.zeros(1, jnp.int32), rows]), reached


def _follow_at_once(tree: Tree, tokens: Array, count: Array) -> tuple[Array, Array]:
    """`follow` without a turn for each token: a few launches on an accelerator instead of a few for each turn."""
    row = jnp.arange(tree.rows, dtype=jnp.int32)
    known = (tree.depth > 0) & (tree.depth <= count) & (tree.token == tokens[jnp.maximum(tree.depth - 1, 0)])
    # A node is reached if it and all above it carry the verified tokens. Siblings differ: one of each depth at most.
    reached = (row < tree.size) & ((known | (row == 0))[None, :] | ~tree.ancestors).all(axis=1)
    depth = jnp.arange(tokens.shape[0] + 1, dtype=jnp.int32)
    here = reached[None, :] & (tree.depth[None, :] == depth[:, None])
    return jnp.argmax(here, axis=1).astype(jnp.int32), reached.sum(dtype=jnp.int32)


def pending_tokens(tokens: Array, count: Array, reached: Array) -> tuple[Array, Array]:
    """Verified tokens that the draft has no keys and values for: int32 [2], and how many, 0 to 2.

    Only evaluated nodes have children, so all but the last accepted token and the bonus token were evaluated.
    Arguments are those of `follow`, and its second result.
    """
    first = jnp.maximum(reached - 1, 0)
    last = tokens.shape[0] - 1
    return tokens[jnp.clip(first + jnp.arange(2), 0, last)], count - first
