"""`jaxspec-check` through GPU kernels in their interpreters: it passes, and certifies no others by their name."""

import json
import signal
import sys

import pytest
from native_models import write_model

from jaxspec.cli import check as command
from jaxspec.cli import start
from jaxspec.models.config import ModelConfig
from pallas_kernels import registry, selection
from pallas_kernels.registry import Kernels

# One layer, whose heads Mosaic takes.
MODEL = ModelConfig("llama", 1, 32, 40, 2, 1, 64, 50, 128)
KERNELS = {
    "pallas-triton": (("tree_attention", "triton"), ("add_norm", "triton")),
    "mosaic": (("tree_attention", "mosaic"), ("add_norm", "triton")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check") / "model"
    return write_model(folder, MODEL)


@pytest.fixture
def check(monkeypatch, capsys, model):
    """Status, report and error of a check of one method with kernels by name, as on a GPU that has them."""

    def choose(name, *_):
        # A multiprocessor is a thread of the interpreter.
        return Kernels(
            name, "gpu", implementations=KERNELS[name], own=selection.OWN[name], capability=(9, 0), multiprocessors=1,
            interpret=True,
        )  # fmt: skip

    monkeypatch.setattr(selection, "choose", choose)
    monkeypatch.setattr(registry, "_own_calls", {})
    before = signal.getsignal(signal.SIGINT)

    def check(kernels, *words):
        words = ["--model", model, "--raw", "--kernels", kernels, "--json", "-", *words, "w1 w2 w1 w2 w1"]
        monkeypatch.setattr(sys, "argv", [command.NAME, *words])
        with pytest.raises(SystemExit) as left:
            start.run("check")
        out, err = capsys.readouterr()
        return left.value.code, json.loads(out), err

    yield check
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_triton(check, model):
    """Draft and target go through the kernels."""
    settings = ["--set", "num_draft_tokens=6", "--set", "width=2"]
    words = ["--method", "specexec", "--draft-model", model, *settings, "-n", "6"]
    status, report, err = check("pallas-triton", *words)
    assert status == 0, err
    assert report["lossless"] and report["kernels"] == "pallas-triton" and report["kernels_refused"] == []
    assert registry._own_calls.keys() == {("pallas-triton", "tree_attention"), ("pallas-triton", "add_norm")}
    (entry,) = report["methods"]
    assert entry["tokens"] and all(row["equal"] + row["tie"] == 1 for row in entry["tokens"])


@pytest.mark.slow
@pytest.mark.usefixtures("mosaic_compiled_once")
def test_mosaic(check):
    status, report, err = check("mosaic", "--method", "lookup", "--dtype", "bfloat16", "-n", "3")
    assert status == 0, err
    assert report["lossless"] and report["kernels"] == "mosaic" and report["kernels_refused"] == []
    assert registry._own_calls.keys() == {("mosaic", "tree_attention")}


@pytest.mark.slow
def test_kernels_that_take_nothing_are_not_certified(check):
    status, report, err = check("mosaic", "--method", "lookup", "--dtype", "float32", "-n", "4")
    assert status == 1 and not report["lossless"]
    assert "kernels 'mosaic' take no call of this model: others were checked" in err
    assert err.count("not checked: kernels mosaic: do not take tree_attention of float32[") == 1
    assert all(entry["lossless"] for entry in report["methods"])
