"""Chat templates: a conversation becomes the text that the model was trained on.

A template comes with a checkpoint and is a program that is not trusted. It sees plain data only, with the settings,
filters and functions that transformers gives it (transformers/utils/chat_template_utils.py), so that both render the
same text. It is rendered in a sandbox that bounds its time and memory (`jaxspec.text.sandbox`).
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from jaxspec.errors import ConfigError
from jaxspec.text.sandbox import LONGEST_TEXT, LimitError, Sandbox, limited, limits

RENDER_SECONDS = 3.0  # of processor time; ordinary templates take milliseconds

_LONGEST_SOURCE = 1 << 20  # characters; the longest published templates have some ten thousand


class ChatTemplate:
    """A chat template and the special tokens (`bos_token`, `eos_token`, ...) that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """Keep `source`; it is compiled when it is first rendered."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:  # fmt: skip
        """The text of a conversation; `add_generation_prompt` opens the assistant's turn.

        `tools` are JSON objects as OpenAI has them. `arguments` are further variables of this template, as plain JSON.
        ConfigError: the messages are malformed, the template is no valid one or refuses them (roles that do not
        alternate, say), or it exceeds a limit of the sandbox.
        """
        variables = {
            "messages": check_messages(messages),
            "tools": None if tools is None else copy_json("tools", list(tools)),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if clash := variables.keys() & arguments:
            raise ConfigError(f"chat_template_kwargs may not hold {sorted(clash)[0]!r}, which every template is given")
        variables |= copy_json("chat_template_kwargs", dict(arguments))
        try:
            with limits(RENDER_SECONDS):
                return _write(_compile(self._source), variables | self._special_tokens)
        except (LimitError, MemoryError) as error:
            raise ConfigError(f"the model's chat template: {error or 'it needs more memory than there is'}") from None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy of `messages`: dicts with the strings `role` and `content`, and whatever else JSON can hold.

    The content of a message with `tool_calls` may be missing. Templates take the arguments of a call as an object.
    ConfigError names the first message that is something else.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages must be a list of dicts with role and content, got {type(messages).__name__}")
    if not messages:
        raise ConfigError("messages is empty; give at least one dict with role and content")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"message {index} must be a dict with role and content, got {type(message).__name__}")
        calls = message.get("tool_calls")
        for key in ("role", "content"):
            if key == "content" and calls and message.get(key) is None:
                continue
            if not isinstance(message.get(key), str):
                found = f"got {type(message[key]).__name__}" if key in message else "which is missing"
                raise ConfigError(f"message {index} must have a string {key!r}, {found}")
    plain = copy_json("messages", [dict(message) for message in messages])
    for index, message in enumerate(plain):
        if message.get("tool_calls"):
            message["content"] = message.get("content") or ""
            message["tool_calls"] = _check_calls(message["tool_calls"], f"message {index}")
    return plain


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of tools in OpenAI's form, with their arguments as objects where they are some."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: tool_calls must be a list of objects with a function, which has a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # a model wrote them: they stay as they are
        function["arguments"] = arguments
    return calls


def copy_json(name: str, value: Any) -> Any:
    """A copy of exact JSON types, whose methods the sandbox knows, and never the caller's objects; else ConfigError."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{name} must hold plain JSON data: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > _LONGEST_SOURCE:
        raise ConfigError(f"the model's chat template has {len(source)} characters, {_LONGEST_SOURCE} at most")
    try:
        return _ENVIRONMENT.from_string(source)
    except (LimitError, MemoryError):
        raise
    except Exception as error:  # Python's compiler and its recursion limit refuse some templates that Jinja takes
        raise ConfigError(f"the model's chat template does not compile: {_reason(error)}") from None


def _write(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_TEXT:
                raise LimitError(f"it writes more than {LONGEST_TEXT} characters")
    except (LimitError, MemoryError):
        raise
    except Exception as error:  # a template is a program: it can fail in any way
        raise ConfigError(f"the model's chat template refuses these messages: {_reason(error)}") from None
    return "".join(pieces)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


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

    def __repr__(self) -> str:
        return "<Namespace>"  # of constant length, whatever it holds

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
    if len(pattern) > 1000:
        raise jinja2.TemplateError("the pattern of strftime_now has more than 1000 characters")
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    # Jinja's own filter escapes HTML, which no model was trained on.
    options: Any = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if indent is None:
        return json.dumps(value, **options)
    if indent > 100 if isinstance(indent, int) else len(indent) > 100:
        raise jinja2.TemplateError("tojson indents by more than 100 characters")
    return Sandbox.concat(Sandbox.steps(json.JSONEncoder(**options).iterencode(value)))  # json's slow encoder


_ENVIRONMENT = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
_ENVIRONMENT.filters["tojson"] = limited("tojson", _tojson)
_ENVIRONMENT.globals.update(
    raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
)
