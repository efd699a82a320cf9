"""Chat templates: the Jinja dialect of Hugging Face model folders, rendered in a sandbox.

A template comes with a checkpoint and is not trusted: it sees plain data only, in Jinja's immutable sandbox, with the
settings, filters and functions that transformers gives it (transformers/utils/chat_template_utils.py), so that both
render the same text.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import ConfigError


class ChatTemplate:
    """A compiled chat template and the special tokens (`bos_token`, `eos_token`, ...) that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """Compile `source`; raises ConfigError where it is no valid template."""
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; `add_generation_prompt` opens the assistant's turn.

        ConfigError: the messages are malformed, or the template refuses them (roles that do not alternate, say).
        """
        plain = check_messages(messages)
        try:
            return self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error


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
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"messages must hold plain JSON data: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's text for training; here its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own: as in transformers, a variable set inside does not reach the text after it.
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore-prefixed attributes, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any):
        # `self` is taken by position, as Jinja does, so that a template may name an attribute "self".
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _Namespace._check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not store the attribute {name!r}")


class _Dict:
    """The `dict` that templates may call, without the attributes of Python's own type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


_ENVIRONMENT = _make_environment()
