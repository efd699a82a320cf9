"""The public interface: its names, its types, and what is not part of it."""

import dataclasses
import inspect
import json
import os
import typing

import pytest
from marks import quick_part
from native_models import LLAMA, write_model

import jaxspec
from jaxspec.config import EngineConfig, EngineSettings
from jaxspec.methods.auto.costs import AutoChoice
from jaxspec.methods.swift.runner import SwiftChoice
from jaxspec.methods.swiftspec.runner import SwiftSpecChoice
from jaxspec.offload.stream import OffloadStats, StreamCounts
from jaxspec.one_call import ModelOptions
from jaxspec.results import Choice, DraftTreeStats, SpeculationStats
from jaxspec.trace.events import TraceSummary

STATS = (
    jaxspec.DecodeStats, SpeculationStats, DraftTreeStats, Choice, AutoChoice, SwiftChoice, SwiftSpecChoice,
    OffloadStats, TraceSummary,
)  # fmt: skip
SHORT = jaxspec.SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "model"
    write_model(folder, LLAMA)
    return jaxspec.LLM(folder, draft=folder, method="chain")


def test_every_exported_name_is_there():
    assert {"Distributed", "DistributedError", "Stream"} <= set(jaxspec.__all__)
    assert all(getattr(jaxspec, name) is not None for name in jaxspec.__all__)


def test_a_model_shows_what_users_call_and_nothing_else(llm):
    shown = {name for name in dir(llm) if not name.startswith("_")}
    calls = {"generate", "chat", "stream", "encode", "with_method", "follow", "close"}
    assert shown == calls | {"model_path", "draft_path", "tokenizer", "eos_ids"}


def test_keywords_for_type_checkers_are_the_settings():
    assert typing.get_type_hints(EngineSettings) == typing.get_type_hints(EngineConfig)
    for call, keywords in ((jaxspec.LLM, EngineSettings), (jaxspec.generate, ModelOptions)):
        kinds = [p for p in inspect.signature(call).parameters.values() if p.kind is p.VAR_KEYWORD]
        assert [p.annotation for p in kinds] == [typing.Unpack[keywords]]
    parameters = set(inspect.signature(jaxspec.LLM).parameters) - {"settings", "distributed"}
    assert ModelOptions.__annotations__.keys() == EngineSettings.__annotations__.keys() | parameters


@pytest.mark.parametrize("cls", STATS)
def test_statistics_are_frozen_and_every_field_is_described(cls):
    assert cls.__dataclass_params__.frozen
    described = " ".join(filter(None, (inspect.getdoc(base) for base in (*cls.__mro__[:-1], StreamCounts))))
    described += inspect.getsource(cls) if cls is TraceSummary else ""  # beside the fields
    assert not [field.name for field in dataclasses.fields(cls) if field.name not in described]


@pytest.mark.parametrize(
    "method", quick_part(["chain", "auto", "swift", "swiftspec", "ar"], lambda name: name in ("chain", "ar"))
)
def test_statistics_and_their_json_have_the_same_names(llm, method):
    out = llm.with_method(method).generate([3, 4, 5], SHORT)
    stats = out.to_dict()["stats"]
    assert json.loads(json.dumps(stats, allow_nan=False)).keys() == stats.keys()
    assert list(stats) == [field.name for field in dataclasses.fields(jaxspec.DecodeStats)]
    spec, choice = out.stats.speculative_decoding, out.stats.choice
    assert (spec is None) == (method == "ar") and (choice is None) == (method in ("ar", "chain"))
    if spec is not None:
        assert stats["speculative_decoding"] == dataclasses.asdict(spec)
        assert sum(spec.per_step_accepted) == spec.num_accepted_draft_tokens
    if spec is not None and choice is not None:
        assert stats["choice"]["rounds"] == choice.rounds == spec.rounds_by_kind


def test_a_stream_works_in_with_and_for_and_ends_by_abort(llm):
    assert sum(len(event.token_ids) for event in llm.stream([3, 4, 5], SHORT)) == 24
    with llm.stream([3, 4, 5], SHORT) as events:
        assert isinstance(events, jaxspec.Stream)
        seen = []
        for event in events:
            events.abort()
            seen.append(event)
    assert seen[-1].finish_reason == "abort" and 0 < seen[-1].completion.stats.completion_tokens < 24


def test_a_closed_model_says_so_and_what_shares_its_weights_goes_on(llm):
    wanted = llm.generate([3, 4, 5], SHORT).token_ids
    with llm.with_method("chain") as other:
        assert other.generate([3, 4, 5], SHORT).token_ids == wanted
        events = other.stream([3, 4, 5], SHORT)
        first = next(events)
    assert repr(other) == "<LLM 'model', closed>"
    for call in (lambda: other.generate([3], SHORT), lambda: other.with_method("ar"), lambda: other.stream("w1")):
        with pytest.raises(jaxspec.ConfigError, match="closed"):
            call()
    assert (*first.token_ids, *(token for event in events for token in event.token_ids)) == wanted
    assert llm.generate([3, 4, 5], SHORT).token_ids == wanted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_load_its_own(llm):
    llm.generate([3, 4, 5], SHORT)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            llm.generate([3, 4, 5], SHORT)
        except jaxspec.JaxspecError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert "forked: load it in the child" in os.read(reading, 1000).decode()


def test_statistics_print_as_a_line(llm):
    stats = llm.generate([3, 4, 5], SHORT).stats
    assert str(stats).startswith("3 prompt tokens, 24 tokens at ") and "tokens/pass" in str(stats)
    assert len(str(stats)) < 200 and repr(stats).startswith("DecodeStats(")
