"""The errors that jaxspec raises on purpose; the command line turns them into one line and an exit status."""

import difflib
from collections.abc import Iterable

_LONGEST_MESSAGE = 1000  # characters


class JaxspecError(ValueError):
    """Something a caller gave does not fit; the message names the values that disagree and what to do.

    The message is one line of printable text: it may quote a file or another library; see `one_line`.
    """

    def __init__(self, message: object):
        """Keep `message` as one line."""
        super().__init__(one_line(message))


class ConfigError(JaxspecError):
    """A model, engine or sampling setting is invalid or not supported."""


class CheckpointError(JaxspecError):
    """A checkpoint is missing, damaged, hostile or does not match its own configuration."""


class DistributedError(JaxspecError):
    """A process of several is gone, hangs, or differs from the others."""


def one_line(message: object) -> str:
    """`message` in one line of at most 1,000 characters: white space is joined, what cannot be printed is escaped."""
    text = str(message)
    line = text[:_LONGEST_MESSAGE]
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(line.split()))
    return line if len(text) <= _LONGEST_MESSAGE else f"{line} ... ({len(text)} characters)"


def shown(value: object) -> str:
    """`repr` of a value that a message quotes, cut to 80 characters; its type where it has none."""
    try:
        text = repr(value)
    except Exception:  # integers of 5,000 digits have none, and a class may raise what it likes
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def suggest(name: object, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the nearest known name as a question, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
