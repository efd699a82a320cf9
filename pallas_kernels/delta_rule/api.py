"""The gated delta rule over the rows of a tree, from the state before the rows that a layer keeps.

Per value head, with decay a, rate b and a key of length one: S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T and
o_t = S_t q_t. Over rows that follow a state S this is, walking a row's ancestors i from the oldest to the newest,

    y := S k_t;  y := a_i y + (k_i . k_t) u_i for each i;  u_t := b_t (v_t - a_t y);  o_t likewise with q_t

So a layer keeps k, u and a of its rows, as attention keeps keys and values, and a tree's mask says who the ancestors
are. Rows are walked in the order of their slots: parents have lower ones. No quotient of decays is formed: they
underflow.

Letters: T rows of a pass, Hk key heads, g value heads of each, K and V widths of a key and a value head, R kept rows, W
window slots, n channels of a key head.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import native, registry
from pallas_kernels.delta_rule.reference import DeltaRows, KeptRows, fold, fold_at_once, loop_turns
from pallas_kernels.delta_rule.reference import delta_rule as walk_by_xla
from pallas_kernels.delta_rule.reference import short_conv as convolve_by_xla


def delta_rule(
    new: DeltaRows, kept: KeptRows, first: jax.Array, mask: jax.Array, late: jax.Array,
    offset: jax.Array | None = None, *, block: int, active_rows: jax.Array | None = None,
) -> tuple[jax.Array, KeptRows]:  # fmt: skip
    """The rows of a tree window after `first` committed ones.

    Args:
      new: the rows, which are written after the committed ones.
      kept: those of the layer.
      first: int32 [], committed rows among the kept ones, where the window begins.
      mask: bool [T, W], each row's ancestors and itself among the window's slots.
      late: bool [T], rows that use the state after the first `block` rows, all committed, and skip those.
      offset: slot of the first row; None is 0.
      active_rows: the rows that matter, which come first; the others come out arbitrary but finite. None for all.

    Returns:
      float32 `[T, Hk, g, V]`, and the kept rows; the state stays as it is.

    Raises:
      ValueError: shapes do not fit together.
    """
    _check(new, kept, mask, late)
    kernels = registry.current()
    if not kernels.native:
        return walk_by_xla(new, kept, first, mask, late, offset, block=block)
    same = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (new.value, *kept[:3])]
    out, key, value, decay = native.call(
        "delta_rule", tuple(same), *new, mask, late, kept.state, *kept[:3], first.astype(jnp.int32),
        jnp.int32(0) if offset is None else offset.astype(jnp.int32), native.row_count(active_rows, new.key),
        aliases={8: 1, 9: 2, 10: 3}, block=block, threads=kernels.threads,
    )  # fmt: skip
    return out, KeptRows(key, value, decay, kept.state)


def delta_fold(kept: KeptRows, first: jax.Array, *, block: int, at_once: bool = False) -> jax.Array:
    """The state after the first `block` rows; `first` is any number that is not negative.

    Rows are folded one after the other, or with `at_once`, which rounds otherwise, by one product.
    """
    kernels = registry.current()
    if kernels.native:
        state = jax.ShapeDtypeStruct(kept.state.shape, jnp.float32)
        rows = kept.key, kept.value, kept.decay
        return native.call("delta_fold", state, *rows, kept.state, aliases={3: 0}, block=block, threads=kernels.threads)
    return fold_at_once(kept, block) if at_once else fold(kept, loop_turns(first, block))


def short_conv(
    weight: jax.Array,  # [Hk, n, taps] float32
    kept: jax.Array,  # [Hk, R, n] float32
    x: jax.Array,  # [T, Hk, n] float32
    before: jax.Array,  # int32 [taps - 1, T]
    place: jax.Array,  # int32 []
    *,
    silu: bool = False,
    active_rows: jax.Array | None = None,  # int32 []
) -> jax.Array:  # [T, Hk, n] float32
    """Each row and those before it, times a column of `weight` each, added up from the oldest on.

    Args:
      kept: inputs of earlier rows, of which those below `place` are read.
      x: the rows, which follow.
      before: places of the rows before each one, the oldest first, among the kept rows and then `x`; negative for none.
      silu: apply it to the result.
      active_rows: as of `delta_rule`.
    """
    kernels = registry.current()
    if not kernels.native:
        return convolve_by_xla(weight, kept, x, before, place, silu=silu)
    return native.call(
        "short_conv", jax.ShapeDtypeStruct(x.shape, jnp.float32), weight, kept, x, before.astype(jnp.int32),
        place.astype(jnp.int32), native.row_count(active_rows, x), silu=silu, threads=kernels.threads,
    )  # fmt: skip


def _check(new: DeltaRows, kept: KeptRows, mask: jax.Array, late: jax.Array) -> None:
    T, Hk, g, V = new.value.shape
    K, R = new.key.shape[2], kept.key.shape[1]
    wanted = (T, Hk, K), (T, Hk, K), (T, Hk, g, V), (T, Hk, g), (T, Hk, g), (Hk, R, K), (Hk, R, g * V), (Hk, R, g)
    for array, shape in zip((*new, *kept), (*wanted, (Hk, K, g * V)), strict=True):
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(f"delta_rule needs float32 {shape}, got {array.dtype} {array.shape}")
    if mask.ndim != 2 or mask.shape[0] != T or late.shape != (T,) or mask.dtype != bool or late.dtype != bool:
        raise ValueError(f"delta_rule of {T} rows needs bool [{T}, W] and [{T}], got {mask.shape} and {late.shape}")
