"""Every setting is checked before anything is computed, and the message names the value."""

import functools
import math

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import ConfigError, shown
from jaxspec.llm import LLM
from jaxspec.methods.swift.settings import Swift
from jaxspec.one_call import generate


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 2.0, "integer, got 2.0"),
        ("temperature", -0.1, "must be at least 0, got -0.1"),
        ("temperature", math.inf, "largest float32, got inf"),
        ("top_k", -2, "at least -1, got -2"),
        ("top_p", 0.0, "above 0"),
        ("frequency_penalty", 2.5, "between -2 and 2"),
        ("logit_bias", {-1: 1.0}, "at least 0, got -1"),
        ("stop", "", "non-empty"),
        ("stop", ["a", 3], "non-empty strings"),
        ("logit_bias", [1], "must map token ids"),
        ("temperature", 10**400, "at most 3.403e\\+38"),
        ("seed", 2**63, "below 2\\*\\*63"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", 21, "at most 20, got 21"),
        ("stop_token_ids", [-1], "at least 0, got -1"),
        ("stop_token_ids", "2", "list of token ids"),
        ("min_tokens", -1, "at least 0, got -1"),
        ("max_tokens", 2**31, "max_tokens must be at most 1073741824, got 2147483648"),
        ("stop_token_ids", [2**31], "at most 2147483647"),
        ("temperature", 1e308, "at most 3.403e\\+38, the largest float32, got 1e\\+308"),
        ("logit_bias", {1: -1e308}, "-inf bans a token"),
        ("n", 2, "n is 2 and temperature 0"),
    ],
)
def test_bad_sampling_parameters(field, value, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**{field: value})


def test_numbers_too_long_to_be_printed():
    """Python refuses to write integers of more than 4,300 digits."""
    long = 10**5000
    for field, value in (("max_tokens", long), ("seed", long), ("logit_bias", {long: 1}), ("stop", long), ("n", -long)):
        with pytest.raises(ConfigError, match=field):
            SamplingParams(**{field: value})
    for settings in ({"ratio": long}, {"share": long}, {"steps": long}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Swift(**settings)


def test_the_least_length_is_within_the_most():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(ConfigError, match="min_tokens 6 exceeds max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(("given", "wanted", "top"), [(None, 0, 0), (False, 0, 0), (True, 1, 0), (0, 1, 0), (5, 1, 5)])
def test_log_probabilities_of_the_chosen_token_and_of_others(given, wanted, top):
    sampling = SamplingParams(logprobs=given)
    assert (sampling.wants_logprobs, sampling.num_logprobs) == (bool(wanted), top)


def test_numbers_of_numpy_are_numbers():
    sampling = SamplingParams(
        max_tokens=np.int64(5), seed=np.uint32(3), temperature=np.float32(0.5), logit_bias={np.int64(2): np.float32(1)}
    )
    assert sampling == SamplingParams(max_tokens=5, seed=3, temperature=0.5, logit_bias={2: 1.0})
    assert type(sampling.max_tokens) is int and type(sampling.temperature) is float


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "int3", "'int3' is not supported"),
        ("max_context", 1, "at least 2"),
        ("target_devices", 2**31, "at most 2147483647"),
    ],
)
def test_bad_engine_settings(field, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "", 5, b"x", ["x"]])
@pytest.mark.parametrize("role", ["model", "draft"])
def test_paths_that_no_system_has(role, path):
    with pytest.raises(ConfigError, match=role):
        LLM(**{role: path})


class Unprintable:
    def __repr__(self):
        raise RuntimeError


def test_messages_are_one_printable_line_that_never_fails():
    assert str(ConfigError("a\n\tb \x1b[3m \ud800 é")) == "a b \\x1b[3m \\ud800 é"
    assert str(ConfigError("x" * 5000)) == "x" * 1000 + " ... (5000 characters)"
    assert shown(Unprintable()) == "a value of type Unprintable"
    assert len(shown([1] * 1000)) == 80


@pytest.mark.parametrize(
    ("call", "keyword", "message"),
    [
        (LLM, "tensor_parallel_size", "use 'target_devices'"),
        (LLM, "max_model_len", "use 'max_context'"),
        (LLM, "kv_cache_dtype", "use 'kv_dtype'"),
        (LLM, "speculative_model", "use 'draft'"),
        (LLM, "max_new_tokens", "'max_tokens' belongs to SamplingParams"),
        (LLM, "num_speculative_tokens", r"method=SpecExec\(num_draft_tokens=...\)"),
        (LLM, "speculative_config", "use method, draft_model and num_draft_tokens"),
        (LLM, "max_contxt", "did you mean 'max_context'"),
        (SamplingParams, "max_new_tokens", "use 'max_tokens'"),
        (SamplingParams, "do_sample", "give a temperature above 0"),
        (SamplingParams, "dtype", "'dtype' belongs to LLM"),
        (functools.partial(generate, "hi"), "tensor_parallel_size", "LLM has no option"),
    ],
)
def test_names_of_other_projects_are_answered(call, keyword, message):
    with pytest.raises(TypeError, match=message):
        call(**{keyword: 2})
