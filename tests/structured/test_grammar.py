"""Shapes of answers: what is compiled, what is refused, and how long that takes."""

import json
import sys
import threading
import time

import numpy as np
import pytest
from byte_tokenizer import BytesTokenizer

from jaxspec import ConfigError, SamplingParams, StructuredOutputs
from jaxspec.structured import grammar
from jaxspec.structured.grammar import MOST_CHARACTERS, Grammars, read_schema

TOKENIZER = BytesTokenizer(["true", "false", '{"', '"', '": ', "name", "ab", "abc", ", "])
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size + 5, TOKENIZER.eos_ids)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "adult": {"type": "boolean"}},
    "required": ["name", "adult"],
    "additionalProperties": False,
}


def allowed(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def take_text(matcher, text):
    matcher.take(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    "shape, good, bad",
    [
        ({"json": PERSON}, '{"name": "ab", "adult": true}', '{"adult"'),
        ({"json": json.dumps(PERSON)}, '{"name": "", "adult": false}', '{"name": 1'),
        ({"json_object": True}, '{"x": [1, 2, {}]}', "[1]"),
        ({"regex": "[0-9]{3}-[a-c]"}, "123-b", "12a"),
        ({"choice": ["yes", 'n"o\n']}, 'n"o\n', "maybe"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "aacbb", "aab"),
    ],
)
def test_a_shape_takes_what_matches_it_and_then_only_ends(shape, good, bad):
    matcher = GRAMMARS.match(StructuredOutputs(**shape))
    take_text(matcher, good)
    assert set(TOKENIZER.eos_ids) <= allowed(matcher.mask())
    matcher.take([TOKENIZER.eos_ids[0], 5])  # what follows an end does not count
    assert matcher.ended and allowed(matcher.mask()) == set(TOKENIZER.eos_ids)
    with pytest.raises(ConfigError, match="allow no token"):
        take_text(GRAMMARS.match(StructuredOutputs(**shape)), bad)


def test_a_shape_is_compiled_once_and_matchers_do_not_share_state():
    one, other = (GRAMMARS.match(StructuredOutputs(choice=["ab", "abc"])) for _ in range(2))
    take_text(one, "ab")
    assert not set(TOKENIZER.eos_ids) & allowed(other.mask())
    start = time.perf_counter()
    for _ in range(100):
        GRAMMARS.match(StructuredOutputs(choice=["ab", "abc"]))
    assert len(GRAMMARS._compiled) <= 10 and time.perf_counter() - start < 5


def test_forced_tokens_are_the_tokenizers_own_and_the_only_ones_allowed():
    matcher = GRAMMARS.match(StructuredOutputs(json=PERSON))
    chain = matcher.chain(16)
    assert chain and chain == matcher.chain(16)[: len(chain)]
    for token in chain:
        assert allowed(matcher.mask()) == {token}
        matcher.take([token])
    assert matcher.num_forced == len(chain) == matcher.num_taken
    text = b"".join(map(TOKENIZER.token_bytes, chain)).decode()
    assert '{"name": "'.startswith(text)


def test_masks_of_a_tree_are_those_of_each_nodes_path():
    matcher = GRAMMARS.match(StructuredOutputs(json=PERSON))
    take_text(matcher, '{"name": "')
    random = np.random.default_rng(0)
    for _ in range(50):
        rows = 12
        token = random.choice([*TOKENIZER.encode('ab"e, '), *TOKENIZER.eos_ids, 1], rows).astype(np.int32)
        parent = np.array([0, *(random.integers(0, row) for row in range(1, rows - 2)), rows - 2, rows - 1], np.int32)
        masks = matcher.masks(token, parent, TOKENIZER.vocab_size + 64)
        for row in range(rows):
            path, at = [], row
            while parent[at] != at:
                path, at = [int(token[at]), *path], int(parent[at])
            fresh = GRAMMARS.match(StructuredOutputs(json=PERSON))
            take_text(fresh, '{"name": "')
            try:
                fresh.take(path if at == 0 else [1])
                expected = set() if fresh.ended else allowed(fresh.mask())
            except ConfigError:
                expected = set()
            assert allowed(masks[row]) == expected, (row, path)


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "shape, message",
    [
        ({"json": "{not json"}, "is not JSON"),
        ({"json": "[1]"}, "must be a schema"),
        ({"json": "false"}, "must be a schema"),
        ({"json": {"a": {1, 2}}}, "is not JSON"),
        ({"json": ENDLESS}, "recursive without end"),
        ({"json": CYCLE}, "recursive without end"),
        ({"json": {"$ref": "#"}}, "recursive without end"),
        ({"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "recursive without end"),
        ({"json": nested(2000)}, "nested too deeply|recursion limit"),
        ({"json": "[" * 100_000}, "nested too deeply|not JSON"),
        ({"json": {"enum": ["x" * 50 + str(i) for i in range(90_000)]}}, f"at most {MOST_CHARACTERS} are read"),
        (
            {"json": {"type": "object", "properties": {f"p{i}": {"$ref": "#"} for i in range(30_000)}}},
            "too large|too big",
        ),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
        ({"json": {"$ref": "http://example.com/schema.json"}}, "not present"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "start: start"}, "no text matches"),
        ({"choice": ["x" * 2_000_000]}, f"at most {MOST_CHARACTERS} are read"),
    ],
)
def test_what_is_malformed_or_not_supported_is_refused_by_name(shape, message):
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=message):
        GRAMMARS.match(StructuredOutputs(**shape))
    assert time.perf_counter() - start < 20  # a bound for a busy machine; it takes two seconds at most


def doubled(rule, last, count=40):
    """Each definition needs the next one twice: 2^count paths lead to the last."""
    both = {f"a{i}": {rule: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(count)}
    return {"$defs": both | {f"a{count}": last}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("rule", ["allOf", "anyOf"])
def test_references_are_followed_once(rule):
    """Otherwise this test does not end."""
    read_schema(doubled(rule, {"type": "string"}))
    with pytest.raises(ConfigError, match="without end"):
        read_schema(doubled(rule, {"$ref": "#/$defs/a0"}))
    # A way out that is found last, after references that were inside themselves at first.
    out = {"anyOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/a1"}, {"type": "null"}]}
    read_schema(doubled(rule, out))


def test_following_references_is_bounded(monkeypatch):
    monkeypatch.setattr(grammar, "MOST_STEPS", 100)
    with pytest.raises(ConfigError, match="too many references"):
        read_schema(doubled("allOf", {"type": "string"}, 200))


def test_a_slow_shape_delays_no_other(monkeypatch):
    """And is compiled by one thread, though two ask for it."""
    grammars, compile_, slow = Grammars(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_ids), grammar._compile, []
    entered, go_on = threading.Event(), threading.Event()

    def compile_slowly(tokens, source):
        if "slow" in source:
            slow.append(source)
            entered.set()
            assert go_on.wait(60)
        return compile_(tokens, source)

    monkeypatch.setattr(grammar, "_compile", compile_slowly)
    threads = [threading.Thread(target=grammars.match, args=[StructuredOutputs(regex="slow")]) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    grammars.match(StructuredOutputs(regex="quick"))
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(slow) == 1


@pytest.mark.parametrize(
    "limit, shape",
    [
        ("initial_lexer_fuel", {"json": PERSON}),
        ("max_grammar_size", {"json": PERSON}),
        ("max_lexer_states", {"json": PERSON}),
        ("step_lexer_fuel", {"regex": "(.*a.{200}){20}b"}),
    ],
)
def test_time_and_memory_of_a_shape_are_limited(monkeypatch, limit, shape):
    monkeypatch.setitem(grammar.LIMITS, limit, 3)
    with pytest.raises(ConfigError, match="not supported|too complex"):
        matcher = Grammars(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_ids).match(StructuredOutputs(**shape))
        for _ in range(20):
            matcher.take([max(allowed(matcher.mask()))])


@pytest.mark.parametrize("regex", ["(a{1,1000}){1,1000}", "((a|b|ab){1,500}c){500}", "(.*a.{200}){20}b"])
def test_an_expression_that_explodes_ends_with_one_error_or_works(regex):
    start = time.perf_counter()
    try:
        matcher = GRAMMARS.match(StructuredOutputs(regex=regex))
        for _ in range(100):
            tokens = allowed(matcher.mask())
            matcher.take([max(tokens)])
    except ConfigError as error:
        assert "too complex" in str(error) or "not supported" in str(error)
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(
    "values, message",
    [
        ({}, "exactly one of"),
        ({"json": {}, "regex": "a"}, "exactly one of.*json and regex"),
        ({"json": 3}, "json is of the wrong type"),
        ({"regex": 3}, "regex is of the wrong type"),
        ({"choice": "abc"}, "list of texts"),
        ({"choice": [""]}, "list of texts"),
        ({"choice": []}, "list of texts"),
        ({"json_object": "yes"}, "json_object is of the wrong type"),
    ],
)
def test_malformed_fields_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        StructuredOutputs(**values)


def test_sampling_parameters_take_a_dict_and_refuse_what_contradicts_a_shape():
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputs(regex="a")
    for other in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(ConfigError, match=f"{next(iter(other))} does not go with structured_outputs"):
            SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **other)
    with pytest.raises(ConfigError, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs=3)
    with pytest.raises(ConfigError, match="no 'jsn'"):
        SamplingParams(structured_outputs={"jsn": {}})


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxspec-decode\[structured\]'"):
        Grammars(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_ids).match(StructuredOutputs(regex="a"))
    with pytest.raises(ConfigError, match="no.*end-of-sequence|none"):
        monkeypatch.undo()
        Grammars(TOKENIZER, TOKENIZER.vocab_size, ()).match(StructuredOutputs(regex="a"))
