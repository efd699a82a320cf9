"""Tools, reasoning and choices through the official client; the tiny model says recorded answers of others."""

import asyncio
import json
import re

import httpx
import openai
import pytest

from jaxspec import __version__
from jaxspec.config import SamplingParams
from jaxspec.engine import derive_seed
from jaxspec.results import Completion, StreamEvent
from jaxspec.serve.protocol import NEUTRAL, ApiError, parse_request

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "add"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [{"role": "user", "content": "w1 w2"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def says(served_llm, monkeypatch):
    """Let the model say recorded texts, in pieces of three characters; returns the turns that it was asked for."""

    def begin(*texts):
        left, turns, decode = list(texts), [], served_llm.stream(QUESTION, SamplingParams(max_tokens=1))
        *_, real = decode

        def stream(turn, sampling, *_):
            turns.append(turn)
            text = left.pop(0)
            for at in range(0, len(text), 3):
                yield StreamEvent(text[at : at + 3], (7,), (False,))
            done = Completion(text, (7,), "stop", real.completion.stats, "ar", message=turn.read(text))
            yield StreamEvent("", (), (), finish_reason="stop", completion=done)

        monkeypatch.setattr(served_llm, "_stream", stream)
        return turns

    return begin


def test_calls_and_their_results(client, says):
    """A tool loop: parallel calls, their results, and the answer."""
    turns = says(CALLS, "It is warm.")
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, tool_choice="auto")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "Let me see."
    assert [c.function.name for c in message.tool_calls] == ["get_weather", "add"]
    assert json.loads(message.tool_calls[1].function.arguments) == {"a": 1, "b": [2]}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "w3"} for call in message.tool_calls]
    history = [*QUESTION, message, *results]
    answer = client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "It is warm." and answer.choices[0].finish_reason == "stop"
    assert turns[0].family == "hermes" and set(turns[0].tools) == {"get_weather", "add"}


def test_streamed_calls(client, says):
    says(CALLS)
    chunks = list(client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    names, pieces = {}, {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.function.name:
                assert call.index not in names and call.id and call.type == "function"
                names[call.index] = call.function.name
            pieces.setdefault(call.index, []).append(call.function.arguments)
    assert names == {0: "get_weather", 1: "add"} and len(pieces[0]) > 3
    assert json.loads("".join(pieces[0])) == {"city": "Rome"}
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Let me see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


ARGUMENTS = '{"city": "Rome"}'
HARMONY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
FAMILIES = {
    "<|channel|>": f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY}",
    "<start_function_call>": "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
    "<function=": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function></tool_call>",
    "[TOOL_CALLS]": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "<|python_tag|>": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
}


@pytest.mark.parametrize("sign", FAMILIES)
def test_a_loop_of_each_family(client, says, served_llm, monkeypatch, sign):
    """A streamed call, its result, and the answer; gpt-oss' reasoning too."""
    template = (
        f"{{{{ tools }}}} {{% for m in messages %}}{{{{ m.content }}}} {{{{ m.tool_calls }}}}{{% endfor %}} {sign}"
    )
    monkeypatch.setattr(type(served_llm.tokenizer), "chat_template", template)
    turns = says(FAMILIES[sign], "It is warm.")
    with client.chat.completions.stream(model="tiny", messages=QUESTION, tools=TOOLS) as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert getattr(choice.message, "reasoning_content", None) == ("hm" if sign == "<|channel|>" else None)
    called = {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]}
    history = [*QUESTION, called, {"role": "tool", "tool_call_id": call.id, "content": "w3"}]
    answer = client.chat.completions.create(model="tiny", messages=history, tools=TOOLS).choices[0]
    assert answer.message.content == "It is warm." and answer.finish_reason == "stop"
    assert len(turns[1].ids) > len(turns[0].ids)


def test_the_clients_own_stream_adds_the_calls_up(client, says):
    says(CALLS)
    with client.chat.completions.stream(model="tiny", messages=QUESTION, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"city": "Rome"}, {"a": 1, "b": [2]}]
    assert message.content == "Let me see."


@pytest.mark.parametrize(
    "options",
    [{"parallel_tool_calls": False}, {"tool_choice": NAMED}],
)
def test_one_call(client, says, options):
    says(CALLS)
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, **options)
    assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["get_weather"]


def test_no_calls_where_none_are_wanted(client, says):
    says(CALLS)
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == CALLS and not answer.choices[0].message.tool_calls


def test_reasoning(client, says, served_llm, monkeypatch):
    """Both names, whole and streamed, and the template's variables; a turn with reasoning goes back in."""
    template = "{{ messages[-1].content }}{% if enable_thinking %} <think>{% endif %}"
    monkeypatch.setattr(type(served_llm.tokenizer), "chat_template", template)
    thought = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    turns = says("hm\n</think>\n\nYes.", "hm</think>Yes.", "<think>x</think>No.")
    first = client.chat.completions.create(model="tiny", messages=QUESTION, **thought).choices[0].message
    assert (first.content, first.reasoning_content, first.reasoning) == ("Yes.", "hm", "hm")
    history = [*QUESTION, first, {"role": "user", "content": "w3"}]
    chunks = list(client.chat.completions.create(model="tiny", messages=history, stream=True, **thought))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    last = client.chat.completions.create(model="tiny", messages=QUESTION, reasoning_effort="low").choices[0].message
    assert (last.content, last.reasoning_content) == ("No.", "x")
    assert [turn.thinks for turn in turns] == [True, True, False]


def test_choices_and_prompts(client, cold_llm):
    """Choice i of a prompt has the text of the i-th completion of `LLM`."""
    sampling = {"temperature": 1.0, "seed": 4, "max_tokens": 8}
    answer = client.completions.create(model="tiny", prompt=["w1", "w2 w3"], n=2, **sampling)
    wanted = [c.text for p in ("w1", "w2 w3") for c in cold_llm.generate(p, SamplingParams(**sampling, n=2)).outputs]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 3 and answer.usage.total_tokens == 3 + answer.usage.completion_tokens
    texts = ["", ""]
    stream = client.chat.completions.create(model="tiny", messages=QUESTION, n=2, stream=True, **sampling)
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    own = [SamplingParams(**{**sampling, "seed": derive_seed(4, index)}) for index in range(2)]
    assert texts == [cold_llm.generate("w1 w2", one).text for one in own]
    echoed = client.completions.create(model="tiny", prompt="w1 w2", max_tokens=3, echo=True).choices[0].text
    plain = client.completions.create(model="tiny", prompt="w1 w2", max_tokens=3).choices[0].text
    assert echoed.endswith(plain) and len(echoed) > len(plain)


def test_sixteen_at_once(server, says):
    says(*[CALLS] * 16)

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            ask = client.chat.completions.create
            return await asyncio.gather(*(ask(model="tiny", messages=QUESTION, tools=TOOLS) for _ in range(16)))

    answers = asyncio.run(ask())
    ids = {call.id for answer in answers for call in answer.choices[0].message.tool_calls}
    assert len(ids) == 32


def test_an_abandoned_stream_leaves_nothing(server, client):
    long = {"ignore_eos": True, "max_tokens": 390}
    with client.chat.completions.create(
        model="tiny", messages=QUESTION, stream=True, n=2, temperature=1, extra_body=long
    ) as stream:
        next(iter(stream))
    server.wait_idle()
    assert client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2).choices


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, r"tools\[0\] must have a function with"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "of type 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "1 to 64 letters"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "there twice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "JSON schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ad"}}}, "did you mean 'add'"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice must be"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, None),
        ({"chat_template_kwargs": "x"}, "must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls must be a list"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "content must be a string"),
    ],
)
def test_wrong_input_is_one_clear_error(server, body, message):
    answer = server.post("/v1/chat/completions", **{"messages": QUESTION, "max_tokens": 2, **body})
    if message is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])
    assert server.post(prompt="w1", max_tokens=1).status_code == 200


def test_small_paths_and_harmless_fields(server, start):
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    assert httpx.get(f"{server.url}/ping").status_code == 200
    told = server.post("/tokenize", prompt="w1 w7 w3").json()
    assert told == {"count": 3, "max_model_len": 400, "tokens": [1, 7, 3]}
    assert server.post("/tokenize", messages=QUESTION, model="tiny").json()["tokens"] == [1, 2]
    assert server.post("/detokenize", tokens=[1, 7]).json()["prompt"] == server.api.llm.tokenizer.decode([1, 7])
    assert server.post("/detokenize", tokens="x").status_code == 400
    harmless = {"cache_prompt": True, "skip_special_tokens": True, "priority": 0, "verbosity": "low"}
    assert server.post(prompt="w1", max_tokens=1, **harmless).status_code == 200
    preflight = {"Origin": "http://ui.org", "Access-Control-Request-Method": "POST"}
    assert httpx.options(f"{server.url}/v1/completions", headers=preflight).status_code == 405


def test_fields_of_other_servers_change_nothing_at_their_neutral_values(server):
    body = {"prompt": "w1", "max_tokens": 5}
    wanted = server.post(**body).json()["choices"]
    neutral = {name: values[0] if values else None for name, values in NEUTRAL.items()}
    details = {"mirostat_tau": 5.0, "dry_base": 1.75, "xtc_threshold": 0.1, "repeat_last_n": 64, "n_predict": 3}
    assert server.post(**body, **{**neutral, **details}).json()["choices"] == wanted
    # llama.cpp's names of a length, and of one without a limit.
    short = parse_request({"prompt": "w1", "n_predict": 3}, chat=False).params(100)
    assert short.max_tokens == 3
    assert parse_request({"prompt": "w1", "n_predict": -1}, chat=False).params(100).max_tokens == 100


@pytest.mark.parametrize(
    "field",
    [
        {"typical_p": 0.9}, {"mirostat": 2}, {"dry_multiplier": 0.8}, {"xtc_probability": 0.5}, {"tfs_z": 0.9},
        {"repeat_penalty": 1.1}, {"truncate_prompt_tokens": 5}, {"allowed_token_ids": [1]}, {"bad_words": ["a"]},
        {"grammar": "root ::= x"}, {"samplers": ["top_k"]}, {"best_of": 3}, {"suffix": "x"}, {"prompt_logprobs": 1},
        {"skip_special_tokens": False}, {"continue_final_message": True}, {"functions": [{"name": "f"}]},
        {"modalities": ["audio"]}, {"repeat_last_n": 64, "presence_penalty": 1.0},
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(field):
    with pytest.raises(ApiError, match=f"{next(iter(field))} is not supported") as caught:
        parse_request({"prompt": "w1", **field}, chat=False)
    assert caught.value.status == 400 and caught.value.param == next(iter(field))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/props", "/slots"])
def test_paths_that_are_not_served(server, path):
    assert server.post(path, input="w1").status_code == 404


def test_pages_of_other_sites_by_option(start):
    server = start(origins=["http://ui.org"])
    preflight = {"Origin": "http://ui.org", "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type"
    allowed = httpx.options(f"{server.url}/v1/completions", headers=preflight)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://ui.org"
    other = httpx.options(f"{server.url}/v1/completions", headers={**preflight, "Origin": "http://x.org"})
    assert other.status_code == 400
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://ui.org"})
    assert answer.headers["access-control-allow-origin"] == "http://ui.org"
