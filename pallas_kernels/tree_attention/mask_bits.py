"""What rows see of the window, as GPU kernels take it: apart for older slots and for the new rows, and as bits."""

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32  # slots of a word


def split_mask(mask: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What T rows see of the slots that were written before, and of each other: bool [T, W], [T, T].

    Args:
      mask: what they see of the window, bool [T, W].
      offset: slots of the window before those of the rows, int32 [].
    """
    T, window = mask.shape
    # Wide enough that a slice which runs over the end is not moved back.
    wide = jnp.pad(mask, [(0, 0), (0, T)])
    new = lax.dynamic_slice(wide, (jnp.int32(0), jnp.asarray(offset, jnp.int32)), (T, T))
    return mask & (jnp.arange(window, dtype=jnp.int32) < offset), new


def pack_bits(mask: jax.Array, block: int = WORD) -> jax.Array:  # bool [T, W] -> int32 [T, W / 32]
    """Bit b of word w stands for column `32 * w + b`; W is rounded up to a multiple of `block`."""
    rows, width = mask.shape
    mask = jnp.pad(mask, [(0, 0), (0, -width % block)]).reshape(rows, -1, WORD)
    bits = mask.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    return lax.bitcast_convert_type(bits.sum(-1, dtype=jnp.uint32), jnp.int32)
