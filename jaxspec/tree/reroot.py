"""Moving a tree's root along verified tokens (docs/algorithms.md, "Re-rooting")."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.pytree import pytree
from jaxspec.tree.tree import Tree, follow, init_tree, pending_tokens


@pytree
class Rerooted:
    """A tree under its new root, and what the draft's cache must do."""

    tree: Tree  # the new root's subtree; empty if the new root has no row
    # int32 [M + P + 1], window slots in their new order: first those that join the prefix, then the tree's.
    order: Array
    committed: Array  # int32 [], how many join the prefix
    pending: Array  # int32 [2], verified tokens without a row
    num_pending: Array  # int32 [], 0 if the new root is evaluated; else 1 or 2, the last one being the new root
    token_hit: Array  # bool [], whether the new root's token was in the tree, evaluated or not


def reroot(tree: Tree, tokens: Array, count: Array, *, limit: int | None = None, reuse: bool = True) -> Rerooted:
    """Make the last of `tokens` the root; its subtree survives, the rest is dropped, nothing is computed anew.

    `tree`, `tokens` and `count` are those of `follow`. At most `limit` rows survive, 1 or more: those of highest score.
    Proposals of the survivors are kept, so a row that is dropped here becomes a leaf again. `reuse=False` drops the
    tree: the new root is evaluated anew, even where it was a node.
    """
    M = tree.rows
    rows, reached = follow(tree, tokens, count)
    token_hit = _is_in_tree(tree, rows, reached, tokens, count)
    if not reuse:
        reached = jnp.minimum(reached, count)
    hit = reached == count + 1
    new_root = rows[jnp.clip(reached - 1, 0, tokens.shape[0])]
    used = jnp.arange(M) < tree.size
    keep = used & tree.ancestors[:, new_root] & hit  # the root among them
    if limit is not None and limit < M:
        # Scores never increase along a path and parents have lower rows: what is kept is closed under parents.
        _, best = jax.lax.top_k(jnp.where(keep, tree.score, -jnp.inf), limit)
        keep &= jnp.zeros(M, bool).at[best].set(True)

    kept = jnp.where(keep, jnp.cumsum(keep) - 1, M).astype(jnp.int32)  # new row of each old one
    old = jnp.zeros(M, jnp.int32).at[kept].set(jnp.arange(M, dtype=jnp.int32), mode="drop")  # and back
    size = keep.sum(dtype=jnp.int32)
    empty = init_tree(M, tree.branch)

    def move(name: str, transform=lambda x: x) -> Array:
        blank = getattr(empty, name)
        live = (jnp.arange(M) < size).reshape(M, *[1] * (blank.ndim - 1))
        return jnp.where(live, transform(getattr(tree, name)[old]), blank)

    child_row = tree.child_row[old]
    moved = kept[child_row]
    survivors = Tree(
        token=move("token"),
        parent=move("parent", lambda p: jnp.where(jnp.arange(M) == 0, 0, jnp.clip(kept[p], 0, M - 1))),
        depth=move("depth", lambda d: d - tree.depth[new_root]),
        score=move("score", lambda s: s - tree.score[new_root]),
        ancestors=move("ancestors", lambda a: a[:, old] & (jnp.arange(M) < size)[None, :]),
        child_token=move("child_token"),
        child_score=move("child_score", lambda s: s - tree.score[new_root]),
        child_row=move("child_row", lambda _: jnp.where((child_row >= 0) & (moved < M), moved, -1)),
        size=size,
    )
    # The new root stays in the window, as slot 0.
    committed = reached - hit.astype(jnp.int32)
    place = jnp.arange(M + tokens.shape[0] + 1)
    in_tree = old[jnp.clip(place - committed, 0, M - 1)]
    on_path = rows[jnp.clip(place, 0, tokens.shape[0])]
    order = jnp.where(place < committed, on_path, in_tree)
    return Rerooted(survivors, order, committed, *pending_tokens(tokens, count, reached), token_hit)


def _is_in_tree(tree: Tree, rows: Array, reached: Array, tokens: Array, count: Array) -> Array:
    """Whether the last verified token is a node, or a leaf of the node before it."""
    last = tokens[jnp.maximum(count - 1, 0)]
    above = rows[jnp.clip(count - 1, 0, tokens.shape[0])]
    leaf = ((tree.child_token[above] == last) & (tree.child_score[above] > -jnp.inf)).any()
    return (reached > count) | ((reached == count) & leaf)
