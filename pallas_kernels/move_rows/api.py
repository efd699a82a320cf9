"""Rows of many caches moved at once: how a path through the tree window becomes part of the prefix."""

import jax
import jax.numpy as jnp

from pallas_kernels import registry


def move_rows(
    caches: tuple[jax.Array, ...],  # [K, S, H] each
    source: jax.Array,  # int32 [P]
    start: jax.Array,  # int32 []
    window: int,
) -> tuple[jax.Array, ...]:
    """Each cache with the rows of slots `source` at the slots from `start` on; all are read before any is written.

    Args:
      caches: keys and values of all layers; K and the dtype may differ.
      source: slots, which lie within the caches. A slot may appear twice.
      start: first slot that is written; `start + P` must lie within the caches.
      window: number of slots from `start` on that hold the rows. A slot of `source` after them gives any row there.

    Raises:
      ValueError: the caches have different numbers of slots or fewer than P, or `source` is no int32 vector.
    """
    if source.ndim != 1 or source.dtype != jnp.int32:
        raise ValueError(f"move_rows needs an int32 vector of slots, got {source.dtype} {source.shape}")
    slots = {cache.shape[1] for cache in caches}
    if any(cache.ndim != 3 for cache in caches) or len(slots) > 1 or min(slots, default=0) < len(source):
        shapes = [cache.shape for cache in caches]
        raise ValueError(f"move_rows needs caches [K, S, H] of at least {len(source)} slots each, got {shapes}")
    kernels = registry.current()
    if kernels.platform == "tpu":
        return move_within(caches, source, start, window)
    fused = kernels.find("move_rows", caches, source, start)
    return (fused.move_rows if fused else reference)(caches, source, start)


def reference(caches: tuple[jax.Array, ...], source: jax.Array, start: jax.Array) -> tuple[jax.Array, ...]:
    """The operation in XLA: a launch or two for each cache on a GPU."""

    def move(cache: jax.Array) -> jax.Array:
        # Read before anything is written: fused with the write, the two would need a copy of the whole layer.
        rows = jax.lax.optimization_barrier(jnp.take(cache, source, axis=1, mode="clip"))  # [K, P, H]
        return jax.lax.dynamic_update_slice(cache, rows, (0, start, 0))

    return tuple(map(move, caches))


def move_within(
    caches: tuple[jax.Array, ...], source: jax.Array, start: jax.Array, window: int
) -> tuple[jax.Array, ...]:
    """The operation by slices: first of the window, then of each row in it.

    A gather, or a slice of one row of a cache whose heads are 64 wide, would copy the cache into another layout.
    """
    window = min(window, caches[0].shape[1])
    first = jnp.minimum(start, caches[0].shape[1] - window)

    def move(cache: jax.Array) -> jax.Array:
        K, _, H = cache.shape
        near = jax.lax.optimization_barrier(jax.lax.dynamic_slice(cache, (0, first, 0), (K, window, H)))
        # As `take` clips: a slice that would end outside begins earlier.
        rows = [jax.lax.dynamic_slice(near, (0, slot, 0), (K, 1, H)) for slot in source - first]
        rows = jax.lax.optimization_barrier(jnp.concatenate(rows, axis=1))
        return jax.lax.dynamic_update_slice(cache, rows, (0, start, 0))

    return tuple(map(move, caches))
