"""The largest numbers of rows, and the logarithm of the sum of their exponentials."""

import jax
import jax.numpy as jnp

from pallas_kernels import native, registry

# More numbers of a row than this are found faster by XLA.
MAX_COUNT = 64


def row_top(values: jax.Array, count: int, *, with_total: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` (k) largest numbers of each row, by the native library.

    Args:
      values: float32 `[T, V]`. NaN counts as -inf, inf as the largest finite number, and -0 as 0.
      count: at least 1, at most `MAX_COUNT` and V.
      with_total: whether the sums are wanted.

    Returns:
      Numbers float32 `[T, k]`, the largest first, of equal ones the first; their columns, int32 `[T, k]`; and the
      logarithm of the sum of exp(x) over each row, float32 `[T]` (`[0]` without `with_total`), which is finite even for
      a row of -inf.

    Raises:
      ValueError: another shape or dtype, or a row does not have so many numbers.
    """
    if values.ndim != 2 or values.dtype != jnp.float32 or not 1 <= count <= min(values.shape[1], MAX_COUNT):
        raise ValueError(f"row_top needs float32 [T, V] and a count of 1 to {MAX_COUNT}, got {values.shape}, {count}")
    rows = values.shape[0]
    best = jax.ShapeDtypeStruct((rows, count), jnp.float32)
    column = jax.ShapeDtypeStruct((rows, count), jnp.int32)
    total = jax.ShapeDtypeStruct((rows if with_total else 0,), jnp.float32)
    return native.call("row_top", (best, column, total), values, threads=registry.current().threads)
