"""Axis rules: which logical axis of a parameter is split over which mesh axis, and the shardings that follow."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.params import ArrayInfo, is_info
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.padding import pad_shape

# A dimension that holds all heads at once, where blocks cross from head to head: it fits on one device only.
UNCUT = "uncut"

# Megatron's split: heads and MLP columns are local, so a layer needs two all-reduces; the vocabulary is split too.
TENSOR_PARALLEL: Mapping[str, str | None] = {
    "vocab": TENSOR_AXIS,
    "head_rows": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "embed": None,
    UNCUT: None,
}


def partition_spec(info: ArrayInfo, rules: Mapping[str, str | None] = TENSOR_PARALLEL) -> PartitionSpec:
    """Partition spec of one declared array.

    Raises:
      ValueError: a logical axis has no rule, or two axes of one array claim the same mesh axis.
    """
    names = []
    for axis in info.axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {', '.join(rules)}")
        names.append(None if axis is None else rules[axis])
    used = [n for n in names if n is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {info.axes} claim one mesh axis twice: {names}")
    return PartitionSpec(*names)


def partition_specs(infos: Any, rules: Mapping[str, str | None] = TENSOR_PARALLEL) -> Any:
    """Partition specs of a pytree of `ArrayInfo`."""
    return jax.tree.map(lambda i: partition_spec(i, rules), infos, is_leaf=is_info)


def placed_shapes(infos: Any, plan: MeshPlan, least: Mapping[str, int] | None = None) -> Any:
    """Padded, sharded `jax.ShapeDtypeStruct`s of a pytree of `ArrayInfo` on a mesh: what every restore must produce.

    Args:
      infos: the declaration.
      plan: the mesh; split dimensions are padded to a multiple of its degree (and of the declared unit).
      least: smallest sizes of logical axes; smaller ones are padded up to them first.

    Raises:
      ValueError: blocks cross from head to head, and the mesh has several devices.
    """
    sizes = least or {}
    mesh = plan.mesh

    def place(info: ArrayInfo) -> jax.ShapeDtypeStruct:
        if UNCUT in info.axes and plan.tensor > 1:
            raise ValueError(
                f"heads of {info.format} blocks {info.shape} cannot be split over {plan.tensor} devices: "
                "their blocks cross from head to head; `fit_storage` keeps such a weight in float32"
            )
        spec = partition_spec(info)
        shape = tuple(n if a is None else max(n, sizes.get(a, 0)) for n, a in zip(info.shape, info.axes, strict=True))
        shape = pad_shape(shape, spec, plan.tensor * info.unit)
        return jax.ShapeDtypeStruct(shape, info.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, infos, is_leaf=is_info)
