"""Answers of each family in parts, whatever the pieces of the text; malformed calls stay content."""

import json
import random

import pytest

from jaxspec.text.answer_parser import AnswerParser, HarmonyParser
from jaxspec.text.families import FAMILIES, find_family

TOOLS = ("get_weather", "add")
WEATHER, ADD = ("get_weather", {"city": 'Ber{lin "x" \\ </tool'}), ("add", {"a": 1, "b": [2, {"c": "}"}]})
W, A = (json.dumps(arguments, ensure_ascii=False) for _, arguments in (WEATHER, ADD))
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>'
HERMES_ADD = f'<tool_call>{{"arguments": {A}, "name": "add"}}</tool_call>'
HEAD = "<|channel|>commentary to=functions."

# Family, text, whether the prompt opened the reasoning; then content, reasoning and calls.
ANSWERS = {
    "plain": ("hermes", "It is 3 < 4.\n\n", False, "It is 3 < 4.\n\n", None, []),
    "hermes": ("hermes", f"Let me see.\n{HERMES}", False, "Let me see.", None, [WEATHER]),
    "parallel": ("hermes", f"{HERMES}\n{HERMES_ADD}", False, None, None, [WEATHER, ADD]),
    "text after": ("hermes", f"{HERMES_ADD} done", False, "done", None, [ADD]),
    "unclosed": ("hermes", HERMES.removesuffix("</tool_call>"), False, None, None, [WEATHER]),
    "thought": ("hermes", f"hm, so\n</think>\n\n{HERMES}", True, None, "hm, so", [WEATHER]),
    "think": ("hermes", "<think>\nhm\n</think>\n\nYes <think> it is.", False, "Yes <think> it is.", "hm", []),
    "thought to the end": ("hermes", "hm </thin", True, "", "hm </thin", []),
    "no JSON": ("hermes", "a <tool_call>\nno</tool_call> b", False, "a <tool_call>\nno</tool_call> b", None, []),
    "unknown tool": ("hermes", HERMES.replace("get_", "set_"), False, HERMES.replace("get_", "set_"), None, []),
    "no object": (
        "hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', False,
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, [],
    ),
    "llama": ("llama3", f'{{"name": "get_weather", "parameters": {W}}}', False, None, None, [WEATHER]),
    "llama two": (
        "llama3", f'{{"name": "add", "parameters": {A}}}; {{"name": "get_weather", "parameters": {W}}}', False,
        None, None, [ADD, WEATHER],
    ),
    "llama tag": ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {A}}}', False, None, None, [ADD]),
    "llama call": ("llama3", '<|python_tag|>add.call(a=1, b="x")', False, None, None, [("add", {"a": 1, "b": "x"})]),
    "llama code": ("llama3", "<|python_tag|>print(1)", False, "<|python_tag|>print(1)", None, []),
    "llama JSON": ("llama3", ' {"nam": 1, "b": {}}', False, ' {"nam": 1, "b": {}}', None, []),
    "llama later": ("llama3", f'So: {{"name": "add", "parameters": {A}}}', False,
                    f'So: {{"name": "add", "parameters": {A}}}', None, []),
    "mistral": (
        "mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {A}}}, {{"name": "get_weather", "arguments": {W}}}]',
        False, None, None, [ADD, WEATHER],
    ),
    "mistral swapped": ("mistral", f'[TOOL_CALLS][{{"arguments": {A}, "name": "add"}}]', False, None, None, [ADD]),
    "mistral new": (
        "mistral", f"Now [TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{W}", False,
        "Now", None, [ADD, WEATHER],
    ),
    "gemma": (
        "gemma", "<start_function_call>call:add{a:1,b:<escape>x: {y}<escape>}<end_function_call>", False,
        None, None, [("add", {"a": 1, "b": "x: {y}"})],
    ),
    "qwen3 coder": (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx = 2\ny\n</parameter>\n"
        "</function>\n</tool_call>",
        False, None, None, [("add", {"a": 1, "b": "x = 2\ny"})],
    ),
    "harmony": (
        "harmony", "<|channel|>analysis<|message|>Hm. So<|end|><|start|>assistant<|channel|>commentary<|message|>I see."
        f"<|end|><|start|>assistant{HEAD}add <|constrain|>json<|message|>{A}", False, "I see.", "Hm. So", [ADD],
    ),
    "harmony final": ("harmony", "<|channel|>final<|message|>Hi \n", False, "Hi \n", None, []),
    "harmony two": (
        "harmony", f"{HEAD}add<|message|>{A}<|call|><|start|>assistant{HEAD}get_weather<|message|>{W}<|call|>",
        False, None, None, [ADD, WEATHER],
    ),
    "harmony recipient first": (
        "harmony", f" to=functions.add<|channel|>commentary json<|message|>{A}<|call|>", False, None, None, [ADD],
    ),
    "harmony no recipient": ("harmony", "to=5 is", False, "to=5 is", None, []),
    "harmony other tool": ("harmony", f"{HEAD}other<|message|>{{}}", False, "{}", None, []),
}  # fmt: skip


def parse(family, pieces, thinks=False, **options):
    kind = HarmonyParser if family == "harmony" else AnswerParser
    parser = kind(family, TOOLS, reasons=True, thinks=thinks, **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    return parser.message, parts


def together(parts):
    """What a client makes of the parts: texts, and calls by index."""
    content, reasoning, calls = "", "", []
    for part in parts:
        if part.kind == "content":
            content += part.text
        elif part.kind == "reasoning":
            reasoning += part.text
        elif part.kind == "call":
            assert part.index == len(calls) and part.id
            calls.append([part.text, ""])
        else:
            assert part.index == len(calls) - 1
            calls[part.index][1] += part.text
    return content, reasoning, calls


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read(name):
    family, text, thinks, content, reasoning, calls = ANSWERS[name]
    message, _ = parse(family, [text], thinks)
    got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    assert (message["content"], message.get("reasoning_content"), got) == (content, reasoning, calls)


def cuts(text, rng):
    """A text in pieces of one to many characters."""
    at = 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 7, 40))
        yield text[at : at + size]
        at += size


def damaged(text, rng):
    """A text with a piece taken out, doubled or replaced."""
    at = rng.randrange(len(text) + 1)
    end = min(len(text), at + rng.randrange(6))
    return text[:at] + rng.choice(("", text[at:end] * 2, '"', "}", "</think>", "\n", "<tool_call>", ";")) + text[end:]


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_add_up(name):
    """However a text is cut, also one that was damaged, the streamed parts are the parts of the whole."""
    family, text, thinks, *_ = ANSWERS[name]
    rng = random.Random(name)
    for index in range(150):
        given = text if index % 3 == 0 else damaged(text, rng)
        whole, parts = parse(family, [given], thinks)
        message, streamed = parse(family, list(cuts(given, rng)), thinks)
        assert together(streamed) == together(parts), given
        for one in (whole, message):
            for call in one.get("tool_calls", []):
                del call["id"]
        assert message == whole


def test_arguments_are_streamed_and_calls_limited():
    text = f"{HERMES}{HERMES}"
    message, parts = parse("hermes", text)
    assert sum(part.kind == "arguments" for part in parts) > 20
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    message, _ = parse("hermes", text, most_calls=1)
    assert len(message["tool_calls"]) == 1
    message, _ = parse("mistral", "[TOOL_CALLS]add[ARGS]{}")
    assert len(message["tool_calls"][0]["id"]) == 9  # its templates refuse others


def test_a_text_stays_one_where_the_schema_says_so():
    schemas = {"add": {"properties": {"a": {"type": "string"}, "b": {"type": ["string", "integer"]}}}}
    parser = AnswerParser("qwen3_coder", schemas)
    parser.push(
        "<tool_call><function=add><parameter=a>\n1\n</parameter><parameter=b>1</parameter></function></tool_call>"
    )
    assert json.loads(parser.message["tool_calls"][0]["function"]["arguments"]) == {"a": "1", "b": 1}


def test_an_answer_without_calls_is_its_text():
    """With tools and without, whatever looks like a marker."""
    rng = random.Random(0)
    pieces = ["<", "tool", "<tool_cal", "l", " ", "\n", "x", "{", '"', "[TOOL", "<|", "</think", "ü"]
    for family in FAMILIES:
        for _ in range(100):
            given = ["x", *rng.choices(pieces, k=10)]
            assert parse(family, given)[0]["content"] == "".join(given)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<|start|>assistant<|channel|>' }}", "harmony"), ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"), ("<|start_header_id|>", "llama3"),
        ("<|im_start|>", "hermes"), ("<start_function_call>", "gemma"),
    ],
)  # fmt: skip
def test_a_template_names_its_family(template, family):
    assert find_family(template) == family
