"""What crosses between the devices of draft and target: two packed int32 arrays, nothing else (SwiftSpec 3.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.methods.core.verify import Outcome
from jaxspec.tree.tree import Batch, ancestor_matrix


class DraftCounts(NamedTuple):
    """What the draft's side did for one batch, since the batch before; all int32.

    Attributes:
      passes: of the draft model.
      exposed: passes of these that the target had to wait for: catching up, and growth on demand.
      computed: tokens that went through the draft.
      caught_up: tokens of these that were verified before the draft had seen them, 0 to 2.
      kept: evaluated nodes that survived the re-rooting, the new root included.
      committed: evaluated nodes that joined the prefix.
      dropped: evaluated nodes that were lost.
      token_hit: 1 if the new root's token was in the tree, evaluated or not.
      evaluated_hit: 1 if it was evaluated, so that nothing had to be computed before the batch was chosen.
      nodes: evaluated nodes of the tree that the batch was chosen from.
    """

    passes: jax.Array | int
    exposed: jax.Array | int
    computed: jax.Array | int
    caught_up: jax.Array | int
    kept: jax.Array | int
    committed: jax.Array | int
    dropped: jax.Array | int
    token_hit: jax.Array | int
    evaluated_hit: jax.Array | int
    nodes: jax.Array | int


def pack_verified(outcome: Outcome) -> jax.Array:  # int32 [1 + P]
    """Target to draft: how many tokens were verified, then the tokens."""
    return jnp.concatenate([outcome.count[None], outcome.tokens]).astype(jnp.int32)


def unpack_verified(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [P] and their number int32 []."""
    return packed[1:], packed[0]


def pack_batch(batch: Batch) -> jax.Array:  # int32 [1 + 2 bs]
    """Draft to target: how many rows count, the tokens, their parents."""
    return jnp.concatenate([batch.count[None], batch.token, batch.parent]).astype(jnp.int32)


def unpack_batch(packed: jax.Array) -> Batch:
    """The batch; depths follow from parents."""
    rows = (packed.shape[0] - 1) // 2
    token, parent = packed[1 : 1 + rows], packed[1 + rows :]
    # An unused row is its own parent, as the root is: depth 0 for both.
    depth = ancestor_matrix(parent, rows - 1).sum(axis=1, dtype=jnp.int32) - 1
    return Batch(token, parent, depth, packed[0])
