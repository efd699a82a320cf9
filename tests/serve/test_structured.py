"""Answers with a shape through the official client: schemas, choices, and calls that are asked for."""

import dataclasses
import json
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from native_models import EOS_IDS, LLAMA, list_files, write_native
from serving import Running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.llm import LLM

TOOL = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"lamp": {"enum": ["hall", "bath"]}, "on": {"type": "boolean"}},
            "required": ["lamp", "on"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = TOOL["function"]["parameters"]
QUESTION = [{"role": "user", "content": "On?"}]


class Record(pydantic.BaseModel):
    lamp: Literal["hall", "bath"]
    on: bool


def write_bytes_tokenizer(folder, size):
    """Each byte is a token; the tokens that end texts have the ids that the model's manifest names."""
    alphabet = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    ids = [f"<end{i}>" if i in EOS_IDS else next(alphabet, f"<{i}>") for i in range(size)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(ids)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<end{i}>" for i in EOS_IDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    list_files(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured") / "tiny"
    config = dataclasses.replace(LLAMA, vocab_size=260, max_context=2048)
    write_native(folder, config)
    write_bytes_tokenizer(folder, 260)
    return LLM(folder)


@pytest.fixture(scope="module")
def running(model):
    with Running(model) as server:
        yield server


@pytest.fixture
def ask(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        yield lambda **options: client.chat.completions.create(**{"model": "tiny", "messages": QUESTION, **options})


@pytest.mark.thorough
def test_a_schema(ask):
    shape = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": SCHEMA, "strict": True}}
    for temperature in (0, 1):
        for seed in range(3):
            answer = ask(response_format=shape, temperature=temperature, seed=seed, max_tokens=200)
            jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
            assert answer.choices[0].finish_reason == "stop"


def test_a_pydantic_model(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Record, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Record)


def test_vllms_fields(ask):
    for extra in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes", "no"]}):
        assert ask(extra_body=extra, temperature=1).choices[0].message.content in ("yes", "no")
    text = ask(extra_body={"structured_outputs": {"regex": "[ab]{3}c"}}, temperature=1).choices[0].message.content
    assert len(text) == 4 and text.endswith("c")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "switch"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_asked_for(ask, choice, stream):
    options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
    answer = ask(**options, temperature=1, seed=2, stream=stream)
    if stream:
        calls = [c for chunk in answer for c in chunk.choices[0].delta.tool_calls or []]
        assert calls[0].function.name == "switch" and calls[0].id
        arguments = "".join(call.function.arguments for call in calls)
    else:
        assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
        (call,) = answer.choices[0].message.tool_calls
        arguments = call.function.arguments
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_chat_of_llm_calls_a_tool(model):
    answer = model.chat(QUESTION, tools=[TOOL], tool_choice="switch")
    jsonschema.validate(json.loads(answer.tool_calls[0]["function"]["arguments"]), SCHEMA)
    history = [*QUESTION, answer.message, {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "ok"}]
    assert model.chat(history, tools=[TOOL], tool_choice="none").message["role"] == "assistant"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "supported",
        ),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex", "malformed"),
        ({"extra_body": {"structured_outputs": {"jsn": {}}}}, "structured_outputs", "json"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "exactly one"),
        ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "guided_regex", "both"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "two shapes",
        ),
    ],
)
def test_wrong_shapes_are_one_clear_error(ask, options, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(max_tokens=20, **options)
    assert caught.value.param == param
    assert ask(max_tokens=2).choices
