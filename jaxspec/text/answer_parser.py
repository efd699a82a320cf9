"""A model's answer in parts while its text comes: content, reasoning, and calls of tools.

Each family of models marks them in its own way; `FAMILIES` says how. A parser never fails on a text: what is no
well-formed call of a known tool stays content. Its parts do not depend on how the text was cut into pieces.
"""

import ast
import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

Call = tuple[str, str]  # name of the tool, and its arguments as JSON
THINK, END_THINK = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of an answer: text, or of the call `index` its beginning (`text` is the name), or more arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = 0
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family of models marks calls of tools.

    Attributes:
      signs: texts of its chat templates; one of them suffices.
      opening, closing: markers around a call, or around several; without a closing one a call ends with its arguments.
      head: what a call begins with, up to its arguments, which are a JSON object; group 1 is the tool's name.
      read: the calls of a whole body that `head` does not match, None where it holds none.
      bare: whether an answer may be a call without markers.
      id_length: of a call's name; 0 is OpenAI's form.
    """

    signs: tuple[str, ...]
    opening: str
    closing: str
    head: re.Pattern[str] | None
    read: Callable[[str], list[Call] | None]
    bare: bool = False
    id_length: int = 0

    def make_id(self) -> str:
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


def find_family(template: str, name: str | None = None) -> str:
    """The name of a template's family, `name` if given; Hermes where nothing else is found."""
    if name is not None:
        return name
    return next((key for key, family in FAMILIES.items() if any(sign in template for sign in family.signs)), "hermes")


def _read_json(body: str) -> list[Call] | None:
    """Calls as JSON: an object with name and arguments, a list of them, or several after semicolons."""
    calls, decoder, at = [], json.JSONDecoder(), 0
    try:
        while at < len(body):
            value, at = decoder.raw_decode(body, at)
            at += len(body[at:]) - len(body[at:].lstrip("; \n\r\t"))
            for one in value if isinstance(value, list) else [value]:
                arguments = one.get("arguments", one.get("parameters", {}))
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                if not isinstance(one["name"], str) or not isinstance(json.loads(text), dict):
                    return None
                calls.append((one["name"], text))
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    return calls or None


def _read_python(body: str) -> list[Call] | None:
    """Llama's built-in tools: `name.call(key="value")`; else JSON."""
    found = re.fullmatch(r"\s*([\w-]+)\.call\((.*)\)\s*", body, re.DOTALL)
    if found is None:
        return _read_json(body)
    try:
        call: Any = ast.parse(f"f({found[2]})", mode="eval").body
        return [(found[1], json.dumps({key.arg: ast.literal_eval(key.value) for key in call.keywords}))]
    except (ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError):
        return None


def _read_gemma(body: str) -> list[Call] | None:
    """FunctionGemma's `call:name{key:<escape>text<escape>,other:3}`."""
    found = re.fullmatch(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if found is None:
        return None
    texts = found[2].split("<escape>")
    for index, text in enumerate(texts):
        odd = index % 2
        texts[index] = json.dumps(text) if odd else re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', text)
    return _read_json(f'{{"name": "{found[1]}", "arguments": {"".join(texts)}}}')


def _read_xml(body: str) -> list[Call] | None:
    """Qwen3-Coder's `<function=name><parameter=key>value</parameter></function>`; a value that is JSON is read so."""
    calls = []
    for name, inner in re.findall(r"<function=([^>\s]+)>(.*?)</function>", body, re.DOTALL):
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", inner, re.DOTALL):
            try:
                arguments[key] = json.loads(value)
            except (ValueError, RecursionError):
                arguments[key] = value
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls or None


_JSON_HEAD = r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_JSON = re.compile(_JSON_HEAD)
_LISTED = re.compile(rf"\s*\[?{_JSON_HEAD}")
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")  # of Mistral's later templates
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")

FAMILIES: Mapping[str, Family] = {
    "harmony": Family(("<|channel|>",), "", "", None, _read_json),
    "mistral": Family(("[TOOL_CALLS]",), "[TOOL_CALLS]", "", _LISTED, _read_json, id_length=9),
    "gemma": Family(("<start_function_call>",), "<start_function_call>", "<end_function_call>", None, _read_gemma),
    "qwen3_coder": Family(("<function=",), "<tool_call>", "</tool_call>", None, _read_xml),
    "hermes": Family(("<tool_call>",), "<tool_call>", "</tool_call>", _JSON, _read_json),
    "llama3": Family(("<|python_tag|>", "<|start_header_id|>"), "<|python_tag|>", "", _JSON, _read_python, bare=True),
}
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


class AnswerParser:
    """Parts of one answer; `message` has what was given out so far."""

    def __init__(
        self, family: str, tools: Collection[str] = (), *, reasons: bool = False, thinks: bool = False,
        most_calls: int | None = None,
    ):  # fmt: skip
        """Begin an answer of a model of `family`, which may call `tools`.

        `reasons`: it may begin with reasoning. `thinks`: it does so, as the prompt opened it. Calls beyond `most_calls`
        are left out.
        """
        self._family, self._tools, self._most_calls = FAMILIES[family], frozenset(tools), most_calls
        self._reasons = reasons
        self._held = ""  # text that is not given out yet
        self._opening = ""  # what led to the call under way; content again if there is none
        self._state: Callable[[], bool] = self._reason if thinks else self._begin
        self._fresh = thinks  # whether white space is left out before the next text
        self._final = False
        self._closes = False  # whether a brace follows the arguments
        self._depth, self._quoted, self._escaped = 0, False, False  # of the arguments under way
        self._parts: list[Part] = []
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[dict[str, Any]] = []
        self._num_calls = 0  # those left out included

    def push(self, text: str) -> list[Part]:
        """Parts that more text makes certain."""
        self._held += text
        return self._take()

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""
        self._final = True
        return self._take()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's form."""
        content, reasoning = ("".join(self._texts[kind]) for kind in ("content", "reasoning"))
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": "".join(c["pieces"])}}
                for c in self._calls
            ]
        return message

    def _take(self) -> list[Part]:
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _give(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if self._fresh:
            text = text.lstrip()
        if text:
            self._fresh = False
            self._texts[kind].append(text)
            self._parts.append(Part(kind, text))

    def _start_call(self, name: str) -> None:
        self._num_calls += 1
        if self._most_calls is None or self._num_calls <= self._most_calls:
            call = {"id": self._family.make_id(), "name": name, "pieces": []}
            self._calls.append(call)
            self._parts.append(Part("call", name, len(self._calls) - 1, call["id"]))

    def _give_arguments(self, text: str) -> None:
        if text and self._num_calls == len(self._calls):
            self._calls[-1]["pieces"].append(text)
            self._parts.append(Part("arguments", text, len(self._calls) - 1))

    def _until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Text up to the first of `markers`, and which it is; what may begin one is held back."""
        text = self._held
        places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            before = text[:at].rstrip()
            self._opening, self._held = text[len(before) : at + len(marker)], text[at + len(marker) :]
            return before, marker
        safe = len(text)
        if markers and not self._final:
            longest = max(map(len, markers))
            starts = range(max(0, len(text) - longest + 1), len(text))
            safe = next((at for at in starts if any(m.startswith(text[at:]) for m in markers)), safe)
            safe = len(text[:safe].rstrip())
        self._held = text[safe:]
        return text[:safe], None

    # States: each takes from `_held` and says whether the next state can go on.

    def _begin(self) -> bool:
        """Before the first character that is no white space."""
        start = self._held.lstrip()
        thinks = self._reasons and THINK.startswith(start[: len(THINK)])
        if not self._final and (not start or (thinks and len(start) < len(THINK))):
            return False
        if thinks and len(start) >= len(THINK):
            self._held, self._state, self._fresh = start[len(THINK) :], self._reason, True
            return True
        bare = self._family.bare and bool(self._tools) and start.startswith("{")
        self._opening = ""
        self._state = self._call if bare else self._content
        return True

    def _content(self) -> bool:
        text, marker = self._until((self._family.opening,) if self._tools else ())
        self._give("content", text)
        self._state = self._content if marker is None else self._call
        return marker is not None

    def _reason(self) -> bool:
        text, marker = self._until((END_THINK,))
        self._give("reasoning", text)
        if marker is not None:
            self._state, self._fresh, self._reasons = self._begin, True, False
        return marker is not None

    def _call(self) -> bool:
        """After the opening of a call, or between two calls of a list."""
        family, text = self._family, self._held
        heads = (family.head,) if family.opening != "[TOOL_CALLS]" else (_LISTED, _NAMED)
        for head in heads:
            found = None if head is None else head.match(text)
            if found is not None and found[1] in self._tools:
                self._start_call(found[1])
                self._held, self._closes = text[found.end() :], head is not _NAMED
                self._state, self._depth, self._quoted, self._escaped = self._arguments, 0, False, False
                return True
        end = text.find(family.closing) if family.closing else -1
        unlike = not self._opening and not '{"name":'.startswith(re.sub(r"\s", "", text[:64])[:8])
        if end < 0 and not self._final and not unlike:
            return False
        body = text[:end] if end >= 0 else text
        self._held = text[end + len(family.closing) :] if end >= 0 else ""
        calls = None if unlike else family.read(body.strip())
        self._state = self._content
        if calls is not None and all(name in self._tools for name, _ in calls):
            for name, arguments in calls:
                self._start_call(name)
                self._give_arguments(arguments)
            self._fresh = True
        elif unlike:  # JSON that is no call: its text is content as it comes
            self._held = text
        else:
            self._give("content", self._opening + (text[: end + len(family.closing)] if end >= 0 else text))
        return True

    def _arguments(self) -> bool:
        """Give out a JSON object up to the brace that closes it."""
        for at, character in enumerate(self._held):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                else:
                    self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._give_arguments(self._held[: at + 1])
                    self._held, self._state = self._held[at + 1 :], self._after
                    return True
        self._give_arguments(self._held)
        self._held = ""
        return False

    def _after(self) -> bool:
        """After the arguments: to the closing marker, or to the next call."""
        self._fresh = True
        if self._family.closing:
            end = self._held.find(self._family.closing)
            if end < 0:
                keep = 0 if self._final else len(self._family.closing) - 1
                self._held = self._held[max(0, len(self._held) - keep) :] if keep else ""
                return False
            self._held, self._state = self._held[end + len(self._family.closing) :], self._content
            return True
        self._held = self._held.lstrip()
        if not self._held:
            return False
        first, rest = self._held[0], self._held[1:]
        if self._closes and first == "}":
            self._held, self._closes = rest, False
        elif first in ",;":
            self._held, self._opening, self._state = rest, first, self._call
        else:
            self._held, self._state = rest if first == "]" else self._held, self._content
        return True


class HarmonyParser(AnswerParser):
    """gpt-oss: messages with a channel each, whose header names what it is and whom it calls."""

    _kind: Literal["content", "reasoning"] = "content"

    def _begin(self) -> bool:
        text, marker = self._until(HARMONY_MARKERS)
        self._give(self._kind, text)
        if marker in ("<|start|>", "<|channel|>"):
            self._state = self._header
        return marker is not None

    def _header(self) -> bool:
        head, marker, rest = self._held.partition("<|message|>")
        if not marker:
            if self._final:
                self._held = ""
            return False
        self._held, self._fresh = rest, True
        recipient = _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._tools:
            self._start_call(recipient[1])
            self._state = self._whole_arguments
        else:
            self._kind = "reasoning" if "analysis" in head and recipient is None else "content"
            self._state = self._begin
        return True

    def _whole_arguments(self) -> bool:
        """Give out text up to the next marker as arguments."""
        text, marker = self._until(HARMONY_MARKERS)
        self._give_arguments(text.lstrip() if self._fresh else text)
        self._fresh = self._fresh and not text
        if marker is not None:
            self._state = self._header if marker in ("<|start|>", "<|channel|>") else self._begin
            self._kind, self._fresh = "content", True
        return marker is not None
