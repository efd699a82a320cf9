"""Every setting is checked before anything is computed, and the message names the value."""

import math

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.auto import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.registry import check_draft_given, resolve_method


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "at least 1, got 0"),
        ("max_tokens", 2.0, "integer, got 2.0"),
        ("max_tokens", True, "integer, got True"),
        ("temperature", -0.1, "between 0.0 and inf, got -0.1"),
        ("temperature", math.nan, "got nan"),
        ("temperature", math.inf, "got inf"),
        ("temperature", "hot", "must be a number, got 'hot'"),
        ("top_k", -2, "at least -1, got -2"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.01, "between 0.0 and 1.0, got 1.01"),
        ("min_p", 2, "between 0.0 and 1.0, got 2"),
        ("repetition_penalty", 0.0, "above 0"),
        ("frequency_penalty", 2.5, "between -2.0 and 2.0"),
        ("presence_penalty", -2.5, "between -2.0 and 2.0"),
        ("logit_bias", {-1: 1.0}, "at least 0, got -1"),
        ("logit_bias", {1: math.nan}, "got nan"),
        ("logit_bias", {1: math.inf}, "got inf"),
        ("stop", "", "non-empty"),
        ("stop", ["a", 3], "non-empty strings"),
        ("stop", 5, "non-empty strings"),
        ("stop", b"x", "non-empty strings"),
        ("logit_bias", [1], "must map token ids"),
        ("logit_bias", {5: True}, "number below"),
        ("temperature", 10**400, "between"),
        ("seed", -1, "at least 0"),
        ("seed", 2**63, "below 2\\*\\*63"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", 21, "at most 20, got 21"),
        ("logprobs", -1, "at least 0, got -1"),
        ("logprobs", "yes", "integer, got 'yes'"),
        ("stop_token_ids", [-1], "at least 0, got -1"),
        ("stop_token_ids", "2", "list of token ids"),
        ("stop_token_ids", {2: 1}, "list of token ids"),
        ("stop_token_ids", 2, "list of token ids"),
        ("min_tokens", -1, "at least 0, got -1"),
        ("min_tokens", None, "integer, got None"),
        ("n", 0, "at least 1, got 0"),
        ("n", 2, "n is 2 and temperature 0"),
    ],
)
def test_bad_sampling_parameters(field, value, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**{field: value})


def test_the_least_length_is_within_the_most():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(ConfigError, match="min_tokens 6 exceeds max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(("given", "wanted", "top"), [(None, 0, 0), (False, 0, 0), (True, 1, 0), (0, 1, 0), (5, 1, 5)])
def test_log_probabilities_of_the_chosen_token_and_of_others(given, wanted, top):
    sampling = SamplingParams(logprobs=given)
    assert (sampling.wants_logprobs, sampling.num_logprobs) == (bool(wanted), top)


def test_stop_tokens_become_a_tuple():
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    assert SamplingParams().stop_token_ids == ()


def test_numbers_of_numpy_are_numbers():
    sampling = SamplingParams(
        max_tokens=np.int64(5), seed=np.uint32(3), temperature=np.float32(0.5), logit_bias={np.int64(2): np.float32(1)}
    )
    assert sampling == SamplingParams(max_tokens=5, seed=3, temperature=0.5, logit_bias={2: 1.0})
    assert type(sampling.max_tokens) is int and type(sampling.temperature) is float


def test_stop_is_one_string_or_several():
    assert SamplingParams().stop == SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop == ("x", "yz")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "int3", "'int3' is not supported"),
        ("target_devices", 0, "at least 1"),
        ("draft_platform", "", "must be a name"),
        ("max_context", 1, "at least 2"),
    ],
)
def test_bad_engine_settings(field, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{field: value})


def test_methods_by_name():
    assert resolve_method("auto") == Auto()
    assert resolve_method(Autoregressive()) == Autoregressive()
    with pytest.raises(ConfigError, match="unknown method 'specexe'; did you mean 'specexec'"):
        resolve_method("specexe")
    for wrong in (Autoregressive, 3, None):
        with pytest.raises(ConfigError, match="a name or a method object"):
            resolve_method(wrong)
    with pytest.raises(ConfigError, match="'ar' uses no draft"):
        check_draft_given(resolve_method("ar"), has_draft=True)
