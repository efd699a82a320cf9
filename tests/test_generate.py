"""Text in, text out, with the default model."""

import dataclasses
import json

import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, SamplingParams

pytestmark = pytest.mark.real_model

MESSAGES = [{"role": "user", "content": "Write one sentence about the sea."}]


def test_chat_answers(llm):
    out = llm.chat(MESSAGES, SamplingParams(max_tokens=60))
    assert out.finish_reason == "stop" and out.token_ids[-1] in llm.eos_ids
    assert "sea" in out.text.lower() and "<|im_end|>" not in out.text
    assert llm.tokenizer.decode(out.token_ids) == out.text
    assert out.stats.prompt_tokens == len(llm.encode(MESSAGES))
    assert out.stats.completion_tokens == len(out.token_ids)
    assert out.method == "auto" and out.stats.choice is not None
    plain = llm.with_method("ar").chat(MESSAGES, SamplingParams(max_tokens=60))
    assert plain.token_ids == out.token_ids and plain.stats.speculative_decoding is None and plain.stats.choice is None


def test_length_ends_and_ignore_eos_goes_on(llm):
    short = llm.chat(MESSAGES, SamplingParams(max_tokens=5))
    assert short.finish_reason == "length" and len(short.token_ids) == 5
    full = llm.chat(MESSAGES)
    longer = llm.chat(MESSAGES, SamplingParams(max_tokens=len(full.token_ids) + 4, ignore_eos=True))
    assert longer.finish_reason == "length" and longer.token_ids[: len(full.token_ids)] == full.token_ids
    at_the_end = llm.chat(MESSAGES, SamplingParams(max_tokens=len(full.token_ids)))
    assert at_the_end.finish_reason == "stop" and at_the_end.text == full.text


def test_stop_string_cuts_text_and_ids_alike(llm):
    full = llm.chat(MESSAGES, SamplingParams(max_tokens=40))
    stop = full.text[11:17]  # begins and ends inside tokens
    cut = llm.chat(MESSAGES, SamplingParams(max_tokens=40, stop=stop))
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert llm.tokenizer.decode(cut.token_ids).startswith(cut.text)
    assert not llm.tokenizer.decode(cut.token_ids[:-1]).startswith(cut.text)


def test_stream_adds_up_to_the_completion(llm):
    sampling = SamplingParams(max_tokens=48, temperature=1.0, seed=4, logprobs=True, stop="zzzz")
    events = list(llm.stream("Tokyo 東京 is called 🗼 and", sampling))
    completion = events[-1].completion
    assert all(e.completion is None and e.finish_reason is None for e in events[:-1])
    assert "".join(e.text for e in events) == completion.text
    assert tuple(t for e in events for t in e.token_ids) == completion.token_ids
    assert tuple(p for e in events for p in e.logprobs) == completion.logprobs
    assert len(completion.logprobs) == len(completion.token_ids) and max(completion.logprobs) <= 0
    accepted = completion.stats.speculative_decoding.num_accepted_draft_tokens
    assert sum(d for e in events for d in e.from_draft) == accepted
    assert events[-1].finish_reason == completion.finish_reason


def test_greedy_logprobs_are_those_of_the_model(llm):
    out = llm.generate("The capital of France is", SamplingParams(max_tokens=3, logprobs=True))
    assert out.text.startswith(" Paris")
    assert all(-2 < p < 0 for p in out.logprobs)


def test_prompts_as_text_ids_arrays_and_lists(llm):
    sampling = SamplingParams(max_tokens=6)
    ids = llm.encode("One two three")
    single = llm.generate("One two three", sampling)
    assert llm.generate(ids, sampling).token_ids == single.token_ids
    assert llm.generate(np.array(ids), sampling).token_ids == single.token_ids
    several = llm.generate(["One two three", ids], sampling)
    assert [c.token_ids for c in several] == [single.token_ids] * 2
    assert llm.generate([ids, ids[:1]], sampling)[0].token_ids == single.token_ids


def test_seeds(llm):
    def text(seed, **sampling):
        return llm.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0.9, seed=seed, **sampling)).token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, top_k=1) == text(2, top_k=1) == llm.chat(MESSAGES, SamplingParams(max_tokens=24)).token_ids
    fresh = llm.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0.9))
    assert text(fresh.stats.seed) == fresh.token_ids


def test_second_generate_compiles_nothing(llm, compilations):
    llm.chat(MESSAGES, SamplingParams(max_tokens=3))
    compilations.clear()
    out = llm.generate("word " * 700, SamplingParams(max_tokens=9, temperature=0.5, seed=1, frequency_penalty=0.5))
    assert compilations == [] and out.stats.compile_s == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([1, 99999], "99999 is not in the vocabulary of 49152"),
        (7, "a prompt is a string"),
        ([MESSAGES[0]], "chat answers conversations"),
        ([True, False], "a prompt is a string"),
        ("word " * 9000, "tokens, the context holds 8192"),
    ],
)
def test_bad_prompts_are_refused(llm, prompt, message):
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompt)


def test_chat_wants_messages(llm):
    for wrong in ("text", [1, 2], [], [MESSAGES]):
        with pytest.raises(ConfigError, match="chat takes messages"):
            llm.chat(wrong)


def test_a_completion_is_json(llm):
    out = llm.generate("One", SamplingParams(max_tokens=2, logprobs=True, logit_bias={5: -np.inf}))
    broken = dataclasses.replace(out, logprobs=(-np.inf, -1.0))
    assert json.loads(json.dumps(broken.to_dict(), allow_nan=False))["logprobs"] == [None, -1.0]


def test_draft_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="uses no draft"):
        jaxspec.LLM("no/such/model", draft="no/such/draft", method="lookup")
    with pytest.raises(ConfigError, match="needs a draft model"):
        jaxspec.LLM("no/such/model", draft="none", method="specexec")


@pytest.mark.slow
def test_tensor_parallel_text_is_the_same(llm):
    sampling = SamplingParams(max_tokens=16, temperature=0.8, seed=3)
    parallel = jaxspec.LLM(target_devices=4)
    for options in (SamplingParams(max_tokens=24), sampling):
        assert parallel.chat(MESSAGES, options).token_ids == llm.chat(MESSAGES, options).token_ids
