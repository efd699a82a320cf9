"""The shape of answers that must call a tool, or whose calls must fit the tool's schema, in the family's own form."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.config import SamplingParams, StructuredOutputs
from jaxspec.errors import ConfigError
from jaxspec.structured.grammar import JSON_FORM, read_schema, text_with_calls
from jaxspec.text.answer_parser import END_THINK, FAMILIES
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.turn import Turn

# What stands before a call's name, before its arguments, after them, and between two calls.
_FORMS = {
    "hermes": ('\n{"name": "', '", "arguments": ', "}\n", "\n"),
    "llama3": ('{"name": "', '", "parameters": ', "}", "; "),
    "mistral": ('{"name": "', '", "arguments": ', "}", ", "),
}


def shape_answer(tokenizer: Tokenizer, turn: Turn, sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters under which an answer has the calls that the turn asks for.

    Strict tools that need not be called are a matter of the model in families whose calls no free text may precede.
    Reasoning that the prompt opened comes before a shape that the caller asked for.
    ConfigError: the family's calls cannot be constrained, or the caller asked for another shape.
    """
    shape, family = sampling.structured_outputs, FAMILIES[turn.family or "hermes"]
    special = {tokenizer.token_bytes(token).decode("utf-8", "replace"): token for token in tokenizer.special_ids}
    triggered = turn.strict and turn.tools and turn.family == "hermes" and family.opening not in special
    if not turn.required and (shape is not None or not triggered):
        if shape is None or not turn.thinks:
            return sampling
        if shape.json is None and not shape.json_object:
            raise ConfigError("structured_outputs after reasoning are JSON; switch the reasoning off for another shape")
        schema = {"type": "object"} if shape.json is None else shape.json
        return _with(sampling, {"answer": _json(schema)}, "answer", turn)
    if shape is not None:
        raise ConfigError("structured_outputs and calls of tools are two shapes of one answer: give one of them")
    if turn.family not in _FORMS:
        raise ConfigError(f"tool_choice must be 'auto' or 'none' for models of family {turn.family}")
    before, middle, after, between = _FORMS[turn.family]
    if not turn.required:
        calls = [
            (f"{family.opening}{before}{name}{middle}", schema, f"{after}{family.closing}")
            for name, schema in turn.tools.items()
        ]
        return dataclasses.replace(sampling, structured_outputs=text_with_calls(calls, family.opening))

    def text(marker: str) -> str:
        return f"<[{special[marker]}]>" if marker in special else json.dumps(marker, ensure_ascii=False)

    rules, calls = {}, []
    for index, (name, schema) in enumerate(turn.tools.items()):
        rules[f"arguments_{index}"] = _json(schema)
        head = f"{before}{name}{middle}"
        if turn.family == "mistral" and "[ARGS]" in tokenizer.chat_template:
            call = f"{text(family.opening)} {json.dumps(name)} {text('[ARGS]')} arguments_{index}"
            between = ""
        else:
            call = f"{json.dumps(head, ensure_ascii=False)} arguments_{index} {json.dumps(after)}"
        if turn.family == "hermes":
            call = f"{text(family.opening)} {call} {text(family.closing)}"
        calls.append(call)
    rules["call"] = " | ".join(calls)
    start = f"call ({json.dumps(between)} call)*" if turn.parallel and between else "call+" if turn.parallel else "call"
    if turn.family == "mistral" and between:
        start = f'{text(family.opening)} "[" {start} "]"'
    return _with(sampling, rules, start, turn)


def _with(sampling: SamplingParams, rules: Mapping[str, str], start: str, turn: Turn) -> SamplingParams:
    """Sampling under a grammar, after the reasoning that the prompt opened."""
    lines = [f"{name}: {rule}" for name, rule in rules.items()]
    if turn.thinks:
        lines += [rf"thought[lazy]: /(.|\n)*{END_THINK.replace('/', chr(92) + '/')}/", r"gap: /\n{0,2}/"]
        start = f"thought gap {start}"
    return dataclasses.replace(
        sampling, structured_outputs=StructuredOutputs(grammar="\n".join([f"start: {start}", *lines]))
    )


def _json(schema: Mapping[str, Any] | str) -> str:
    return "%json " + json.dumps(read_schema(schema) | {"x-guidance": JSON_FORM}, ensure_ascii=False)
