"""Frozen dataclasses whose fields JAX maps over."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**options: Any) -> Any:
    """A field that is part of a pytree's structure, and not one of its leaves."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree of its fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
