"""Settings that make no sense are refused by name, before anything is loaded or compiled."""

import dataclasses

import numpy as np
import pytest
from tiny_models import FAMILIES

from jaxspec.cli.options import method_from, method_options
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import Models
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.registry import METHODS, check_draft_given, make_method, method_class, resolve_method
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

PLACEMENT = Placement(FAMILIES["llama"], plan_mesh(1), np.dtype("float32"))


@pytest.mark.parametrize(
    ("method", "settings", "word"),
    [
        (SpecExec, {"num_draft_tokens": 0}, "num_draft_tokens"),
        (SpecExec, {"num_draft_tokens": 4097}, "num_draft_tokens must be at most 4096"),
        (SpecExec, {"num_draft_tokens": 8.0}, "num_draft_tokens"),
        (SpecExec, {"num_draft_tokens": True}, "num_draft_tokens"),
        (SpecExec, {"width": 0}, "width"),
        (SpecExec, {"branch": -1}, "branch"),
        (SpecExec, {"depth": 4097}, "depth must be at most 4096"),
        (SpecExec, {"width": 100_000, "depth": 30}, "draft tree of 2900001 rows, at most 16384"),
        (SpecExec, {"ranking": 0.7}, "ranking must be 'noise' or 'probability' or 'sampling', got 0.7"),
        (SwiftSpec, {"ranking": "best"}, "ranking"),
        (SpecExec, {"decay": 0.0}, "decay"),
        (SpecExec, {"decay": 1.01}, "decay"),
        (SpecExec, {"min_probability": -0.1}, "min_probability"),
        (SpecExec, {"min_probability": float("nan")}, "min_probability"),
        (Chain, {"num_draft_tokens": 0}, "num_draft_tokens"),
        (Chain, {"num_draft_tokens": 65}, "num_draft_tokens must be at most 64"),
        (Chain, {"rule": "typical"}, "rule"),
        (Chain, {"min_probability": 1.5}, "min_probability"),
        (SpecInfer, {"expansion": ()}, "expansion"),
        (SpecInfer, {"expansion": "221"}, "expansion"),
        (SpecInfer, {"expansion": (2, 0)}, "every entry of expansion must be at least 1"),
        (SpecInfer, {"expansion": (2**62, 2)}, "at most 1024"),
        (SpecInfer, {"expansion": (32, 32)}, "1056 tokens, at most 1024"),
        (SpecInfer, {"replacement": 1}, "replacement"),
        (PromptLookup, {"num_draft_tokens": 0}, "num_draft_tokens"),
        (PromptLookup, {"ngram": 0}, "ngram"),
        (PromptLookup, {"candidates": 65}, "candidates must be at most 64"),
        (PromptLookup, {"length": "15"}, "length"),
        (Swift, {"siblings": 5}, "siblings must be a list of numbers, got 5"),
        (Swift, {"siblings": "1234"}, "siblings must be a list of numbers"),
        (Swift, {"adaptive": 1}, "adaptive must be true or false"),
        (Auto, {"pass_cost": 3}, "pass_cost must be a list of numbers, got 3"),
        (SpecInfer, {"expansion": [2] * 5000}, "at most 1000 numbers, got 5000"),
        (SpecInfer, {"expansion": (1000,) * 900}, "expansion"),
        (PromptLookup, {"adaptive": "no"}, "adaptive"),
    ],
)
def test_out_of_range(method, settings, word):
    with pytest.raises(ConfigError, match=word):
        method(**settings)


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("specxec", {}, "unknown method 'specxec'; did you mean 'specexec'"),
        ("swfit", {}, "did you mean 'swift'"),
        ("ar", {"num_draft_tokens": 4}, "'ar' has no setting 'num_draft_tokens'; known: steps_per_dispatch"),
        ("specexec", {"num_draft_token": 4}, "no setting 'num_draft_token'; did you mean 'num_draft_tokens'"),
        # Children picked by rank under a ratio of probabilities would be wrong in law: there is no such combination.
        ("specexec", {"rule": "rejection"}, "no setting 'rule'"),
        ("lookup", {"rule": "rejection"}, "no setting 'rule'"),
    ],
)
def test_unknown_words(name, settings, word):
    with pytest.raises(ConfigError, match=word):
        make_method(name, settings)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "ar"}, "--swift-layers is for method swift, not ar"),
        ({}, "--swift-layers is for method swift, not auto"),
        ({"method": "swift", "layers_file": "b.json"}, "both name a file"),
        ({"method": "swift", "layers": "none"}, "leave out layers_file"),
    ],
)
def test_a_file_of_layers_where_there_is_no_use_for_it(options, word):
    with pytest.raises(ConfigError, match=word):
        method_from({"swift_layers": "a.json", **options})


def test_numbers_of_numpy():
    assert SpecExec(np.int64(4)).num_draft_tokens == 4
    assert Chain(min_probability=np.float32(0.5)).min_probability == 0.5


def test_auto():
    assert make_method("auto") == Auto()


def test_settings_reach_the_method():
    for name in METHODS:
        for field in dataclasses.fields(method_class(name)):
            changed = {
                "search": "paper", "num_draft_tokens": 40,
                "rule": "rejection", "ranking": "sampling", "expansion": (1, 2), "decay": 0.5,
                "min_probability": 0.25, "replacement": False, "pass_cost": (1.0, 2.0), "ratio": 0.3,
                "threshold": 0.5, "siblings": (1, 2, 3, 4), "layers": "none", "context": "first", "max_score": 0.5,
                "share": 0.01, "programs": "each", "task": "code", "layers_file": "layers.json",
            }.get(field.name, not field.default if isinstance(field.default, bool) else 3)  # fmt: skip
            assert getattr(make_method(name, {field.name: changed}), field.name) == changed


def test_the_command_line_knows_all_settings_with_their_types():
    known = method_options()
    assert {"num_draft_tokens", "expansion", "pass_cost"} <= set(known)
    assert (known["num_draft_tokens"], known["expansion"]) == ((int,), (list,))
    assert (known["decay"], known["rule"], known["adaptive"]) == ((int, float), (str,), (bool,))


@pytest.mark.parametrize("method", [Chain, 5, None, object()])
def test_what_is_no_method(method):
    with pytest.raises(ConfigError, match="method must be a name or a method object"):
        resolve_method(method)


def test_drafts_given_and_missing():
    for method in map(method_class, METHODS):
        for given in (False, True):
            if method.needs_draft <= given <= method.drafts:
                check_draft_given(method(), given)
            else:
                with pytest.raises(ConfigError, match=method.name):
                    check_draft_given(method(), given)


@pytest.mark.parametrize(
    ("method", "word"),
    [
        (SpecExec(200, branch=102), "branch 102 exceeds the 101 tokens"),
        (SpecInfer((102, 1)), "expansion 102 exceeds the 101 tokens"),
        (SpecExec(4), "needs a draft model"),
        (Chain(), "needs a draft model"),
        (SpecInfer(), "needs a draft model"),
    ],
)
def test_what_does_not_fit_the_models(method, word):
    draft = None if "needs" in word else PLACEMENT
    with pytest.raises(ConfigError, match=word):
        Engine(Models(PLACEMENT, draft), method)


def test_shapes():
    """bs, P and w, of which the caches' room and the counters follow."""
    for method, shape in (
        (Autoregressive(), (1, 1, 0)),
        (Chain(5), (6, 6, 1)),
        (SpecExec(1), (2, 2, 1)),
        (SpecExec(1024), (1025, 33, 64)),
        (SpecExec(16, width=5, depth=3), (17, 4, 5)),
        (SpecInfer((3, 2, 1)), (16, 4, 6)),
        (PromptLookup(7), (8, 8, 0)),
        (PromptLookup(31, length=4), (32, 5, 0)),
    ):
        assert (method.num_rows, method.max_path, method.draft_rows) == shape, method
