"""Following verified tokens through a tree, and moving its root there (SwiftSpec 3.4)."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.tree.topology import Tree, init_tree


def follow(tree: Tree, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Walk from the root along verified tokens as far as nodes go.

    Args:
      tree: a tree whose root is the token before `tokens[0]`; an empty tree only with the root itself as `tokens`.
      tokens: int32 [P], tokens verified since the root: accepted ones, then the bonus token.
      count: int32 [], how many there are, at least 1.

    Returns:
      rows: int32 [P + 1], the old root and the nodes reached, in order of depth; behind `reached` arbitrary.
      reached: int32 [], nodes reached, the old root included; 0 if it was never evaluated.
    """

    def step(state, token_and_place):
        row, reached = state
        token, place = token_and_place
        hit = (tree.child_token[row] == token) & (tree.child_row[row] >= 0)
        # Only a path without gaps: once a token has no row, none behind it has.
        go_on = (reached == place + 1) & (place < count) & hit.any()
        row = jnp.where(go_on, tree.child_row[row][jnp.argmax(hit)], row)
        return (row, reached + go_on), row

    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    planted = (tree.size > 0).astype(jnp.int32)
    (_, reached), rows = jax.lax.scan(step, (jnp.int32(0), planted), (tokens, places))
    return jnp.concatenate([jnp.zeros(1, jnp.int32), rows]), reached


def pending_tokens(tokens: jax.Array, count: jax.Array, reached: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Verified tokens that the draft has no keys and values for: int32 [2], and how many, 0 to 2.

    Only evaluated nodes have children, so all but the last accepted token and the bonus token were evaluated.
    Arguments are those of `follow`, and its second result.
    """
    first = jnp.maximum(reached - 1, 0)
    last = tokens.shape[0] - 1
    return tokens[jnp.clip(first + jnp.arange(2), 0, last)], count - first


@struct.dataclass
class Rerooted:
    """A tree under its new root, and what the draft's cache must do.

    Attributes:
      tree: the new root's subtree; empty if the new root has no row.
      order: int32 [M + P + 1], window slots in their new order: first those that join the prefix, then the tree's.
      committed: int32 [], how many join the prefix.
      pending: int32 [2], verified tokens without a row.
      num_pending: int32 [], 0 if the new root is evaluated; else 1 or 2, the last one being the new root.
    """

    tree: Tree
    order: jax.Array
    committed: jax.Array
    pending: jax.Array
    num_pending: jax.Array


def reroot(tree: Tree, tokens: jax.Array, count: jax.Array) -> Rerooted:
    """Make the last of `tokens` the root; its subtree survives, the rest is dropped, nothing is computed anew.

    Arguments are those of `follow`.
    """
    M = tree.rows
    rows, reached = follow(tree, tokens, count)
    hit = reached == count + 1
    new_root = rows[jnp.clip(reached - 1, 0, tokens.shape[0])]
    used = jnp.arange(M) < tree.size
    keep = used & tree.ancestors[:, new_root] & hit  # the root among them

    kept = jnp.where(keep, jnp.cumsum(keep) - 1, M).astype(jnp.int32)  # new row of each old one
    old = jnp.zeros(M, jnp.int32).at[kept].set(jnp.arange(M, dtype=jnp.int32), mode="drop")  # and back
    size = keep.sum(dtype=jnp.int32)
    empty = init_tree(M, tree.branch)

    def move(name: str, transform=lambda x: x) -> jax.Array:
        blank = getattr(empty, name)
        live = (jnp.arange(M) < size).reshape(M, *[1] * (blank.ndim - 1))
        return jnp.where(live, transform(getattr(tree, name)[old]), blank)

    child_row = tree.child_row[old]
    survivors = Tree(
        token=move("token"),
        parent=move("parent", lambda p: jnp.where(jnp.arange(M) == 0, 0, jnp.clip(kept[p], 0, M - 1))),
        depth=move("depth", lambda d: d - tree.depth[new_root]),
        score=move("score", lambda s: s - tree.score[new_root]),
        ancestors=move("ancestors", lambda a: a[:, old] & (jnp.arange(M) < size)[None, :]),
        child_token=move("child_token"),
        child_score=move("child_score", lambda s: s - tree.score[new_root]),
        child_row=move("child_row", lambda _: jnp.where(child_row >= 0, kept[child_row], -1)),
        size=size,
    )
    # The new root stays in the window, as slot 0.
    committed = reached - hit.astype(jnp.int32)
    place = jnp.arange(M + tokens.shape[0] + 1)
    in_tree = old[jnp.clip(place - committed, 0, M - 1)]
    on_path = rows[jnp.clip(place, 0, tokens.shape[0])]
    order = jnp.where(place < committed, on_path, in_tree)
    return Rerooted(survivors, order, committed, *pending_tokens(tokens, count, reached))
