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
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.turn import open_turn

SCHEMAS = {
    "get_weather": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"], "additionalProperties": False,
    },
    "switch": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
}  # fmt: skip
SCHEMAS["switch"]["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
QUESTION = [{"role": "user", "content": "Weather?"}]
SPECIAL = ["[TOOL_CALLS]", "[ARGS]"]


def tokenizer_of(template):
    """SmolLM2's with another template and Mistral's special tokens."""
    parts = smollm2()._parts
    backend = type(parts.backend).from_str(parts.backend.to_str())
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(dataclasses.replace(parts, backend=backend, chat_template=template))


def answer(tokenizer, sampling, rng, most=400):
    """A random text of the grammar, or of free text up to a length."""
    size = tokenizer.vocab_size
    matcher = Grammars(tokenizer, size, tokenizer.eos_ids).match(sampling.structured_outputs)
    ids = []
    while not matcher.ended and len(ids) < most:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:size]
        ids.append(rng.choice(np.flatnonzero(bits).tolist()))
        matcher.take(ids[-1:])
    return ids, matcher.ended


def check(message):
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return len(message["tool_calls"])


@pytest.mark.parametrize("choice", ["required", "switch"])
@pytest.mark.parametrize("signs", ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"])
def test_each_answer_is_calls(signs, choice):
    tokenizer, rng = tokenizer_of(f"{{{{ tools }}}} {signs}"), random.Random(signs)
    turn = open_turn(tokenizer, QUESTION, tools=TOOLS, tool_choice=choice)
    sampling = shape_answer(tokenizer, turn, SamplingParams())
    counts = []
    for _ in range(12):
        ids, ended = answer(tokenizer, sampling, rng, 120)
        detokenizer = tokenizer.make_detokenizer(shown=turn.shown)
        message = turn.read(detokenizer.push(ids) + detokenizer.finish())
        if ended:
            assert not message["content"]
            counts.append(check(message))
    assert max(counts) == 1 if choice == "switch" else max(counts) >= 1


def test_a_call_of_a_strict_tool_fits_its_schema():
    """Free text until the marker; from then on the schema decides."""
    tokenizer = tokenizer_of("{{ tools }} <tool_call>")
    turn = open_turn(tokenizer, QUESTION, tools=STRICT)
    shape = shape_answer(tokenizer, turn, SamplingParams()).structured_outputs
    matcher = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).match(shape)
    matcher.take(tokenizer.encode("Let me see."))
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert bits.sum() > 40_000
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"'
    matcher.take(tokenizer.encode(call))
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    allowed = {tokenizer.token_bytes(int(token)) for token in np.flatnonzero(bits)}
    assert all(one.startswith((b",", b"}")) for one in allowed), allowed


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


def test_two_shapes_and_families_without_one_are_refused():
    tokenizer = tokenizer_of("{{ tools }} <|channel|>")
    turn = open_turn(tokenizer, QUESTION, tools=TOOLS, tool_choice="required")
    with pytest.raises(ConfigError, match="of family harmony"):
        shape_answer(tokenizer, turn, SamplingParams())
    with pytest.raises(ConfigError, match="two shapes"):
        shape_answer(tokenizer, turn, SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    turn = open_turn(tokenizer_of("{{ tools }} [TOOL_CALLS]"), QUESTION, tools=STRICT)
    assert shape_answer(tokenizer, turn, SamplingParams()) == SamplingParams()
