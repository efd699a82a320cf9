"""Answers that must call a tool: every text of the grammar is read as calls that fit their schemas."""

import dataclasses
import json
import random

import jsonschema
import numpy as np
import pytest
from text_models import smollm2

from jaxspec.config import SamplingParams, StructuredOutputs
from jaxspec.errors import ConfigError
from jaxspec.structured.calls import shape_answer
from jaxspec.structured.grammar import Grammars
from jaxspec.text.families import HARMONY_MARKERS
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.turn import open_turn

SCHEMAS = {
    "get_weather": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"], "additionalProperties": False,
    },
    "switch": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 8}, "day": {"type": "string", "enum": ["Mon", "2"]},
            "at": {"type": ["integer", "null"], "minimum": 3}, "tags": {"$ref": "#/$defs/tags"},
        },
        "required": ["day"], "additionalProperties": False,
        "$defs": {"tags": {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3},
                                                                {"type": "boolean"}]}, "maxItems": 2, "minItems": 1}},
    },
}  # fmt: skip
SCHEMAS["switch"]["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
QUESTION = [{"role": "user", "content": "Weather?"}]
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", *HARMONY_MARKERS, "<escape>"]
TEMPLATES = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral, later": "[TOOL_CALLS][ARGS]",
    "gemma": "<start_function_call>",
    "qwen3_coder": "<function=",
    "harmony": "<|channel|>",
}


def tokenizer_of(template):
    """SmolLM2's with another template and Mistral's special tokens."""
    parts = smollm2()._parts
    backend = type(parts.backend).from_str(parts.backend.to_str())
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(dataclasses.replace(parts, backend=backend, chat_template=template))


def answer(tokenizer, matcher, rng, most):
    """A random text of the grammar, at most so many tokens."""
    size, ids = tokenizer.vocab_size, []
    while not matcher.ended and len(ids) < most:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:size]
        allowed = np.flatnonzero(bits)
        markers = [token for token in sorted(tokenizer.special_ids) if bits[token]]
        ids.append(int(rng.choice(markers if markers and rng.random() < 0.3 else allowed)))
        matcher.take(ids[-1:])
    return ids, matcher.ended


def check(message):
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return len(message["tool_calls"])


@pytest.mark.thorough
@pytest.mark.parametrize("choice", ["required", "switch"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_each_answer_is_calls(family, choice):
    tokenizer, rng = tokenizer_of(f"{{{{ tools }}}} {TEMPLATES[family]}"), random.Random(family)
    turn = open_turn(tokenizer, QUESTION, tools=TOOLS, tool_choice=choice)
    assert turn.family == family.partition(",")[0]
    shape = shape_answer(tokenizer, turn, SamplingParams()).structured_outputs
    grammars, counts = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids), []
    for _ in range(8):
        ids, ended = answer(tokenizer, grammars.match(shape), rng, 120)
        detokenizer = tokenizer.make_detokenizer(shown=turn.shown)
        message = turn.read(detokenizer.push(ids) + detokenizer.finish())
        if ended:
            assert family == "harmony" or not message["content"]
            counts.append(check(message))
    assert max(counts) == 1 if choice == "switch" or family == "harmony" else max(counts) >= 1


CALLS = {
    "hermes": '<tool_call>\n{"name": "note", "arguments": {"text": "a, b", "day": "2"}}\n</tool_call>',
    "llama3": '{"name": "note", "parameters": {"text": "a, b", "day": "2"}}',
    "mistral": '[TOOL_CALLS][{"name": "note", "arguments": {"text": "a, b", "day": "2"}}]',
    "mistral, later": '[TOOL_CALLS]note[ARGS]{"text": "a, b", "day": "2"}',
    "gemma": "<start_function_call>call:note{text:<escape>a, b<escape>,day:<escape>2<escape>}<end_function_call>",
    "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=text>\na, b\n</parameter>\n<parameter=day>\n2\n"
                   "</parameter>\n</function>\n</tool_call>",
    "harmony": "<|channel|>commentary to=functions.note <|constrain|>json<|message|>"
               '{"text": "a, b", "day": "2"}',
}  # fmt: skip
FREE = {"llama3": "", "harmony": "<|channel|>analysis<|message|>Let me <b>see.<|end|><|start|>assistant"}


@pytest.mark.thorough
@pytest.mark.parametrize("family", CALLS)
def test_a_call_of_a_strict_tool_fits_its_schema(family):
    """Free text until a call begins; from then on the schema decides."""
    tokenizer = tokenizer_of(f"{{{{ tools }}}} {TEMPLATES[family]}")
    turn = open_turn(tokenizer, QUESTION, tools=STRICT)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    shape = shape_answer(tokenizer, turn, SamplingParams()).structured_outputs
    free, call = FREE.get(family, "Let me <b>see. "), CALLS[family]

    def took(text):
        matcher = grammars.match(shape)
        matcher.take(tokenizer.encode(text, add_special_tokens=False))
        return matcher

    assert took(free + call).mask()[tokenizer.eos_ids[0] // 32] >> np.uint32(tokenizer.eos_ids[0] % 32) & 1
    message = turn.read(free + call)
    assert check(message) == 1 and json.loads(message["tool_calls"][0]["function"]["arguments"])["day"] == "2"
    for wrong in (call.replace("note", "nota"), call.replace("2", "3"), call.replace("text", "texts")):
        with pytest.raises(ConfigError, match="allow no token"):
            took(free + wrong)
    words = {"harmony": "<|channel|>final<|message|>So <tool", "llama3": "So {"}.get(family, 'So {"name": 3} <tool')
    bits = np.unpackbits(took(words).mask().view(np.uint8), bitorder="little")
    assert bits.sum() > 40_000


def test_reasoning_comes_before_a_shape():
    tokenizer = tokenizer_of("{{ '<think>' }}")
    turn = open_turn(tokenizer, QUESTION)
    assert turn.thinks
    sampling = SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMAS["switch"]))
    matcher = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).match(
        shape_answer(tokenizer, turn, sampling).structured_outputs
    )
    text = 'So, {"x".\n</think>\n\n{"on": true}'
    matcher.take(tokenizer.encode(text))
    matcher.take([tokenizer.eos_ids[0]])
    assert turn.read(text) == {"role": "assistant", "content": '{"on": true}', "reasoning_content": 'So, {"x".'}
    with pytest.raises(ConfigError, match="after reasoning are JSON"):
        shape_answer(tokenizer, turn, SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


def test_a_shape_of_gpt_oss_is_its_last_channel():
    tokenizer = tokenizer_of("{{ tools }} <|channel|>")
    turn = open_turn(tokenizer, QUESTION)
    shape = StructuredOutputs(json=SCHEMAS["switch"])
    shape = shape_answer(tokenizer, turn, SamplingParams(structured_outputs=shape)).structured_outputs
    matcher = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).match(shape)
    text = FREE["harmony"] + '<|channel|>final<|message|>{"on": true}'
    matcher.take([*tokenizer.encode(text), tokenizer.eos_ids[0]])
    assert turn.read(text)["content"] == '{"on": true}' and turn.read(text)["reasoning_content"] == "Let me <b>see."


def test_two_shapes_and_schemas_that_cannot_be_written_are_refused():
    tokenizer = tokenizer_of("{{ tools }} <function=")
    turn = open_turn(tokenizer, QUESTION, tools=TOOLS, tool_choice="required")
    with pytest.raises(ConfigError, match="two shapes"):
        shape_answer(tokenizer, turn, SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    for schema, named in (
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern'"), ({"oneOf": []}, "'oneOf'"),
        ({"properties": {"a b": {}}}, "'a b'"),
    ):  # fmt: skip
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        turn = open_turn(tokenizer, QUESTION, tools=tools, tool_choice="required")
        with pytest.raises(ConfigError, match=named):
            shape_answer(tokenizer, turn, SamplingParams())
