"""The window mask as GPU kernels take it: one part for older slots, one for the new rows, both packed into bits."""

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32  # slots in a word


def split_mask(mask: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split what T rows see into older window slots, bool [T, W], and the new rows themselves, bool [T, T].

    Args:
      mask: what the rows see of the window, bool [T, W].
      offset: window slots before those of the rows, int32 [].
    """
    T, window = mask.shape
    # Wider than the window: JAX would move a slice that reaches over the end back to fit.
    wide = jnp.pad(mask, [(0, 0), (0, T)])
    new = lax.dynamic_slice(wide, (jnp.int32(0), jnp.asarray(offset, jnp.int32)), (T, T))
    return mask & (jnp.arange(window, dtype=jnp.int32) < offset), new


def pack_bits(mask: jax.Array, block: int = WORD) -> jax.Array:  # bool [T, W] -> int32 [T, W / 32]
    """Pack a mask: bit b of word w is column `32 * w + b`. W is rounded up to a multiple of `block`."""
    rows, width = mask.shape
    mask = jnp.pad(mask, [(0, 0), (0, -width % block)]).reshape(rows, -1, WORD)
    bits = mask.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    return lax.bitcast_convert_type(bits.sum(-1, dtype=jnp.uint32), jnp.int32)
