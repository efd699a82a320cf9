"""The assistant's turn: tools and earlier calls in the prompt, and what is refused before any compute."""

import dataclasses
import json

import pytest
from text_models import smollm2

from jaxspec.errors import ConfigError
from jaxspec.text.families import FAMILIES
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.turn import open_turn

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
CALL = {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
    {"role": "tool", "tool_call_id": "a1", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "a2", "content": "wet"},
]
# The form of Qwen's: tools in the system message, calls with objects as arguments, reasoning of earlier turns.
QWEN = """{%- if tools %}
    {{- '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.name ~ call.function.arguments.city ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{% if enable_thinking %}{{- '<think>\\n' }}{% endif %}
{%- endif %}"""


@pytest.fixture
def tokenizer(request):
    """SmolLM2's with the template of a parameter, its own without."""
    own = smollm2()
    template = getattr(request, "param", None)
    return own if template is None else Tokenizer(dataclasses.replace(own._parts, chat_template=template))


@pytest.mark.parametrize("tokenizer", [QWEN], indirect=True)
def test_a_template_gets_tools_calls_and_variables(tokenizer):
    turn = open_turn(tokenizer, HISTORY, tools=[WEATHER, ADD], chat_template_kwargs={"enable_thinking": True})
    text = tokenizer.decode(turn.ids, skip_special_tokens=False)
    assert (
        json.loads(text[text.index("<tools>") + 7 : text.index('{"type": "function", "function": {"name": "add')])
        == WEATHER
    )
    assert "<think>hm</think><tool_call>get_weatherKöln</tool_call>" in text
    assert turn.thinks and turn.family == "hermes" and list(turn.tools) == ["get_weather", "add"]
    assert not turn.required and turn.parallel
    plain = open_turn(tokenizer, HISTORY[:2])
    assert tokenizer.encode_chat(HISTORY[:2]) == plain.ids
    assert plain.reasons and not plain.thinks and not plain.tools
    assert "<tools>" not in tokenizer.decode(open_turn(tokenizer, HISTORY, tools=[ADD], tool_choice="none").ids)
    named = open_turn(tokenizer, HISTORY, tools=[WEATHER, ADD], tool_choice={"function": {"name": "add"}})
    assert list(named.tools) == ["add"] and named.required and not named.parallel
    assert open_turn(tokenizer, HISTORY, tools=[ADD], tool_choice="required").required


def test_a_template_without_tools_has_them_as_text(tokenizer):
    turn = open_turn(tokenizer, HISTORY, tools=[WEATHER])
    text = tokenizer.decode(turn.ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    response = "<tool_response>\n12 degrees\n</tool_response>\n<tool_response>\nwet\n</tool_response>"
    assert f"<|im_start|>user\n{response}<|im_end|>" in text
    without = open_turn(tokenizer, HISTORY[1:2], tools=[WEATHER])
    assert tokenizer.decode(without.ids, skip_special_tokens=False).startswith("<|im_start|>system\n# Tools\n")
    message = turn.read('<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>')
    again = open_turn(tokenizer, [*HISTORY[:2], message], tools=[WEATHER])
    assert '{"city": "Bonn"}' in tokenizer.decode(again.ids)
    # A text before and after has the same prompt as ever.
    assert open_turn(tokenizer, HISTORY[:2]).ids == tokenizer.encode_chat(HISTORY[:2])


@pytest.mark.parametrize("tokenizer", ["{{ '<|im_start|>assistant<|channel|>' }}"], indirect=True)
def test_markers_that_are_special_tokens_are_text(tokenizer, monkeypatch):
    harmony = dataclasses.replace(FAMILIES["harmony"], markers=("<|im_start|>",))
    monkeypatch.setattr("jaxspec.text.turn.FAMILIES", FAMILIES | {"harmony": harmony})
    turn = open_turn(tokenizer, HISTORY[:2])
    assert [tokenizer.token_bytes(i) for i in turn.shown] == [b"<|im_start|>"]
    shown = tokenizer.make_detokenizer(shown=turn.shown)
    assert shown.push(tokenizer.encode("<|im_start|>a<|im_end|>")) == "<|im_start|>a"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "x"}, "tools must be a list of objects, got 'x'"),
        ({"tools": [1]}, r"tools\[0\] must be an object of type 'function', got 1"),
        ({"tools": [{"function": {}}]}, r"tools\[0\] must have a function with a name"),
        ({"tools": [ADD, ADD]}, r"tools\[1\]: the name 'add' is there twice"),
        ({"tools": [ADD], "tool_choice": "sub"}, "tool_choice names 'sub', which is no tool"),
        ({"tool_choice": "required"}, "no tools are given"),
        ({"tool_parser": "herms"}, "did you mean 'hermes'"),
        ({"chat_template_kwargs": 1}, "must be an object"),
        ({"chat_template_kwargs": {"tools": 1}}, "may not hold 'tools'"),
        ({"chat_template_kwargs": {"a": {1}}}, "plain JSON data"),
    ],
)
def test_wrong_options_are_refused(tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        open_turn(tokenizer, HISTORY[:2], **options)


def test_chat_of_llm(monkeypatch):
    """`LLM.chat` and `LLM.stream` take tools; their message has the call, and an unknown option is named."""
    import jaxspec
    from jaxspec.llm import LLM

    assert LLM.chat.__annotations__["options"]
    llm = object.__new__(LLM)
    llm.tokenizer = smollm2()
    turn = llm._read(HISTORY[:2], {"tools": [WEATHER]})
    assert list(turn.tools) == ["get_weather"]
    with pytest.raises(TypeError, match="did you mean 'tools'|has no option 'tool'"):
        llm._read(HISTORY[:2], {"tool": [WEATHER]})
    with pytest.raises(jaxspec.ConfigError, match="tools: for conversations"):
        llm._read("text", {"tools": [WEATHER]})
    with pytest.raises(TypeError, match="belongs to SamplingParams"):
        llm._read(HISTORY[:2], {"temperature": 1})
