"""Which implementation of `add_norm` takes a call. There are no block sizes to tune."""

from typing import Any


def preferred(*operands: Any) -> tuple[str, ...]:
    """Implementations that should be faster than XLA: one launch for a sum of parts, a sum of residuals and a norm.

    XLA takes two for them. Not measured on a device yet.
    """
    del operands
    return ("triton",)


def load_table() -> dict[str, Any]:
    """No block sizes."""
    return {}
