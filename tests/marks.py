"""Parametrizations of which the fast suite runs a part."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast_part(cases: Iterable[Any], is_fast: Callable[..., bool]) -> list[Any]:
    """Cases of a parametrization; the fast suite keeps those of which `is_fast` is true, the others are `slow`."""
    params = []
    for case in cases:
        # A named tuple is one value, a plain one is several.
        values = tuple(case) if type(case) in (tuple, list) else (case,)
        marks = () if is_fast(*values) else pytest.mark.slow
        params.append(pytest.param(*values, marks=marks))
    assert any(not param.marks for param in params), "the fast suite has a part of every matrix"
    return params
