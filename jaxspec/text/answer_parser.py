"""A model's answer in parts while its text comes: content, reasoning, and calls of tools.

Each family of models marks them in its own way; `FAMILIES` says how. A parser never fails on a text: what is no
well-formed call of a known tool stays content. Its parts do not depend on how the text was cut into pieces.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from jaxspec.text.families import (
    END_THINK,
    FAMILIES,
    HARMONY_MARKERS,
    LISTED_HEAD,
    NAMED_HEAD,
    RECIPIENT,
    THINK,
    Schemas,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of an answer: text, or of the call `index` its beginning (`text` is the name), or more arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = 0
    id: str = ""


class AnswerParser:
    """Parts of one answer; `message` has what was given out so far."""

    def __init__(
        self, family: str, tools: Schemas | Collection[str] = (), *, reasons: bool = False, thinks: bool = False,
        most_calls: int | None = None,
    ):  # fmt: skip
        """Begin an answer of a model of `family`, which may call `tools`: names, or the schemas of their arguments.

        `reasons`: it may begin with reasoning. `thinks`: it does so, as the prompt opened it. Calls beyond `most_calls`
        are left out.
        """
        self._family, self._most_calls = FAMILIES[family], most_calls
        self._tools = tools if isinstance(tools, Mapping) else dict.fromkeys(tools, {})
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
        heads = (family.head,) if family.opening != "[TOOL_CALLS]" else (LISTED_HEAD, NAMED_HEAD)
        for head in heads:
            found = None if head is None else head.match(text)
            if found is not None and found[1] in self._tools:
                self._start_call(found[1])
                self._held, self._closes = text[found.end() :], head is not NAMED_HEAD
                self._state, self._depth, self._quoted, self._escaped = self._arguments, 0, False, False
                return True
        end = text.find(family.closing) if family.closing else -1
        unlike = not self._opening and not '{"name":'.startswith(re.sub(r"\s", "", text[:64])[:8])
        if end < 0 and not self._final and not unlike:
            return False
        body = text[:end] if end >= 0 else text
        self._held = text[end + len(family.closing) :] if end >= 0 else ""
        calls = None if unlike else family.read(body.strip(), self._tools)
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
        """The rest of the header that the prompt began: where it names a recipient, no marker precedes that."""
        start, sign = self._held.lstrip(), "to=functions."
        if not self._final and len(start) < len(sign) and sign.startswith(start):
            return False
        self._state = self._header if start.startswith(sign) else self._message
        return True

    def _message(self) -> bool:
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
        recipient = RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._tools:
            self._start_call(recipient[1])
            self._state = self._whole_arguments
        else:
            self._kind = "reasoning" if "analysis" in head and recipient is None else "content"
            self._state = self._message
        return True

    def _whole_arguments(self) -> bool:
        """Give out text up to the next marker as arguments."""
        text, marker = self._until(HARMONY_MARKERS)
        self._give_arguments(text.lstrip() if self._fresh else text)
        self._fresh = self._fresh and not text
        if marker is not None:
            self._state = self._header if marker in ("<|start|>", "<|channel|>") else self._message
            self._kind, self._fresh = "content", True
        return marker is not None
