"""Messages between the devices of draft and target: two packed int32 arrays, nothing else (SwiftSpec 3.2)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Verified
from jaxspec.tree.tree import Batch, ancestor_matrix


def pack_verified(verified: Verified) -> Any:  # int32 [1 + P]
    """Target to draft: how many tokens were verified, then the tokens.

    For a feature draft a pair of that and of the states, float32 [P, n * D].
    """
    packed = jnp.concatenate([verified.count[None], verified.tokens]).astype(jnp.int32)
    return packed if verified.states is None else (packed, verified.states)


def unpack_verified(packed: Array) -> tuple[Array, Array]:
    """Tokens int32 [P] and their number int32 []."""
    return packed[1:], packed[0]


def pack_batch(batch: Batch) -> Array:  # int32 [1 + 2 bs]
    """Draft to target: how many rows count, the tokens, their parents."""
    return jnp.concatenate([batch.count[None], batch.token, batch.parent]).astype(jnp.int32)


def batch_shapes(placement: Placement, num_rows: int) -> Array:
    """Shapes of a packed batch on a model's devices."""
    return placement.array((1 + 2 * num_rows,), jnp.int32)


def read_batch(packed: np.ndarray) -> Batch:
    """`unpack_batch` on the host; rows come after their parents."""
    rows = (len(packed) - 1) // 2
    token, parent = packed[1 : 1 + rows], packed[1 + rows :]
    depth = np.zeros(rows, np.int32)
    for row in range(1, int(packed[0])):
        depth[row] = depth[parent[row]] + 1
    return Batch(token, parent, depth, packed[0])  # pyright: ignore[reportArgumentType]


def unpack_batch(packed: Array) -> Batch:
    """The batch; depths follow from parents."""
    rows = (packed.shape[0] - 1) // 2
    token, parent = packed[1 : 1 + rows], packed[1 + rows :]
    # An unused row is its own parent, as the root is: depth 0 for both.
    depth = ancestor_matrix(parent, rows - 1).sum(axis=1, dtype=jnp.int32) - 1
    return Batch(token, parent, depth, packed[0])
