"""Every public field, with values of every type, range and size: it takes them or refuses them in one line."""

import dataclasses
import decimal
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import JaxspecError
from jaxspec.methods.registry import METHODS, method_class

SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=0, max_value=70),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, -(2**31) - 1, 10**400]),
    st.floats(),
    st.floats(min_value=0, max_value=2),
    st.sampled_from([1e308, 5e-324, np.float32(0.1), np.int64(3), np.bool_(True), np.float64("nan")]),
    st.complex_numbers(),
    st.decimals() | st.fractions(),
    st.text(st.characters()),
    st.text(st.sampled_from("a\0\n\x1b\ud800")),
    st.binary(),
    st.sampled_from([object(), type, len, ..., np.array([1.0, 2.0]), np.zeros((0,)), decimal.Decimal("sNaN")]),
)
SMALL = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none())
ANYTHING = st.one_of(
    SIMPLE,
    st.lists(SIMPLE, max_size=4),
    st.lists(SMALL, max_size=40).map(tuple),
    st.dictionaries(SMALL, SIMPLE, max_size=4),
    st.sets(SMALL, max_size=4) | st.frozensets(SMALL, max_size=4),
    st.integers(0, 10**12).map(range),
)
CLASSES = {"SamplingParams": SamplingParams, "EngineConfig": EngineConfig} | {
    name: method_class(name) for name in METHODS
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CLASSES)
def test_a_field_takes_a_value_or_refuses_it_in_one_line(name):
    cls = CLASSES[name]
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    if not fields:
        pytest.skip(f"{name} has no settings")

    @settings(max_examples=250, derandomize=True, deadline=None, database=None)
    @given(st.dictionaries(st.sampled_from(fields), ANYTHING, min_size=1, max_size=2))
    def check(values):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                made = cls(**values)
            except JaxspecError as error:
                message = str(error)
                assert message.isprintable() and 0 < len(message) < 1000
                assert any(field in message for field in values), "the message names the field"
            else:
                assert dataclasses.replace(made) is not None and isinstance(repr(made), str)

    check()
