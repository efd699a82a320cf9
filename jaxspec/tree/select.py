"""Selection of the verification batch: the best proposals, closed under parents."""

import jax
import jax.numpy as jnp

from jaxspec.tree.topology import Batch, Tree


def select_batch(tree: Tree, rows: int, least: jax.Array | float = -jnp.inf) -> Batch:
    """The root and the `rows - 1` proposals of highest score, ties to ancestors (SwiftSpec 3.3, SELECT).

    Scores never increase along a path and ties go to the earlier proposal, so every selected token's parent is
    selected too.

    Args:
      tree: at least its root is evaluated.
      rows: bs.
      least: proposals of a lower score are left out.
    """
    scores = tree.child_score.reshape(-1)
    wanted = min(rows - 1, scores.size)
    score, proposal = jax.lax.top_k(scores, wanted)
    # In order of evaluation, parents first; what is not there comes last.
    kept = (score > -jnp.inf) & (score >= least)
    proposal = jnp.sort(jnp.where(kept, proposal, scores.size))
    kept = proposal < scores.size
    proposal = jnp.where(kept, proposal, 0)

    # Batch row of each tree row, for the parents.
    batch_row = jnp.arange(1, wanted + 1, dtype=jnp.int32)
    own = jnp.where(kept, tree.child_row.reshape(-1)[proposal], -1)
    place = jnp.zeros(tree.rows, jnp.int32).at[jnp.where(own >= 0, own, tree.rows)].set(batch_row, mode="drop")
    parent = proposal // tree.branch

    def with_root(root: jax.Array, others: jax.Array, filler: jax.Array | int) -> jax.Array:
        column = jnp.concatenate([root[None], jnp.where(kept, others, filler)])
        return jnp.pad(column, (0, rows - 1 - wanted)).astype(jnp.int32)

    return Batch(
        token=with_root(tree.token[0], tree.child_token.reshape(-1)[proposal], 0),
        parent=jnp.where(
            jnp.arange(rows) <= kept.sum(), with_root(jnp.int32(0), place[parent], 0), jnp.arange(rows, dtype=jnp.int32)
        ),
        depth=with_root(jnp.int32(0), tree.depth[parent] + 1, 0),
        count=1 + kept.sum(dtype=jnp.int32),
    )
