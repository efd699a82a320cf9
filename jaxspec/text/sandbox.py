"""Jinja's immutable sandbox with limits of time and memory.

The sandbox keeps a template from reaching Python. The limits keep it from taking all time or memory of this process:

- Every value that a template makes is weighed when it is made, and no value may be larger than `LONGEST_TEXT`.
- An operation that multiplies sizes (`'a' * n`, `center`, `replace`, formats with a width) is estimated before it runs.
- Loops, calls, filters, comparisons and subscripts look at the clock: the processor time of the thread that renders.

One operation on values within the limits takes a second at most, so the clock is read often enough.
"""

import contextlib
import contextvars
import functools
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEXT = 1 << 24  # characters of a conversation or of any value; no context holds as many tokens

_MAX_BYTES = 1 << 30  # of all values that a template makes, those included that it drops
_MAX_STEP = 1 << 28  # estimated bytes or steps of one operation that multiplies sizes
_MAX_INTEGER_BITS = 1 << 16
_SLOT = 16  # what an entry of a container weighs beside its value: a million entries are the most

_CONTAINERS = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))

# Methods and filters whose result can be larger than what they are given: the least factor of their estimate.
_FACTORS: dict[str, int] = dict.fromkeys(
    ("center", "ljust", "rjust", "zfill", "translate", "join", "indent", "batch", "slice"), 1
)
_FACTORS |= dict.fromkeys(("to_bytes", "replace", "sum"), 1) | {"expandtabs": 8}
# Those that go through a text word by word, with slow patterns: for texts of 16 thousand characters at most.
_FACTORS |= dict.fromkeys(("urlize", "wordwrap", "pprint", "xmlattr", "striptags"), 1 << 14)
_BYTES_OF_ITEM = 64  # of a list of words or characters
_MAKES_ITEMS = frozenset(("list", "sort", "unique", "split", "rsplit", "splitlines", "wordcount"))

_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*")
_BRACE_FIELD = re.compile(r"\{[^}]*")


class LimitError(Exception):
    """A template exceeds a limit; the message says which."""


class _Limits:
    """Time and size that one rendering has used up."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._end = time.thread_time() + seconds
        self._num_bytes = 0
        self._weights: dict[int, tuple[Any, int]] = {}  # by `id` of containers, which are kept alive

    def tick(self) -> None:
        if time.thread_time() > self._end:
            raise LimitError(f"it takes more than the {self._seconds:g} s of processor time that it may take")

    def reserve(self, size: int, limit: int = LONGEST_TEXT) -> None:
        """LimitError if an operation would make more than `limit`."""
        if size > limit:
            raise LimitError("it needs more memory than it may take")

    def spend(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self.reserve(self._num_bytes, _MAX_BYTES)

    def weigh(self, value: Any) -> int:
        """The characters of a value's text, about. A container that holds a value twice weighs it twice."""
        if isinstance(value, str | bytes):
            weight = len(value)
        elif isinstance(value, int):
            self.reserve(value.bit_length(), _MAX_INTEGER_BITS)
            weight = value.bit_length() // 3 + 1
        elif not isinstance(value, _CONTAINERS):
            return _SLOT
        elif id(value) in self._weights:
            return self._weights[id(value)][1]
        else:
            items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            weight = sum(_SLOT + self.weigh(item) for item in items)
            self._weights[id(value)] = value, weight
        self.reserve(weight)
        return weight


_limits: contextvars.ContextVar[_Limits] = contextvars.ContextVar("limits")


@contextlib.contextmanager
def limits(seconds: float) -> Iterator[None]:
    """Bound what templates of a `Sandbox` compile and render inside; LimitError where they exceed it."""
    token = _limits.set(_Limits(seconds))
    try:
        yield
    finally:
        _limits.reset(token)


def _tick(value: Any) -> Any:
    """`value`; looks at the clock."""
    _limits.get().tick()
    return value


def _steps(values: Iterable[Any]) -> Iterator[Any]:
    """`values`, one by one."""
    used = _limits.get()
    for value in values:
        used.tick()
        yield value


def _made(value: Any) -> Any:
    """`value`, which a template has just made."""
    used = _limits.get()
    used.tick()
    used.weigh(value)
    if isinstance(value, str | bytes | list | tuple | dict):
        used.spend(sys.getsizeof(value))
    return value


def _shown(value: Any) -> Any:
    """`value`, whose text is part of the output."""
    used = _limits.get()
    used.tick()
    used.spend(used.weigh(value))
    return value


def _parts(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values`, which are about to be joined."""
    used = _limits.get()
    used.reserve(sum(map(used.weigh, values)))
    return values


def _concat(pieces: Iterable[str]) -> str:
    """Join the pieces that a block or a macro wrote."""
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        _limits.get().reserve(length)
        kept.append(piece)
    return _made("".join(kept))


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Generates code that passes values through `made`, `steps` and `tick` of the sandbox."""

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> Any:
        checks = [*getattr(node, "checks", ())]
        match node:
            case jinja2.nodes.List() | jinja2.nodes.Dict() | jinja2.nodes.Concat():
                checks.append("made")
            case jinja2.nodes.Tuple(ctx="load") | jinja2.nodes.Getitem(arg=jinja2.nodes.Slice()):
                checks.append("made")
        self.write("".join(f"environment.{check}(" for check in checks))
        super().visit(node, *args, **kwargs)
        self.write(")" * len(checks))

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        node.iter.checks = ("steps",)  # pyright: ignore[reportAttributeAccessIssue]
        super().visit_For(node, frame)

    def visit_Operand(self, node: jinja2.nodes.Operand, frame: jinja2.compiler.Frame) -> None:
        node.expr.checks = ("tick",)  # pyright: ignore[reportAttributeAccessIssue]
        super().visit_Operand(node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        for item in node.items:
            item.key.checks = ("tick",)  # pyright: ignore[reportAttributeAccessIssue]
        super().visit_Dict(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        # As Jinja writes it, with `parts` around the operands.
        join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        self.write(f"{join}(environment.parts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment whose templates keep within `limits`."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))
    # The generated code calls these; `concat` is Jinja's own name.
    tick, steps, made, parts = staticmethod(_tick), staticmethod(_steps), staticmethod(_made), staticmethod(_parts)
    concat = staticmethod(_concat)

    def __init__(self, **options: Any):
        """Make an environment with Jinja's filters and tests, `options` being those of Jinja."""
        super().__init__(finalize=_shown, **options)
        for table in (self.filters, self.tests):
            table.update({name: limited(name, function) for name, function in table.items()})
        del self.globals["lipsum"]  # random text of any length

    def getitem(self, obj: Any, argument: Any) -> Any:
        _limits.get().tick()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        used = _limits.get()
        weights = used.weigh(left), used.weigh(right)  # also bounds the integers
        match operator, left, right:
            case "*", (str() | bytes() | list() | tuple()), int():
                used.reserve(weights[0] * right)
            case "*", int(), (str() | bytes() | list() | tuple()):
                used.reserve(weights[1] * left)
            case "**", int(), int():
                used.reserve(left.bit_length() * right, _MAX_INTEGER_BITS)
            case "%", (str() | bytes()), _:
                used.reserve(_size_of_format(left, _PERCENT_FIELD, weights[1]), _MAX_STEP)
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        used = _limits.get()
        used.tick()
        if isinstance(obj, jinja2.runtime.LoopContext) and args:
            args = _steps(args[0]), *args[1:]
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(_as_list(argument) for argument in args)
            # Jinja passes the variables of the loop under names with an underscore.
            named = [value for name, value in kwargs.items() if not name.startswith("_")]
            used.reserve(_estimate(used, getattr(obj, "__name__", ""), owner, [*args, *named]), _MAX_STEP)
        return _made(super().call(context, obj, *args, **kwargs))


def limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test, estimated before it runs and weighed after it."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # its first argument is Jinja's context

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        used = _limits.get()
        used.tick()
        if name in ("join", "sum"):
            args = *args[:first], *(_as_list(argument) for argument in args[first:])
        value, *others = args[first:]
        used.reserve(_estimate(used, "%" if name == "format" else name, value, [*others, *kwargs.values()]), _MAX_STEP)
        result = function(*args, **kwargs)
        return _steps(result) if isinstance(result, types.GeneratorType) else _made(result)

    return run


def _as_list(value: Any) -> Any:
    """The values of an iterator, whose weight is unknown; anything else as it is."""
    return list(value) if isinstance(value, Iterator) else value


def _estimate(used: _Limits, name: str, value: Any, arguments: Sequence[Any]) -> int:
    """Bytes, or steps, that a method or filter may take; 0 where they are no more than those of its arguments."""
    sizes = [abs(a) if isinstance(a, int) else used.weigh(a) for a in arguments]
    weight, largest = used.weigh(value) + 1, max(sizes, default=0)
    match name, value, arguments:
        case "replace", str(), [str(old), str(new), *_]:
            return weight + (value.count(old) if old else weight) * len(new)
        case (("format" | "format_map"), str(), _):
            return _size_of_format(value, _BRACE_FIELD, sum(sizes))
        case "%", str(), _:
            return _size_of_format(value, _PERCENT_FIELD, sum(sizes))
        case "round", _, _:
            return largest << 12  # it multiplies by a power of ten
        case "sum", _, _ if any(isinstance(argument, list | tuple) for argument in arguments):
            return weight * weight  # every addition copies the sum
    if name in _MAKES_ITEMS:
        return weight * _BYTES_OF_ITEM if isinstance(value, str | bytes) else 0
    return weight * max(_FACTORS[name], largest) if name in _FACTORS else 0


def _size_of_format(pattern: str | bytes, field: re.Pattern[str], weight: int) -> int:
    """Characters that a format may write for arguments of such a weight, widths and precisions included."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    fields = field.findall(text.replace("{{", ""))
    if any("*" in f or "{" in f[1:] for f in fields):
        return sys.maxsize  # a width that is an argument
    return len(text) + sum(int(n) for f in fields for n in re.findall(r"\d+", f)) + len(fields) * weight
