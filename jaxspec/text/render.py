"""The Jinja dialect of Hugging Face's chat templates, in a sandbox.

A template sees plain data only, with the settings, filters and functions that transformers gives it
(transformers/utils/chat_template_utils.py), so that both render the same text. `jaxspec.text.sandbox` bounds it.
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

from jaxspec.errors import ConfigError
from jaxspec.text.sandbox import LONGEST_TEXT, LimitError, Sandbox, limited, limits

RENDER_SECONDS = 3.0  # of processor time; ordinary templates take milliseconds

_LONGEST_SOURCE = 1 << 20  # characters; the longest published templates have some ten thousand


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Compile a template and render it.

    ConfigError: it does not compile, refuses what it is given, or exceeds a limit of the sandbox.
    """
    try:
        with limits(RENDER_SECONDS):
            return _write(_compile(source), variables)
    except (LimitError, MemoryError) as error:
        raise ConfigError(f"the model's chat template: {error or 'it needs more memory than there is'}") from None


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
