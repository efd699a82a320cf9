"""The official client against the server: what it gets is what `LLM` gives."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
from serving import Rounds

from jaxspec.config import SamplingParams

PROMPT = "w1 w7 w3"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def expected(llm, prompt=PROMPT, **sampling):
    return llm.generate(prompt, SamplingParams(**sampling))


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == 400  # pyright: ignore[reportAttributeAccessIssue]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_chat(client, cold_llm):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20)
    wanted = expected(cold_llm, max_tokens=20)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == len(wanted.token_ids)
    parts = [{"role": "developer", "content": [{"type": "text", "text": "w1 w7 "}, {"type": "text", "text": "w3"}]}]
    # What asks for nothing is taken.
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "u", "store": False}
    again = client.chat.completions.create(
        model="tiny", messages=parts, max_completion_tokens=20, max_tokens=3, n=1, **neutral
    )
    assert again.choices[0].message.content == wanted.text


def test_chat_streams_the_same(client, cold_llm):
    wanted = expected(cold_llm, max_tokens=30, temperature=1.0, seed=3, logprobs=2)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=30, temperature=1.0, seed=3, logprobs=True, top_logprobs=2,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted.text
    assert chunks[-2].choices[0].finish_reason == wanted.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(wanted.token_ids)
    tokens = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.logprob for t in tokens] == pytest.approx(list(wanted.logprobs))
    assert [len(t.top_logprobs) for t in tokens] == [2] * len(wanted.token_ids)
    assert bytes(tokens[0].bytes).decode() == tokens[0].token


def test_completions(client, cold_llm):
    wanted = expected(cold_llm, max_tokens=16)
    plain = client.completions.create(model="tiny", prompt=PROMPT)
    ids = client.completions.create(model="tiny", prompt=[[1, 7, 3]], logprobs=1)
    assert plain.choices[0].text == ids.choices[0].text == wanted.text
    assert len(ids.choices[0].logprobs.token_logprobs) == len(wanted.token_ids)
    assert ids.choices[0].logprobs.text_offset[:2] == [0, len(ids.choices[0].logprobs.tokens[0])]
    stream = list(client.completions.create(model="tiny", prompt=PROMPT, stream=True))
    assert "".join(c.choices[0].text for c in stream) == wanted.text
    assert stream[-1].choices[0].finish_reason == wanted.finish_reason


def test_seed_stop_and_vllms_extras(client, cold_llm):
    def ask(**options):
        return client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, **options).choices[0]

    seeded = [ask(temperature=1.0, seed=seed).text for seed in (5, 5, 6)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert seeded[0] == expected(cold_llm, max_tokens=40, temperature=1.0, seed=5).text
    extra = {"top_k": 3, "ignore_eos": True, "repetition_penalty": 1.2}
    whole = ask(extra_body=extra, logit_bias={"4": 2})
    assert whole.text == expected(cold_llm, max_tokens=40, logit_bias={4: 2.0}, **extra).text
    stop = whole.text[20:23]
    stopped = ask(extra_body=extra, logit_bias={"4": 2}, stop=[stop])
    assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"n": 2}, "n", "n is 2 and temperature 0"),
        ({"n": 65, "temperature": 1}, "n", "1 to 64 choices"),
        ({"tools": [{"type": "function"}]}, "tools", "a function with a name"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "'messages'"),
        ({"max_tokens": 399}, "max_tokens", "context holds 400"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"extra_body": {"temprature": 1}}, "temprature", "temperature"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"messages": [{"role": "user", "content": "w1 " * 500}]}, "messages", "context holds 400"),
        ({"messages": [{"role": "function", "content": "1", "name": "a"}]}, "messages[0]", "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages", "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "image_url"),
        ({"extra_body": {"min_tokens": 6}}, "min_tokens", "exceeds max_tokens 5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, options, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **options})
    assert caught.value.param == param


def test_an_answer_goes_back_into_the_conversation(client):
    """As the client gives it, with the fields that a message may have and this one has not."""
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5).choices[0].message
    again = [*MESSAGES, answer.model_dump(), {"role": "user", "content": "w2", "name": "ann"}]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=5).choices[0].message.role


def test_a_client_that_leaves_ends_its_request(server, client):
    with client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, extra_body=LONG) as stream:
        next(iter(stream))
    server.wait_idle()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02, max_retries=0).chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body=LONG
        )
    server.wait_idle()


LONG = {"ignore_eos": True, "max_tokens": 390}


FAIR = 2  # how far from an even share of the rounds a request may be


def test_many_at_once(server, cold_llm, monkeypatch):
    """None of 32 is lost, each has its own tokens, and each has its share of the rounds, within a factor of two.

    A round is one turn of one request. While k requests are decoded, each is due one round in k.
    """
    sampling = [
        {"max_tokens": 12 + 12 * (i % 3), "temperature": i % 2, "seed": i, "ignore_eos": True} for i in range(32)
    ]
    prompts = [f"w{i % 40} w{i % 7} w3" for i in range(32)]
    watched = Rounds(server.api.scheduler, monkeypatch, begin=32)

    async def ask(client, index):
        given = {name: value for name, value in sampling[index].items() if name != "ignore_eos"}
        answer = await client.completions.create(
            model="tiny", prompt=prompts[index], extra_body={"ignore_eos": True}, **given
        )
        return answer.choices[0].text

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(32)))

    texts = asyncio.run(ask_all())
    for index, prompt in enumerate(prompts):
        assert texts[index] == expected(cold_llm, prompt, **sampling[index]).text
    assert len(watched.queued) == len(watched.ended) == 32
    assert watched.begun == watched.queued  # first come, first served
    for job in watched.queued:
        served, due = watched.served(job), watched.due(job)
        assert due / FAIR <= served <= due * FAIR
        # From its arrival to its end, the rounds of all requests: those of the ones before it, and its own share.
        before = sum(map(watched.served, watched.queued[: watched.queued.index(job)]))
        assert watched.waited(job) <= FAIR * (before + served * server.api.limits.active)


DOCS = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_of_the_docs(server):
    commands = [block for block in re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL) if "curl" in block]
    assert len(commands) >= 4
    for command in commands:
        line = command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl --fail ")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout + done.stderr
        assert any(word in done.stdout for word in ('"data"', '"choices"', "vllm:prompt_tokens_total"))
