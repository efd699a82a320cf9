"""Chat templates: a conversation becomes the text that the model was trained on.

A template comes with a checkpoint and is a program that is not trusted. It is rendered in a sandbox that bounds its
time and memory (`jaxspec.text.render`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import ConfigError


class ChatTemplate:
    """A chat template and the special tokens (`bos_token`, `eos_token`, ...) that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """Keep `source`; it is compiled when it is first rendered."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; `add_generation_prompt` opens the assistant's turn.

        ConfigError: the messages are malformed, the template is no valid one or refuses them (roles that do not
        alternate, say), or it exceeds a limit of the sandbox.
        """
        # Imported here: Jinja takes tens of milliseconds, and some commands render nothing.
        from jaxspec.text.render import render

        variables = {
            "messages": check_messages(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render(self._source, variables | self._special_tokens)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy of `messages`: dicts with the strings `role` and `content`, and whatever else JSON can hold.

    ConfigError names the first message that is something else.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages must be a list of dicts with role and content, got {type(messages).__name__}")
    if not messages:
        raise ConfigError("messages is empty; give at least one dict with role and content")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"message {index} must be a dict with role and content, got {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = f"got {type(message[key]).__name__}" if key in message else "which is missing"
                raise ConfigError(f"message {index} must have a string {key!r}, {found}")
    try:
        # The round trip leaves exact JSON types, whose methods the sandbox knows, and never the caller's objects.
        return json.loads(json.dumps([dict(message) for message in messages]))
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"messages must hold plain JSON data: {error}") from error
