"""A draft's attention sees as many positions as a setting says, where the draft is a model of its own."""

import dataclasses

import pytest
from make import tiny_config

from jaxspec.checkpoint.load import Weights
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.loading import OpenModels
from jaxspec.models.features import FeatureConfig


def weights(cfg, **changes):
    return Weights("nowhere", cfg, (), "float32", None, None, "digest", **changes)


TARGET = weights(tiny_config())


@pytest.mark.parametrize(("own", "given", "seen"), [(None, 8, 8), (4, 8, 4), (16, 8, 8), (None, None, None)])
def test_the_smaller_window_holds(own, given, seen):
    opened = OpenModels(TARGET, weights(tiny_config("mistral", sliding_window=own)))
    limited = opened.limit_draft(given)
    assert limited.draft.config.sliding_window == seen and limited.target is TARGET


def test_drafts_that_have_no_such_window():
    fed = FeatureConfig(64, layers=(1,), kind="block", block=4, own_head=False)
    block = weights(tiny_config(num_layers=1, features=fed, shares_embedding=True, tied=False))
    for draft, problem in (
        (None, "here is none of its own"),
        (weights(tiny_config(), layers="none"), "here is none of its own"),
        (block, "not for drafts that fill blocks"),
        (weights(tiny_config("gemma2")), "whose layers are alike"),
    ):
        with pytest.raises(ConfigError, match=problem):
            OpenModels(TARGET, draft).limit_draft(8)


def test_the_setting_is_a_positive_number():
    assert EngineConfig(draft_window=256).draft_window == 256
    for bad in (0, 1.5, "many", True):
        with pytest.raises(ConfigError, match="draft_window"):
            EngineConfig(draft_window=bad)
    assert dataclasses.asdict(EngineConfig())["draft_window"] is None
