"""Linear layer: the door through which every matrix product of a model goes."""

import jax

from pallas_kernels.linear import reference, xla_cpu


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """Multiply rows by a weight stored `[out, in]`, accumulating in float32.

    Args:
      x: `[T, I]` activations; rounded to the weight's dtype before the product.
      weight: `[O, I]` float32 or bfloat16.

    Returns:
      `[T, O]` float32.

    Raises:
      ValueError: the inner dimensions differ.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear needs [T, I] and [O, I], got {x.shape} and {weight.shape}")
    implementation = xla_cpu if jax.default_backend() == "cpu" else reference
    return implementation.linear(x, weight)
