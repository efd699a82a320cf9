"""The Jinja dialect of Hugging Face's chat templates, in a sandbox.

A template sees plain data only, in Jinja's immutable sandbox, with the settings, filters and functions that
transformers gives it (transformers/utils/chat_template_utils.py), so that both render the same text. The sandbox keeps
a template from reaching Python; it does not bound time or memory. So `jaxspec.text.guard` renders in its own process.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEXT = 1 << 24  # characters of a rendered conversation; no context holds as many tokens


class RenderError(Exception):
    """A template does not compile, refuses what it is given, or writes too much; the message says which."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Compile a template and render it; raises RenderError, or MemoryError."""
    template = _compile(source)
    pieces, length = [], 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_TEXT:
                break
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it can fail in any way
        raise RenderError(f"the model's chat template refuses these messages: {_reason(error)}") from error
    if length > LONGEST_TEXT:
        raise RenderError(f"the model's chat template writes more than {LONGEST_TEXT} characters")
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # Python's compiler and its recursion limit refuse some templates that Jinja takes
        raise RenderError(f"the model's chat template does not compile: {_reason(error)}") from error


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
