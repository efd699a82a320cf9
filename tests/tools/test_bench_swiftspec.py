"""The table of speeds by depth, with a stand-in for the model."""

import bench_fakes
import bench_swiftspec
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.bench.prompts import load_prompts
from jaxspec.errors import ConfigError


@pytest.mark.parametrize("options, dropped", [([], False), (["--drop"], True)])
def test_speeds_by_depth(monkeypatch, options, dropped):
    bench_fakes.install(monkeypatch)
    calls = []
    monkeypatch.setattr("jaxspec.LLM", lambda *_, **options: bench_fakes.FakeLLM(calls=calls, **options))
    words = ["depths", "--depth", "2,3", "--refill", "0", "--timed", "--max-prompts", "1", "--max-tokens", "12"]
    result = CliRunner().invoke(bench_swiftspec.app, [*words, *options])
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")]
    expected = ["ar", "default", "in turn, depth 2", "in turn, depth 3"]
    expected += [f"beside, depth {depth}, refill 0" for depth in (2, 3)]
    assert rows == expected + [f"beside, dropped, depth {depth}, refill 0" for depth in (2, 3)] * dropped
    used = {(m.depth, m.refill, m.overlap, m.reuse) for m, *_ in calls if m.name == "swiftspec"}
    asked = {(None, None, True, True)} | {(depth, None, False, False) for depth in (2, 3)}
    asked |= {(depth, 0, True, keep) for depth in (2, 3) for keep in (True, not dropped)}
    assert used == asked


def test_lengths_are_not_kept_beside_speeds(tmp_path):
    result = CliRunner().invoke(bench_swiftspec.app, ["depths", "--timed", "--json", str(tmp_path / "lengths.json")])
    assert result.exit_code and "--json keeps lengths: leave out --timed" in result.output


def test_lengths_of_a_replaced_draft_are_not_continued(tmp_path, monkeypatch):
    answers = bench_swiftspec.Answers("default", (8, 8), (4, 4), 0.0, 1.0, True, None)
    monkeypatch.setattr(bench_swiftspec, "_summarise", lambda *_: answers)
    draft, lengths = tmp_path / "draft", tmp_path / "lengths.json"
    draft.mkdir()
    (draft / "weights").write_bytes(b"first")
    llm = bench_fakes.FakeLLM(draft=draft)
    prompts = load_prompts(None)[:2]
    found = bench_swiftspec.measure(llm, {"default": jaxspec.SwiftSpec()}, prompts, 8, lengths)
    (draft / "README.md").write_text("no weights")
    llm.calls.clear()
    again = bench_swiftspec.measure(llm, {"default": jaxspec.SwiftSpec()}, prompts, 8, lengths)
    assert again == found and not llm.calls
    (draft / "weights").write_bytes(b"other")
    kept = lengths.read_bytes()
    with pytest.raises(ConfigError, match="of another model or draft"):
        bench_swiftspec.measure(llm, {"default": jaxspec.SwiftSpec()}, prompts, 8, lengths)
    assert lengths.read_bytes() == kept and not llm.calls
