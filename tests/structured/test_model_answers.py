"""The default model's own answers under JSON schemas: what ends by itself is valid, greedy and sampled."""

import json
from pathlib import Path

import jsonschema
import pytest
from test_schemas import FORMATS, SUPPORTED

from jaxspec import ConfigError, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.real_model


def count_valid(llm, schema, temperature, **options):
    """1 if the answer ended and is valid, 0 if it was cut off."""
    shape = StructuredOutputs(json=schema)
    sampling = SamplingParams(max_tokens=96, temperature=temperature, seed=3, structured_outputs=shape)
    answer = llm.chat([{"role": "user", "content": "Give me an example as JSON."}], sampling)
    if answer.finish_reason == "length":
        return 0
    jsonschema.validate(json.loads(answer.text), schema, **options)
    return 1


@pytest.mark.thorough
@pytest.mark.parametrize("part", [slice(0, None, 20), pytest.param(slice(None), marks=pytest.mark.slow)], ids=str)
def test_answers_are_valid(llm, part):
    schemas = SUPPORTED[part]
    valid = sum(count_valid(llm, one, t, format_checker=FORMATS) for one in schemas for t in (0.0, 1.0))
    assert valid >= 1.8 * len(schemas)  # numbers and texts without a bound may go on to the limit


@pytest.mark.slow
def test_answers_under_the_standards_test_suite(llm):
    lines = (Path(__file__).parents[1] / "data" / "json_schemas.jsonl").read_text().splitlines()
    valid = supported = 0
    for schema in map(json.loads, lines):
        try:
            found = [count_valid(llm, schema, t, cls=jsonschema.Draft202012Validator) for t in (0.0, 1.0)]
        except ConfigError:
            continue
        supported, valid = supported + 1, valid + sum(found)
    assert supported >= 150 and valid >= 1.7 * supported
