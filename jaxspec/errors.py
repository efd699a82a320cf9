"""The errors that jaxspec raises on purpose; the command line turns them into one line and an exit status."""

import difflib
from collections.abc import Iterable


class JaxspecError(ValueError):
    """Something a caller gave does not fit; the message names the values that disagree and what to do."""


class ConfigError(JaxspecError):
    """A model, engine or sampling setting is invalid or not supported."""


class CheckpointError(JaxspecError):
    """A checkpoint is missing, damaged, hostile or does not match its own configuration."""


def suggest(name: object, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the nearest known name as a question, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
