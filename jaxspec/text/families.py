"""How families of models mark calls of tools: how a call is read, and the form in which a grammar writes one."""

import ast
import contextlib
import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, Literal

Call = tuple[str, str]  # name of the tool, and its arguments as JSON
Schemas = Mapping[str, Mapping[str, Any]]  # of tools' arguments, by name
THINK, END_THINK = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How a grammar writes calls; the texts hold markers, some of which are special tokens of the model.

    Attributes:
      call: one call; NAME and ARGUMENTS stand for themselves.
      between: what stands between two calls; None where an answer has one call at most.
      before, after: what stands around all of them.
      arguments: how their values are written.
      sign: a text of the chat templates that take this form; the first form that fits is the model's.
    """

    call: str
    between: str | None
    before: str = ""
    after: str = ""
    arguments: Literal["json", "gemma", "xml"] = "json"
    sign: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family of models marks calls of tools.

    Attributes:
      signs: texts of its chat templates; one of them suffices.
      opening, closing: markers around a call, or around several; without a closing one a call ends with its arguments.
      head: what a call begins with, up to its arguments, which are a JSON object; group 1 is the tool's name.
      read: the calls of a whole body that `head` does not match, by the tools' schemas; None where it holds none.
      forms: of its calls under a grammar.
      bare: whether an answer may be a call without markers.
      id_length: of a call's name; 0 is OpenAI's form.
      markers: special tokens of its models that are part of the answer's text.
    """

    signs: tuple[str, ...]
    opening: str
    closing: str
    head: re.Pattern[str] | None
    read: Callable[[str, Schemas], list[Call] | None]
    forms: tuple[CallForm, ...]
    bare: bool = False
    id_length: int = 0
    markers: tuple[str, ...] = ()

    def make_id(self) -> str:
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


def find_family(template: str) -> str:
    """The name of a template's family; Hermes where nothing else is found."""
    return next((key for key, family in FAMILIES.items() if any(sign in template for sign in family.signs)), "hermes")


def _read_json(body: str, schemas: Schemas) -> list[Call] | None:
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


def _read_python(body: str, schemas: Schemas) -> list[Call] | None:
    """Llama's built-in tools: `name.call(key="value")`; else JSON."""
    found = re.fullmatch(r"\s*([\w-]+)\.call\((.*)\)\s*", body, re.DOTALL)
    if found is None:
        return _read_json(body, schemas)
    try:
        call: Any = ast.parse(f"f({found[2]})", mode="eval").body
        return [(found[1], json.dumps({key.arg: ast.literal_eval(key.value) for key in call.keywords}))]
    except (ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError):
        return None


def _read_gemma(body: str, schemas: Schemas) -> list[Call] | None:
    """FunctionGemma's `call:name{key:<escape>text<escape>,other:3}`."""
    found = re.fullmatch(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if found is None:
        return None
    texts = found[2].split("<escape>")
    for index, text in enumerate(texts):
        odd = index % 2
        texts[index] = json.dumps(text) if odd else re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', text)
    return _read_json(f'{{"name": "{found[1]}", "arguments": {"".join(texts)}}}', schemas)


def is_text(schema: Any) -> bool:
    """Whether values of a schema are texts, which Qwen3-Coder and Gemma write without quotes."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _read_xml(body: str, schemas: Schemas) -> list[Call] | None:
    """Qwen3-Coder's `<function=name><parameter=key>value</parameter></function>`.

    A value that is JSON is read so, unless the tool's schema says that it is a text.
    """
    calls = []
    for name, inner in re.findall(r"<function=([^>\s]+)>(.*?)</function>", body, re.DOTALL):
        arguments, properties = {}, schemas.get(name, {}).get("properties", {})
        for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", inner, re.DOTALL):
            arguments[key] = value
            if not is_text(properties.get(key)):
                with contextlib.suppress(ValueError, RecursionError):
                    arguments[key] = json.loads(value)
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls or None


_JSON_HEAD = r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_JSON_CALL = re.compile(_JSON_HEAD)
LISTED_HEAD = re.compile(rf"\s*\[?{_JSON_HEAD}")
NAMED_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")  # of Mistral's later templates
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
FAMILIES: Mapping[str, Family] = {
    "harmony": Family(
        ("<|channel|>",), "", "", None, _read_json,
        (CallForm("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS", None),),
        markers=HARMONY_MARKERS,
    ),
    "mistral": Family(
        ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", LISTED_HEAD, _read_json,
        (
            CallForm("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", sign="[ARGS]"),
            CallForm('{"name": "NAME", "arguments": ARGUMENTS}', ", ", "[TOOL_CALLS][", "]"),
        ),
        id_length=9, markers=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "gemma": Family(
        ("<start_function_call>",), "<start_function_call>", "<end_function_call>", None, _read_gemma,
        (CallForm("<start_function_call>call:NAME{ARGUMENTS}<end_function_call>", "", arguments="gemma"),),
        markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "qwen3_coder": Family(
        ("<function=",), "<tool_call>", "</tool_call>", None, _read_xml,
        (CallForm("<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>", "\n", arguments="xml"),),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "hermes": Family(
        ("<tool_call>",), "<tool_call>", "</tool_call>", _JSON_CALL, _read_json,
        (CallForm('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "\n"),),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "llama3": Family(
        ("<|python_tag|>", "<|start_header_id|>"), "<|python_tag|>", "", _JSON_CALL, _read_python,
        (CallForm('{"name": "NAME", "parameters": ARGUMENTS}', "; "),),
        bare=True, markers=("<|python_tag|>",),
    ),
}  # fmt: skip
