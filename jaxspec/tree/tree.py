"""Tree: evaluated draft nodes and their proposals, in fixed arrays; and the batch selected from it.

Letters: M rows (evaluated nodes), k proposals per row, bs rows of a verification batch, P longest path + 1.

A row is a *node*: its draft pass ran, and its keys and values lie in window slot = row. Proposals lie beside the row
that made them, so a *leaf* (a proposal without a row) owns no cache slot, and nothing needs pruning or moving while the
tree grows. Every token of the tree but the root is a proposal; `child_row` says which of them became rows.

Rows are in order of evaluation: parents precede children, and so do their proposals when numbered row * k + place.
Breaking ties by that number therefore prefers ancestors, which keeps selections closed under parents.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.pytree import pytree


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
