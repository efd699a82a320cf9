"""Selection of the verification batch: the best tokens of a tree, closed under parents."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.pytree import pytree
from jaxspec.tree.tree import Batch, Tree


@pytree
class Candidates:
    """Tokens of a tree below its root, N of them, parents before children."""

    token: Array  # int32 [N]
    parent: Array  # int32 [N], index of the parent; -1 for children of the root
    depth: Array  # int32 [N], at least 1
    score: Array  # float32 [N], never above the parent's; -inf where there is no token


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
