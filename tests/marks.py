"""Parametrizations of which a suite runs a part."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast_part(cases: Iterable[Any], is_fast: Callable[..., bool]) -> list[Any]:
    """Cases of a parametrization; `.ci/run` keeps those of which `is_fast` is true, the others are `slow`."""
    return marked(cases, is_fast, pytest.mark.slow)


def quick_part(cases: Iterable[Any], is_quick: Callable[..., bool]) -> list[Any]:
    """Cases, of `fast_part` too; `make test` keeps those of which `is_quick` is true, the others are `thorough`."""
    return marked(cases, is_quick, pytest.mark.thorough)


def marked(cases: Iterable[Any], stays: Callable[..., bool], mark: pytest.MarkDecorator) -> list[Any]:
    """Cases with a mark, but those of which `stays` is true and those that have one."""
    params = []
    for case in cases:
        if not hasattr(case, "marks"):
            # A named tuple is one value, a plain one is several.
            case = pytest.param(*(case if type(case) in (tuple, list) else (case,)))
        if not case.marks and not stays(*case.values):
            case = pytest.param(*case.values, id=case.id, marks=mark)
        params.append(case)
    assert any(not param.marks for param in params), "each suite has a part of every matrix"
    return params
