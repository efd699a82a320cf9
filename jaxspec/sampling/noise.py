"""Gumbel noise tied to seed, absolute position and token id.

The noise of a token at a position is a hash of the three, so it is the same for any vocabulary sharding, any number of
rows and any method; drawing from it twice is the same draw.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling.vocab import VocabShard

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def seed_key(seed: int) -> np.ndarray:
    """Key of a seed: its two 32-bit halves, uint32 [2], so that different seeds below 2**64 have different keys."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def role_key(key: jax.Array | np.ndarray, role: int) -> jax.Array:
    """A key of the same seed for another use than choosing tokens: one random number decides one thing.

    Args:
      key: uint32 [2], from `seed_key`.
      role: at least 1.
    """
    # The counter's high word is 0 for positions, so no role gets the key of a position.
    seed = jnp.asarray(key, jnp.uint32)
    return jnp.stack(threefry((seed[0], seed[1]), jnp.uint32(role), jnp.uint32(0)))


def uniform_at(key: jax.Array | np.ndarray, position: jax.Array, draw: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1).

    Args:
      key: uint32 [2], from `role_key`.
      position: int32 [], absolute position of the token that they decide.
      draw: int32 [N], which numbers of that position.

    Returns:
      float32 [N]
    """
    seed = jnp.asarray(key, jnp.uint32)
    at_position = threefry((seed[0], seed[1]), jnp.uint32(0), position.astype(jnp.uint32))
    bits = threefry(at_position, jnp.uint32(0), draw.astype(jnp.uint32))[0]
    # 24 bits are what a float32 below 1 holds: rounding up to 1 would reject what is certain.
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def gumbel_rows(
    key: jax.Array | np.ndarray, positions: jax.Array, vocab: VocabShard, draw: jax.Array | int = 0
) -> jax.Array:
    """Gumbel noise of every local column at each position.

    Args:
      key: uint32 [2], from `seed_key`.
      positions: int32 [T], absolute positions of the tokens to be chosen.
      vocab: the local columns.
      draw: int32 [] or [T], for several independent draws at one position.

    Returns:
      float32 [T, V_local], standard Gumbel, finite.
    """
    return gumbel_at(key, positions, vocab.ids()[None], draw)


def gumbel_at(
    key: jax.Array | np.ndarray, positions: jax.Array, ids: jax.Array, draw: jax.Array | int = 0
) -> jax.Array:
    """The same noise at chosen token ids.

    Args:
      key: uint32 [2]
      positions: int32 [T]
      ids: int32 [T or 1, C], global token ids.
      draw: as for `gumbel_rows`.

    Returns:
      float32 [T, C]
    """
    with jax.named_scope("sampling/noise"):
        zero = jnp.uint32(0)
        seed = jnp.asarray(key, jnp.uint32)
        at_position = threefry((seed[0], seed[1]), zero, positions.astype(jnp.uint32)[:, None])
        which = jnp.broadcast_to(jnp.asarray(draw, jnp.uint32), positions.shape)[:, None]
        return gumbel_from_bits(threefry(at_position, which, ids.astype(jnp.uint32))[0])


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Map uniform 32-bit words to standard Gumbel values by inversion.

    Large values come from small w = (bits + 1/2) / 2**32, which float32 represents to full relative precision: the
    upper tail, which decides draws, is resolved to 2**-32. w is kept below 1, which cuts the lower tail at -2.81.

    Args:
      bits: uint32, any shape.

    Returns:
      float32, between -2.82 and -log(2**-33) = 22.88
    """
    w = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-w))


def threefry(key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One block of threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    `threefry(key, 0, n)` is `jax.random.fold_in(key, n)`, bit for bit, under JAX's threefry generator. It is written
    out because neither JAX's settings nor its versions may change what a seed means. One fused expression is also twice
    as fast on CPU as a vmapped `fold_in`.

    Args:
      key: two uint32 words.
      high: uint32, first counter word.
      low: uint32, second counter word; all four broadcast.

    Returns:
      Two uint32 words.
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = high + words[0], low + words[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ (y << distance | y >> (32 - distance))
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
