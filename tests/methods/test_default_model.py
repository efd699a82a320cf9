"""The default model under every method: its own text, where it stops, what the counters say."""

import copy

import pytest

import jaxspec
from jaxspec import Chain, PromptLookup, SamplingParams, SpecExec, SpecInfer, Swift
from jaxspec.checkpoint.shipped import default_model_path
from jaxspec.llm import internals

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

TEXT = "The lighthouse stood on the cliff. The lighthouse keeper walked down the cliff. The lighthouse"
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return"
SAMPLINGS = [
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, frequency_penalty=0.3, seed=11),
]
METHODS = [
    Chain(4),
    SpecExec(12, width=4, depth=4),
    SpecInfer((2, 1, 1)),
    PromptLookup(),
    Swift(length=4, threshold=0.1, adaptive=False, layers="mlp=12,20"),
]


@pytest.fixture(scope="module")
def drafted():
    """The default model as its own draft: accepted paths are long. Poor drafts are for tiny models, elsewhere."""
    return jaxspec.LLM(draft=str(default_model_path()), method=METHODS[0])


@pytest.fixture(scope="module", params=METHODS, ids=lambda method: f"{method.name}-{method.exact}")
def speculating(request, drafted):
    """A method, compiled once for all tests of this module."""
    return drafted.with_method(request.param)


def exact_here(llm, sampling):
    return sampling.temperature == 0 or internals(llm).engine.method.exact == "tokens"


def test_the_text_is_that_of_plain_decoding(llm, speculating):
    for prompt in (TEXT, CODE):
        for sampling in SAMPLINGS:
            if exact_here(speculating, sampling):
                out, plain = speculating.generate(prompt, sampling), llm.generate(prompt, sampling)
                assert (out.token_ids, out.text, out.finish_reason) == (
                    plain.token_ids,
                    plain.text,
                    plain.finish_reason,
                )


def test_an_end_token_may_fall_anywhere_on_an_accepted_path(llm, speculating):
    """It is the last token, and what was accepted after it is neither emitted nor counted."""
    tokens = llm.generate(TEXT, SAMPLINGS[0]).token_ids
    places = set()
    for place in range(9):
        if tokens[place] in tokens[:place]:
            continue
        other = copy.copy(speculating)
        other.eos_ids = frozenset({tokens[place]})
        out = other.generate(TEXT, SAMPLINGS[0])
        assert out.token_ids == tokens[: place + 1] and out.finish_reason == "stop"
        counts = out.stats.speculative_decoding
        accepted = counts.per_step_accepted
        inside = place + 1 - sum(n + 1 for n in accepted[:-1])
        assert inside >= 1 and accepted[-1] in (inside, inside - 1)
        places.add((inside, accepted[-1]))
    assert len(places) > 1


def test_streamed_tokens_say_where_they_come_from(speculating):
    events = list(speculating.stream(TEXT, SAMPLINGS[0]))
    completion = events[-1].completion
    assert tuple(t for e in events for t in e.token_ids) == completion.token_ids
    from_draft = [flag for e in events for flag in e.from_draft]
    counts = completion.stats.speculative_decoding
    assert len(from_draft) == len(completion.token_ids)
    for event in events:
        assert "".join(text for text, _ in event.spans) == event.text
    # Drafts and bonus tokens are told apart in the text as well.
    assert {drafted for event in events for _, drafted in event.spans} == {True, False}
    assert sum(from_draft) == counts.num_accepted_draft_tokens > 0
    steps = counts.num_spec_steps  # of the last one, the bonus token may be cut
    assert len(from_draft) - sum(from_draft) in (steps - 1, steps)
    assert counts.num_spec_tokens == internals(speculating).engine.method.num_rows - 1
    assert completion.method == internals(speculating).engine.method.name


def test_swiftspec_with_the_shipped_draft_on_a_device_of_its_own(llm):
    apart = jaxspec.LLM(method="swiftspec", draft_devices=1)
    assert apart.draft_path is not None
    for prompt in (TEXT, CODE):
        for sampling in SAMPLINGS:
            out = apart.generate(prompt, sampling)
            assert out.token_ids == llm.generate(prompt, sampling).token_ids
            assert out.stats.speculative_decoding.num_accepted_draft_tokens > 0
