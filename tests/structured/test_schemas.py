"""A collection of JSON schemas: answers under those that are supported are valid, the others are refused by name."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from test_grammar import GRAMMARS, TOKENIZER, allowed

from jaxspec import ConfigError, StructuredOutputs

# Of dates and times, RFC 3339 allows more than Python reads: the year 0, offsets.
FORMATS = jsonschema.FormatChecker(("uuid", "ipv4"))
SHORT = {"type": "string", "maxLength": 6}
LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}


def record(required=None, **properties):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TREE = {
    "$defs": {"node": record(["value"], value={"type": "integer", "minimum": 0, "maximum": 9},
                             next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    "$ref": "#/$defs/node",
}  # fmt: skip
SUPPORTED = [
    {"type": "null"}, {"type": "boolean"}, SHORT, LIST, TREE, {"const": 3}, {"const": "a\"b"}, {"const": None},
    {"const": {"a": [1, {"b": False}]}}, {"enum": ["red", "green", 3, None, 1.5]}, {"enum": [[1, 2], {"k": "v"}]},
    {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-f]{2}[0-9]{1,3}$"}, {"type": "string", "pattern": "^(yes|no)$"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "time"}, {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date-time"}, {"type": "string", "format": "ipv4"},
    {"type": "integer", "minimum": -5, "maximum": 5}, {"type": "integer", "minimum": 100, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 0, "maximum": 50, "multipleOf": 7}, {"type": ["integer", "null"], "maximum": 9,
                                                                         "minimum": 0},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": -2, "maximum": -1},
    {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5}, {"type": ["boolean", "null"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": LIST, "maxItems": 2}, record(a=SHORT), record(a=SHORT, b=LIST), record(),
    record([], a=SHORT, b={"type": "null"}), record(["b"], a=SHORT, b={"type": "boolean"}, c={"type": "null"}),
    record(a=record(b=record(c={"const": 1}))), record(**{"a b": SHORT, 'q"': {"type": "null"}}),
    record(name=SHORT, tags={"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}),
    record(kind={"const": "circle"}, r={"type": "number", "minimum": 0, "maximum": 10}),
    {"anyOf": [{"type": "boolean"}, {"const": "unknown"}]}, {"anyOf": [record(a=SHORT), record(b=LIST)]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [record(kind={"const": "a"}, x={"type": "null"}), record(kind={"const": "b"}, y={"type": "boolean"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"allOf": [record(["a"], a={"type": "integer"}), {"properties": {"a": {"minimum": 1, "maximum": 4}}}]},
    {"$defs": {"s": SHORT}, "type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2},
    {"definitions": {"s": {"type": "boolean"}}, **record(a={"$ref": "#/definitions/s"})},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}, "additionalProperties": False,
     "maxProperties": 2},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
    {"title": "described", "description": "text", "default": 1, "examples": [1], "type": "integer", "minimum": 0,
     "maximum": 1},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"],
     "additionalProperties": {"type": "boolean"}},
    {"x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}, **record(a=LIST)},
    {"type": "string", "enum": ["é", "日本", "\n"]}, {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1,
                                                   "$defs": {"t": {"type": "array", "maxItems": 1}}},
]  # fmt: skip
REFUSED = [
    ({"not": {"type": "string"}}, "not"), ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "contains"), ({"if": {"type": "null"}, "then": {}}, "if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "iri"}, "iri"), ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "integer", "minimum": "a"}, "minimum|a"),
    ({"$ref": "#/$defs/missing"}, "missing"), ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"type": 3}, "type|3"),
    ({"enum": []}, "Unsatisfiable"),
    ({"allOf": [{"type": "null"}, {"type": "string"}]}, "type|null"),
    ({"type": "object", "properties": {"a": SHORT}, "required": ["b"], "maxProperties": 2}, "maxProperties"),
]  # fmt: skip


def draw(schema, seed):
    """An answer of a random model: a token of those that are allowed, likely an end where one is."""
    matcher, rng, tokens = GRAMMARS.match(StructuredOutputs(json=schema)), np.random.default_rng(seed), []
    ends = set(TOKENIZER.eos_ids)
    while not matcher.ended and len(tokens) < 300:
        possible = allowed(matcher.mask())
        assert possible
        stops = possible & ends
        # Quotes and brackets end what is open, and are likely in any text.
        closing = [token for token in possible - ends if TOKENIZER.token_bytes(token)[:1] in (b'"', b"}", b"]")]
        choice = sorted(
            stops if stops and rng.random() < 0.5 else closing if closing and rng.random() < 0.3 else possible
        )
        token = int(rng.choice(choice)) if seed else choice[0]
        matcher.take([token])
        tokens.append(token)
    return b"".join(map(TOKENIZER.token_bytes, tokens[:-1])).decode() if matcher.ended else None


@pytest.mark.parametrize("schema", SUPPORTED, ids=lambda schema: json.dumps(schema)[:50])
def test_answers_under_a_supported_schema_are_valid(schema):
    ended = 0
    for seed in range(10):
        text = draw(schema, seed)
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
    assert ended >= 5


@pytest.mark.parametrize("schema, message", REFUSED, ids=lambda value: str(value)[:50])
def test_a_schema_that_is_not_supported_is_refused_by_name(schema, message):
    with pytest.raises(ConfigError, match=message):
        GRAMMARS.match(StructuredOutputs(json=schema))


@pytest.mark.thorough
def test_schemas_of_the_standards_test_suite():
    """Schemas of draft 2020-12 that JSON Schema's own test suite names: ten valid answers each, or a refusal."""
    valid, refused = 0, []
    for line in (Path(__file__).parents[1] / "data" / "json_schemas.jsonl").read_text().splitlines():
        schema = json.loads(line)
        try:
            texts = [draw(schema, seed) for seed in range(10)]
        except ConfigError as error:
            refused.append(str(error))
            continue
        valid += any(text is not None for text in texts)
        for text in filter(None, texts):
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    assert valid >= 150 and valid + len(refused) == 344
    assert all("structured_outputs are not supported or malformed: " in error for error in refused)
