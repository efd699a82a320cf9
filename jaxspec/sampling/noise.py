"""Gumbel noise tied to seed, absolute position and token id (ALGORITHMS 2.4).

The noise of a token at a position is a hash of the three, so it is the same for any vocabulary sharding, any number of
rows and any method; drawing from it twice is the same draw.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling.vocab import VocabShard

# Named, so that neither `jax_default_prng_impl` nor `jax_threefry_partitionable` changes what a seed means.
_PRNG = "threefry2x32"

# The largest value `gumbel_from_bits` can return is -log(2**-33) = 22.87.
LARGEST_GUMBEL = 22.9


def seed_key(seed: int) -> np.ndarray:
    """Key of a seed: its two 32-bit halves, uint32 [2], so that different seeds below 2**64 have different keys."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def gumbel_rows(key: jax.Array | np.ndarray, positions: jax.Array, vocab: VocabShard) -> jax.Array:
    """Gumbel noise of every local column at each position.

    Args:
      key: uint32 [2], from `seed_key`.
      positions: int32 [T], absolute positions of the tokens to be chosen.
      vocab: the local columns.

    Returns:
      float32 [T, V_local], standard Gumbel, finite.
    """
    ids = vocab.ids()
    return gumbel_at(key, positions, jnp.broadcast_to(ids, (positions.shape[0], ids.shape[0])))


def gumbel_at(key: jax.Array | np.ndarray, positions: jax.Array, ids: jax.Array) -> jax.Array:
    """The same noise at chosen token ids.

    Args:
      key: uint32 [2]
      positions: int32 [T]
      ids: int32 [T, C], global token ids.

    Returns:
      float32 [T, C]
    """
    with jax.named_scope("sampling/noise"):
        seed = jax.random.wrap_key_data(jnp.asarray(key), impl=_PRNG)
        return gumbel_from_bits(
            jax.vmap(lambda position, row: _hash(jax.random.fold_in(seed, position), row))(positions, ids)
        )


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Map uniform 32-bit words to standard Gumbel values by inversion.

    Large values come from small w = (bits + 1/2) / 2**32, which float32 represents to full relative precision: the
    upper tail, which decides draws, is resolved to 2**-32. w is kept below 1, which cuts the lower tail at -2.81.

    Args:
      bits: uint32, any shape.

    Returns:
      float32 in [-2.82, LARGEST_GUMBEL]
    """
    w = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-w))


def _hash(key: jax.Array, ids: jax.Array) -> jax.Array:
    """First word of the threefry block at counter `ids`: uint32, the shape of `ids`."""
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i))[0])(ids)
