"""Presets and options: each preset that ships makes a method, and says where its settings come from."""

import importlib.resources

import pytest

from jaxspec.cli.decode import FLAGS
from jaxspec.cli.options import list_presets, merge_options, method_from, method_options
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.foreign import option_hint
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swiftspec.settings import SwiftSpec

FOLDER = importlib.resources.files("jaxspec_configs").joinpath("decode")


@pytest.mark.parametrize("name", list(list_presets()))
def test_a_preset_loads_and_makes_a_method(name):
    options = merge_options({}, name, [], FLAGS, method_options)
    method = method_from(options)
    assert method.name == options["method"]
    for setting in method_options():
        if setting in options:
            assert getattr(method, setting) == (
                tuple(options[setting]) if isinstance(options[setting], list) else options[setting]
            )
    SamplingParams(**{key: options[key] for key in ("temperature", "top_p", "max_tokens") if key in options})
    EngineConfig(**{key: options[key] for key in ("dtype", "target_devices", "draft_devices") if key in options})


@pytest.mark.parametrize("name", [name for name in list_presets() if name.endswith(("-paper", "-repo"))])
def test_a_preset_of_a_paper_cites_it(name):
    text = FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert any("Source: " in line for line in comments) and len(comments) > 2


def test_the_presets_of_the_papers():
    def load(name):
        return method_from(merge_options({}, name, [], FLAGS, method_options))

    assert load("swiftspec-paper") == SwiftSpec(num_draft_tokens=7, width=8, branch=8, refill=0, ranking="probability")
    assert load("specexec-paper") == SpecExec(num_draft_tokens=1024, depth=64, ranking="probability")
    assert load("specexec-repo") == SpecExec(
        num_draft_tokens=1024, width=128, branch=32, depth=32, decay=0.95, ranking="probability"
    )
    assert load("swift-paper") == Swift(share=1.0, threshold=0.8, adaptive=False)
    repo = load("swift-repo")
    assert repo == Swift(share=1.0, threshold=0.8, adaptive=False, siblings=(3, 5, 8, 10))


def test_later_sources_win(tmp_path):
    preset = tmp_path / "own.toml"
    preset.write_text('method = "specexec"\nnum-draft-tokens = 8\nwidth = 2\n')
    given = {"width": 4, "depth": None}
    merged = merge_options(given, preset, ["num_draft_tokens=9", "depth=3"], FLAGS, method_options)
    assert merged == {"method": "specexec", "num_draft_tokens": 9, "width": 4, "depth": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [("budjet = 4", "did you mean 'draft_model'|known"), ("n_predict = 4", "use 'max_tokens'"), ("=", "is not TOML")],
)
def test_presets_that_are_refused(tmp_path, text, message):
    preset = tmp_path / "own.toml"
    preset.write_text(text)
    with pytest.raises(ConfigError, match=message):
        merge_options({}, preset, [], FLAGS, method_options)


def test_options_of_other_projects():
    known = {"--num-draft-tokens", "--draft-model", "--config", "--set", "--prompt-file"}
    assert option_hint("--spec-draft-n-max", known) == "use --num-draft-tokens"
    assert option_hint("-md", known) == "use --draft-model"
    assert option_hint("--draft-p-min", known) == "use --set min_probability=..."
    assert option_hint("-p", known) == "give the prompt without an option"
    for word in ("--draft", "--speculative-config"):
        assert "--draft-model" in (option_hint(word, known) or "")
        assert option_hint(word, {"--model"}) is None
    assert "--offload" in (option_hint("-ngl", {"--offload"}) or "")
    for word in ("draft", "-n", "--nonsense", "hello --draft"):
        assert option_hint(word, known) is None
    # A command without presets and the option does not have it by another name either.
    assert option_hint("--coordinator", known) == "this command runs in one process"
    assert option_hint("--draft-p-min", {"--draft-model"}) is None
