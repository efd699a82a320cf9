"""The hint at the end of an "unknown name" message."""

import difflib
from collections.abc import Iterable


def suggest(name: object, known: Iterable[str]) -> str:
    """Name the nearest known name as a question, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
