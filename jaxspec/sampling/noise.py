"""Gumbel noise tied to seed, absolute position and token id.

The noise of a token at a position is a hash of the three, so it is the same for any vocabulary sharding, any number of
rows and any method; drawing from it twice is the same draw.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.models.vocab import VocabShard

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def seed_key(seed: int) -> np.ndarray:
    """Key of a seed: its two 32-bit halves, uint32 [2], so that different seeds below 2**64 have different keys."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def role_key(key: Array | np.ndarray, role: int) -> Array:
    """A key of the same seed for another use than choosing tokens, so that one random number decides one thing."""
    # The counter's high word is 0 for positions: no role, 1 or more, gets the key of a position.
    seed = jnp.asarray(key, jnp.uint32)
    return jnp.stack(threefry((seed[0], seed[1]), jnp.uint32(role), jnp.uint32(0)))


def uniform_at(key: Array | np.ndarray, position: Array, draw: Array) -> Array:
    """Uniform numbers in [0, 1), float32 [N], that decide the token at an absolute position, int32 [].

    `key` is from `role_key`; `draw`, int32 [N], says which numbers of that position.
    """
    seed = jnp.asarray(key, jnp.uint32)
    at_position = threefry((seed[0], seed[1]), jnp.uint32(0), position.astype(jnp.uint32))
    bits = threefry(at_position, jnp.uint32(0), draw.astype(jnp.uint32))[0]
    # 24 bits are what a float32 below 1 holds: rounding up to 1 would reject what is certain.
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def gumbel_rows(key: Array | np.ndarray, positions: Array, vocab: VocabShard, draw: Array | int = 0) -> Array:
    """Standard Gumbel noise of every local column at absolute positions, int32 [T]: float32 [T, V_local], finite.

    `key` is from `seed_key`; `draw`, int32 [] or [T], makes several independent draws at one position.
    """
    return gumbel_at(key, positions, vocab.ids()[None], draw)


def gumbel_at(key: Array | np.ndarray, positions: Array, ids: Array, draw: Array | int = 0) -> Array:
    """The noise of `gumbel_rows` at chosen token ids, int32 [T or 1, C]: float32 [T, C]."""
    with jax.named_scope("sampling/noise"):
        zero = jnp.uint32(0)
        seed = jnp.asarray(key, jnp.uint32)
        at_position = threefry((seed[0], seed[1]), zero, positions.astype(jnp.uint32)[:, None])
        which = jnp.broadcast_to(jnp.asarray(draw, jnp.uint32), positions.shape)[:, None]
        return gumbel_from_bits(threefry(at_position, which, ids.astype(jnp.uint32))[0])


def gumbel_from_bits(bits: Array) -> Array:
    """Map uniform 32-bit words, uint32, to standard Gumbel values by inversion: float32 between -2.82 and 22.88.

    Large values come from small w = (bits + 1/2) / 2**32, which float32 represents to full relative precision. So the
    upper tail, which decides draws, is resolved to 2**-32. w is kept below 1, which cuts the lower tail at -2.81.
    """
    w = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-w))


def threefry(key: tuple[Array, Array], high: Array, low: Array) -> tuple[Array, Array]:
    """One block of threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    `threefry(key, 0, n)` is `jax.random.fold_in(key, n)`, bit for bit, under JAX's threefry generator. It is written
    out because neither JAX's settings nor its versions may change what a seed means. One fused expression is also twice
    as fast on CPU as a vmapped `fold_in`. All words are uint32 and broadcast.
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
