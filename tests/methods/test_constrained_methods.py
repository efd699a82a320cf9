"""Constraints end to end in the engine: each method's text is plain decoding's, and matches its shape."""

import functools
import json

import jax
import jsonschema
import numpy as np
import pytest
import swiftspec_cases
from byte_tokenizer import BytesTokenizer
from marks import fast_part, quick_part
from method_cases import (
    LARGE_REJECTION,
    LLAMA_AUTO,
    LLAMA_CHAIN,
    LLAMA_LOOKUP,
    LLAMA_SPECEXEC,
    LLAMA_SPECINFER,
    PROMPT,
    SMALL_TP4,
    Case,
    engine_of,
    forget_drafts,
    params_of,
)
from test_draft_cache import assert_prefix
from tiny_pairs import VOCAB

from jaxspec import Autoregressive, SamplingParams, StructuredOutputs
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.structured.grammar import Grammars

TOKENIZER = BytesTokenizer(["true", '": ', "name", ", "], range(32, 127))
GRAMMARS = Grammars(TOKENIZER, VOCAB, TOKENIZER.eos_ids)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["first", "second"]}, "maxItems": 2},
        "known": {"type": "boolean"},
    },
    "required": ["name", "tags", "known"],
    "additionalProperties": False,
}
SAMPLINGS = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 2}]
FED_AUTO = Case("llama", 1, "fed", Auto(draft_cost=1e-3))
METHODS = [LLAMA_SPECEXEC, LLAMA_CHAIN, LLAMA_LOOKUP, LLAMA_AUTO, SMALL_TP4, FED_AUTO, LARGE_REJECTION]
METHODS += [LLAMA_SPECINFER, Case("llama", 1, "same", SwiftSpec()), Case("llama", 1, "none", Swift())]


def plain_case(case):
    rows_of = {"small": "small", "large": "large"}
    return Case(case.family, case.degree, rows_of.get(case.geometry, "none"), Autoregressive())


@functools.cache
def decode(case, draft, number):
    return decode_on(engine_of(case), params_of(case, draft), number)


def decode_on(engine, params, number, prompt=tuple(PROMPT), most=90):
    """Tokens up to the end, and the matcher's counts."""
    sampling = SamplingParams(
        max_tokens=most,
        seed=5,
        stop_token_ids=TOKENIZER.eos_ids,
        structured_outputs=StructuredOutputs(json=json.dumps(SCHEMA)),
        **SAMPLINGS[number],
    )
    engine.check_request(prompt, sampling)
    engine.prepare(len(prompt) + most, sampling)
    matcher, tokens = GRAMMARS.match(sampling.structured_outputs), []
    with engine.open(params, prompt, sampling, 5, matcher) as session:
        while not session.done and not set(tokens) & set(TOKENIZER.eos_ids):
            tokens += session.step().tokens
    ends = [place for place, token in enumerate(tokens) if token in TOKENIZER.eos_ids]
    return tuple(tokens[: ends[0]] if ends else tokens), matcher.num_forced


# Each method; with several draft models a tree, a chain and the default.
FAST = (LLAMA_SPECEXEC, LLAMA_LOOKUP, FED_AUTO, LARGE_REJECTION, *METHODS[-3:])


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
@pytest.mark.parametrize(
    "case",
    quick_part(fast_part(METHODS, lambda case: case in FAST), lambda case: case.method.name == "specexec"),
    ids=lambda case: f"{case.method.name}-{case.geometry}",
)
def test_a_text_under_a_constraint_is_that_of_plain_decoding(case, number):
    expected, forced = decode(plain_case(case), "none", number)
    text = b"".join(map(TOKENIZER.token_bytes, expected)).decode()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert forced > 20  # most of it follows from the schema
    for draft in ("copy", "random"):
        assert decode(case, draft, number) == (expected, forced)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    fast_part([swiftspec_cases.BASIC, swiftspec_cases.ADAPTIVE], lambda case: case is swiftspec_cases.BASIC),
    ids=swiftspec_cases.case_id,
)
@pytest.mark.parametrize("draft", ["copy", "random"])
def test_a_draft_on_devices_of_its_own(case, draft):
    found = decode_on(swiftspec_cases.engine_of(case), swiftspec_cases.params_of(case, draft), 1)
    assert found == decode(Case(case.family, 1, "none", Autoregressive()), "none", 1)


@pytest.mark.parametrize("case", [FED_AUTO, pytest.param(LLAMA_AUTO, marks=pytest.mark.thorough)])
def test_the_next_turn_finds_the_draft_of_a_cold_run(case, monkeypatch):
    """The draft of the next round has taken in what the last one verified, once."""
    engine, params = engine_of(case), params_of(case, "copy")
    forget_drafts(case)
    monkeypatch.setattr(engine, "session_memory", None)
    monkeypatch.setattr(engine.runner, "worth_taking", lambda *_: 0.0)
    answer, _ = decode_on(engine, params, 0, most=30)
    prompt, found = [*PROMPT, *answer, *PROMPT[:3]], []
    for cached in (len(PROMPT) + len(answer) - 3, 0):
        with engine.open(params, prompt, SamplingParams(max_tokens=24), 1) as session:
            assert session.num_cached >= cached and bool(session.num_cached) == bool(cached)
            tokens = [token for _ in range(8) for token in session.step().tokens]
            cache = jax.tree.map(np.array, session._state.draft.sequence.cache)
        found.append((tokens, cache))
        monkeypatch.setattr(engine, "session_memory", 0)
    (warm, one), (cold, other) = found
    rows = min(int(one.length), int(other.length))
    assert rows > len(prompt) and warm[:8] == cold[:8]
    assert_prefix(one, other, rows)


@pytest.mark.thorough
def test_other_requests_before_and_after_keep_their_tokens_and_programs(compilations):
    """An unconstrained request compiles nothing more, and as many of its dispatches are in flight as before."""
    engine, params = engine_of(LLAMA_AUTO), params_of(LLAMA_AUTO)

    def plain():
        tokens, in_flight = [], []
        with engine.open(params, PROMPT, SamplingParams(max_tokens=40), 0) as session:
            while not session.done:
                tokens += session.step().tokens
                in_flight.append(len(session._in_flight))
        # Which rounds share a dispatch depends on what earlier texts taught.
        return tokens, max(in_flight)

    first = plain()
    before = len(engine.runner.programs)
    decode(LLAMA_AUTO, "copy", 0)
    found = len(compilations)
    assert plain() == first
    assert len(engine.runner.programs) == before == engine.num_programs
    assert len(compilations) == found
