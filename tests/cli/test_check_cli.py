"""`jaxspec-check` on a tiny checkpoint, in this process, with honest and faulty methods; and its words."""

import dataclasses
import json
import re
from typing import ClassVar

import jax.numpy as jnp
import pytest
from native_models import without_kernel_note

from jaxspec.check import invariance
from jaxspec.check.invariance import Invariance
from jaxspec.check.run import estimate_full
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ROUND_HEADER
from jaxspec.methods.registry import METHODS
from pallas_kernels.selection import choose

needs_native = pytest.mark.skipif(not choose("auto", "cpu").native, reason="the native kernels were not built")


class Spoiled:
    """Plain decoding's runner with another request, or other rounds."""

    def __init__(self, runner, request=lambda r: r, packed=lambda p: p):
        self.runner = runner
        self.request = request
        self.packed = packed

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def round(self, params, state, request, room):
        state, round_, least = self.runner.round(params, state, self.request(request), room)
        return state, dataclasses.replace(round_, packed=self.packed(round_.packed)), least


@dataclasses.dataclass(frozen=True)
class Twin(Autoregressive):
    """Plain decoding under another name."""

    name: ClassVar[str] = "twin"
    exact: ClassVar[str] = "tokens"
    width: int = 4


@dataclasses.dataclass(frozen=True)
class Lawful(Twin):
    """Plain decoding that promises the distribution only."""

    name: ClassVar[str] = "lawful"
    exact: ClassVar[str] = "distribution"


@dataclasses.dataclass(frozen=True)
class Padded(Twin):
    """Takes a pad for the token."""

    name: ClassVar[str] = "padded"

    def bind(self, *arguments):
        return Spoiled(super().bind(*arguments), packed=lambda packed: packed.at[ROUND_HEADER].set(0))


@dataclasses.dataclass(frozen=True)
class Hot(Lawful):
    """Draws at the wrong temperature; its greedy texts are right."""

    name: ClassVar[str] = "hot"

    def bind(self, *arguments):
        def heat(request):
            hotter = jnp.asarray(request.processors.temperature) * 4
            return dataclasses.replace(request, processors=dataclasses.replace(request.processors, temperature=hotter))

        return Spoiled(super().bind(*arguments), request=heat)


@pytest.fixture
def call(monkeypatch, command, tiny_model):
    """Run the command with the methods from above too."""
    for method in (Twin, Lawful, Padded, Hot):
        monkeypatch.setitem(METHODS, method.name, (__name__, method.__name__))
    return lambda *words: command("check", "--model", tiny_model, "--raw", "-n", "6", "--samples", "200", *words)


def test_lossless_methods_are_status_0(call, tmp_path):
    out_file = tmp_path / "out.json"
    status, out, err = call(
        "--full", "--methods", "twin,lawful", "--set", "width=5", "--json", str(out_file), "w1 w2", "w3"
    )
    assert (status, err) == (0, "")
    assert "twin: lossless here: 8 of 8 texts equal, 0 equal up to ties (0 ties in " in out
    assert "lawful: lossless here: 4 of 4 texts equal" in out and "2 of 2 distributions equal" in out
    assert "2/2" in out and "quick" not in out
    report = json.loads(out_file.read_text())
    assert report["lossless"] is True and report["dtype"] == "float32" and report["prompts"] == ["1", "2"]
    assert report["cache"]["bytes"] <= report["cache"]["limit"] == 4 * 2**30
    assert report["weights"] == "float32" and report["kernels"] == choose("auto", "cpu").name
    twin, lawful = report["methods"]
    assert (twin["method"], twin["exact"], twin["settings"]["width"], twin["distribution"]) == ("twin", "tokens", 5, [])
    assert [row["sampling"].split()[0] for row in twin["tokens"]] == [
        "greedy",
        "greedy",
        "temperature=1.0",
        "temperature=0.7",
    ]
    first = twin["tokens"][0]["comparisons"][0]
    assert first["verdict"] == "equal" and first["expected"] == first["got"] and 0 < len(first["got"]) <= 6
    assert [row["samples"] for row in lawful["distribution"]] == [200, 200] and len(lawful["tokens"]) == 2


@pytest.mark.thorough
def test_a_faulty_method_is_status_1_and_shown_where_it_differs(call, tmp_path):
    status, out, err = call("--method", "padded,twin", "--json", "-", "w1 w2")
    assert status == 1
    assert err.splitlines()[-1] == "jaxspec-check: error: not lossless here: padded"
    # Tables make room for the object.
    assert "'w0' (0)" in err and "different" in err and "padded: NOT LOSSLESS: 0 of 2 texts equal" in err
    report = json.loads(out)
    assert report["lossless"] is False and [m["lossless"] for m in report["methods"]] == [False, True]
    found = report["methods"][0]["tokens"][0]["comparisons"][0]
    assert (found["verdict"], found["position"], found["got_token"]) == ("different", 0, 0)
    assert found["margin"] > found["eps"] > 0


@pytest.mark.thorough
def test_a_wrong_distribution_is_status_1(call):
    status, out, err = call("--method", "hot", "w1 w2")
    assert status == 1 and err == "jaxspec-check: error: not lossless here: hot\n"
    assert "hot: NOT LOSSLESS: 1 of 1 texts equal" in out and "0 of 1 distributions equal" in out


@pytest.mark.thorough
def test_the_quick_check_is_the_default_and_says_what_the_full_one_costs(call, monkeypatch, tmp_path):
    for name in list(METHODS):
        if name not in ("ar", "auto", "twin"):
            monkeypatch.delitem(METHODS, name)
    status, out, _ = call("--json", tmp_path / "out.json", "w1 w2", "w3", "w4")
    report = json.loads((tmp_path / "out.json").read_text())
    assert status == 0 and [entry["method"] for entry in report["methods"]] == ["auto"]
    assert report["prompts"] == ["1", "2"] and report["samples"] == 200 and not report["every_sampling"]
    assert [row["sampling"].split()[0] for row in report["methods"][0]["tokens"]] == ["greedy", "temperature=0.7"]
    assert re.search(r"this was the quick check; --full checks 2 methods with more texts, in about \d+ min", out)


def test_the_estimate_adds_texts_draws_and_compiling():
    entries = [{"seconds_per_token": 0.01}, {"seconds_per_token": 0.02}]
    texts, draws = 2 * 8 * 4 * 64, 2 * 1000 * 5
    assert estimate_full(entries, 3.0, [Twin, Lawful]) == pytest.approx(6 + 0.02 * (texts + draws))


@pytest.mark.parametrize("kernels", ["xla", pytest.param("cpu", marks=needs_native)])
def test_rows_that_differ_are_a_fault_of_native_kernels_alone(call, monkeypatch, kernels):
    monkeypatch.setattr(invariance, "measure_invariance", lambda *_: Invariance(6, 16, 0, 2, 1e-6))
    status, out, err = call("--method", "ar", "--kernels", kernels, "w1 w2")
    assert f"({kernels} kernels) differ from plain decoding's by up to 1e-06" in out
    fault = "jaxspec-check: error: not lossless here: passes of several rows\n"
    assert (status, err) == ((1, fault) if kernels == "cpu" else (0, ""))


@pytest.mark.thorough
def test_exact_numerics_are_tested_bit_by_bit(call):
    """With XLA, whose rows differ else: passes of up to sixteen rows have the bits of single rows."""
    status, out, _ = call("--method", "ar", "--kernels", "xla", "--exact", "--json", "-", "w1 w2 w3")
    assert status == 0 and json.loads(out)["rows"]["bitwise"] is True


def test_a_text_too_short_to_compare_rows_is_no_pass(call, monkeypatch):
    monkeypatch.setattr(invariance, "measure_invariance", lambda *_: Invariance(1, 16, 0, 0, 0.0))
    status, out, err = call("--method", "ar", "-n", "1", "--json", "-", "w1 w2")
    assert status == 0 and json.loads(out)["rows"]["bitwise"] is None
    assert "not checked: passes of several rows, for want of a longer text (tokens: 1)" in err
    assert "bit for bit" not in err


def test_all_leaves_out_what_does_not_fit(call, monkeypatch):
    for name in list(METHODS):
        if name not in ("ar", "chain", "twin"):
            monkeypatch.delitem(METHODS, name)
    status, out, _ = call("--method", "all", "w1 w2")
    assert status == 0 and "twin: lossless here" in out
    assert "not checked: chain: needs a draft model (--draft-model)" in out
    monkeypatch.delitem(METHODS, "twin")
    status, _, err = call("--full", "w1 w2")
    assert status == 2 and "no method but ar fits" in err


def test_prompts_of_a_file_are_spread(call, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "c", "turns": [f"w{i}", "w0"]} for i in range(10)]
    file.write_text("\n".join(map(json.dumps, lines)))
    status, out, _ = call("--method", "ar", "--prompts", str(file), "--max-prompts", "3", "--json", "-")
    assert status == 0 and json.loads(out)["prompts"] == ["0", "3", "6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "twni", "w1"], "did you mean 'twin'"),
        (["--method", "twin", "--set", "widht=3", "w1"], "did you mean 'width'"),
        (["--method", "ar", "--set", "width=3", "w1"], "unknown option 'width'; known: steps_per_dispatch"),
        (["--method", "twin", "--draft-model", "d", "w1"], "none of the methods twin uses a draft model"),
        (["--method", "twin", "--prompts", "no.jsonl", "w1"], "not both"),
        (["--method", "twin", "--samples", "10", "w1"], "--samples"),
        (["--method", "twin", "-n", "64", "w1"], "exceed the context of 64"),
        (
            ["--method", "twin", "--draft-platform", "cpu", "w1"],
            "draft_platform are for swiftspec; plain decoding cannot use them",
        ),
        (["--method", "twin", "--json", "no/such/out.json", "w1"], "it must be a file in a folder that exists"),
    ],
)
def test_wrong_words_are_status_2_and_one_line(call, arguments, message):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


@pytest.mark.thorough
def test_a_split_model(call):
    status, out, err = call("--method", "ar", "-n", "4", "--target-devices", "2", "w1 w2 w3")
    assert (status, without_kernel_note(err)) == (0, "")
    assert "ar: lossless here: 2 of 2 texts equal" in out and "\x1b" not in out
