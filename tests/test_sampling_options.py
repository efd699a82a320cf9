"""Stop tokens, least lengths, several completions and top-k log-probabilities: the same for every method."""

import math

import numpy as np
import pytest
from marks import quick_part
from native_models import LLAMA, write_model

from jaxspec import LLM, ConfigError, SamplingParams

PROMPT = [5, 9, 5, 9, 5]
# One method of each kind of drafter; specinfer's tokens differ from plain decoding's above temperature 0.
DRAFTING = ("auto", "lookup", "chain", "specexec", "swiftspec")
SAMPLINGS = ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.9, "seed": 4, "top_k": 8, "presence_penalty": 0.5})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that drafts for itself; loaded for plain decoding, and for all methods on one device."""
    folder = tmp_path_factory.mktemp("sampling") / "model"
    write_model(folder, LLAMA)
    return LLM(folder, draft=folder, method="chain")


@pytest.fixture(scope="module")
def plain(model):
    return model.with_method("ar")


@pytest.fixture(scope="module", params=quick_part(DRAFTING, lambda name: name in ("chain", "swiftspec")))
def drafting(request, model):
    return model.with_method(request.param)


def first_new_token(tokens, after):
    """The first token from place `after` on that does not occur before."""
    return next(token for place, token in enumerate(tokens) if place >= after and token not in tokens[:place])


@pytest.mark.parametrize("options", SAMPLINGS)
def test_stop_tokens_end_the_text_and_least_lengths_forbid_them(plain, drafting, options):
    free = plain.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True, **options))
    stop = first_new_token(free.token_ids, 2)
    place = free.token_ids.index(stop)

    def both(**more):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[stop], **options, **more)
        expected, out = plain.generate(PROMPT, sampling), drafting.generate(PROMPT, sampling)
        assert (out.token_ids, out.text, out.finish_reason) == (
            expected.token_ids, expected.text, expected.finish_reason
        )  # fmt: skip
        return out

    stopped = both()
    assert stopped.token_ids == free.token_ids[: place + 1] and stopped.finish_reason == "stop"
    assert both(min_tokens=place).token_ids == stopped.token_ids
    # One more, and its place has another token: from there on the text is another one.
    longer = both(min_tokens=place + 1)
    assert longer.token_ids[:place] == free.token_ids[:place] and longer.token_ids[place] != stop
    assert stop not in both(min_tokens=30).token_ids


def test_least_lengths_hold_back_the_end_of_sequence_too(plain, drafting):
    free = plain.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    end = first_new_token(free.token_ids, 2)
    for llm in (plain, drafting):
        before, llm.eos_ids = llm.eos_ids, (end,)
        try:
            assert llm.generate(PROMPT, SamplingParams(max_tokens=30)).token_ids[-1] == end
            longer = llm.generate(PROMPT, SamplingParams(max_tokens=30, min_tokens=30)).token_ids
            assert end not in longer and len(longer) == 30
            # Ends of sequence that are ignored are tokens like others.
            ignored = SamplingParams(max_tokens=30, min_tokens=30, ignore_eos=True)
            assert llm.generate(PROMPT, ignored).token_ids == free.token_ids
        finally:
            llm.eos_ids = before


@pytest.mark.parametrize("options", SAMPLINGS)
def test_the_most_probable_tokens_at_each_place(plain, drafting, options):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=6, **options)
    expected, out = plain.generate(PROMPT, sampling), drafting.generate(PROMPT, sampling)
    assert [len(top) for top in out.top_logprobs] == [6] * 12
    for token, logprob, top, other in zip(
        out.token_ids, out.logprobs, out.top_logprobs, expected.top_logprobs, strict=True
    ):
        assert [i for i, _ in top] == [i for i, _ in other]
        np.testing.assert_allclose([p for _, p in top], [p for _, p in other], atol=1e-4)
        values = [p for _, p in top]
        assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1 + 1e-5
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
        if not options:
            assert top[0][0] == token


def test_log_probabilities_only_where_they_are_asked_for(plain):
    nothing = plain.generate(PROMPT, SamplingParams(max_tokens=3))
    chosen = plain.generate(PROMPT, SamplingParams(max_tokens=3, logprobs=True))
    assert nothing.logprobs is nothing.top_logprobs is chosen.top_logprobs is None
    assert len(chosen.logprobs) == 3
    assert "top_logprobs" not in chosen.to_dict()
    assert len(plain.generate(PROMPT, SamplingParams(max_tokens=3, logprobs=2)).to_dict()["top_logprobs"]) == 3


def test_several_completions_of_a_prompt(plain):
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=11, n=3)
    out = plain.generate(PROMPT, sampling)
    assert len(out.outputs) == 3 and out.outputs[0] is out
    assert len({other.token_ids for other in out.outputs}) == 3
    # Each can be had alone, by its own seed; the first one's is the request's.
    for other in out.outputs:
        alone = SamplingParams(max_tokens=12, temperature=1.0, seed=other.stats.seed)
        assert plain.generate(PROMPT, alone).token_ids == other.token_ids
    assert out.stats.seed == 11 and len(out.to_dict()["alternatives"]) == 2
    again = plain.chat([{"role": "user", "content": "w5"}], sampling)
    assert len(again.outputs) == 3
    with pytest.raises(ConfigError, match="stream gives one completion, and n is 3"):
        plain.stream(PROMPT, sampling)


def test_a_list_of_prompts_takes_a_list_of_parameters(plain):
    short, long = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 5))
    outs = plain.generate([PROMPT, PROMPT], [short, long])
    assert [len(out.token_ids) for out in outs] == [2, 5]
    assert plain.generate([]) == [] and plain.generate([], []) == []
    with pytest.raises(ConfigError, match="sampling_params holds 1 for 2 prompts"):
        plain.generate([PROMPT, PROMPT], [short])
    with pytest.raises(ConfigError, match="sampling_params must be SamplingParams"):
        plain.generate([PROMPT], [3])


def test_a_stream_can_be_ended_where_it_is(drafting):
    events = drafting.stream(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    seen = [next(events), next(events)]
    events.abort()
    last = next(events)
    out = last.completion
    assert out.finish_reason == last.finish_reason == "abort"
    assert out.token_ids == sum((event.token_ids for event in (*seen, last)), ())
    assert out.text == "".join(event.text for event in (*seen, last))
    assert out.stats.completion_tokens == len(out.token_ids) < 40
    with pytest.raises(StopIteration):
        next(events)
    # The next request is not touched by it.
    whole = drafting.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    assert whole.token_ids[: len(out.token_ids)] == out.token_ids


def test_a_stream_that_is_left_gives_no_event_any_more(drafting):
    with drafting.stream(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True)) as events:
        first = next(events)
    assert first.finish_reason is None and list(events) == []
    assert sum(1 for _ in drafting.stream(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids names token 1000000, but the vocabulary has"),
        ({"min_tokens": 60}, "min_tokens 60 exceed the context of 64: min_tokens can be at most 59 here"),
        ({"min_tokens": 1, "stop_token_ids": list(range(LLAMA.vocab_size))}, "no token possible before min_tokens"),
    ],
)
def test_what_cannot_be_decoded_is_refused(plain, options, message):
    with pytest.raises(ConfigError, match=message):
        plain.generate(PROMPT, SamplingParams(**options))
