"""The layer for multi-token prediction inside a checkpoint: found, refused, shared, converted, and in use."""

import dataclasses

import jax
import numpy as np
import pytest
from marks import quick_part
from mtp_folders import FAMILIES, mtp_tensors, write_mtp, write_mtp_gguf
from native_models import write_tokenizer

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.hf import HFSource
from jaxspec.checkpoint.load import open_weights
from jaxspec.checkpoint.native.manifest import MANIFEST, verify_native
from jaxspec.config import SamplingParams
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.llm import LLM, internals
from jaxspec.loading import has_draft, open_models
from jaxspec.methods.chain import Chain
from jaxspec.methods.registry import resolve_method
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.text.tokenizer import save_tokenizer

AUTO, AR = resolve_method("auto"), resolve_method("ar")


def write(folder, family="dense", **options):
    write_mtp(folder, family, **options)
    write_tokenizer(folder, FAMILIES[family].vocab_size)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mtp") / "model")


@pytest.fixture
def unread(monkeypatch):
    """Weights cannot be read."""

    def read(self, name, *arguments, **options):
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(HFSource, "read", read)


def leaves_of(weights, storage="float32"):
    return weights.load(Placement(weights.config, plan_mesh(1), np.dtype("float32"), storage=Storage(storage)))


def test_it_is_the_default_draft(folder, unread):
    named = open_models(folder, "mtp", AUTO).draft
    assert named is not None and named.config.features.kind == "mtp"
    assert (named.path.name, named.files) == ("mtp", folder)
    assert open_models(folder, None, AUTO).draft.config == named.config and has_draft(folder, None)
    for draft, method in (("none", AUTO), (None, AR), (None, resolve_method("lookup"))):
        assert open_models(folder, draft, method).draft is None
    with pytest.raises(ConfigError, match="'lookup' uses no draft model"):
        open_models(folder, "mtp", resolve_method("lookup"))


def test_a_checkpoint_without_it_is_refused_by_name(tmp_path, monkeypatch):
    plain = write(tmp_path / "plain", tensors={})
    native = convert(plain, tmp_path / "native", save_tokenizer=save_tokenizer).path
    monkeypatch.setattr(HFSource, "read", None)
    for path in (plain, native):
        with pytest.raises(ConfigError, match=f"{path}: has no layer for multi-token prediction, which draft 'mtp' is"):
            open_models(path, "mtp", AUTO)
        assert open_models(path, None, AUTO).draft is None and not has_draft(path, None)


TENSORS = mtp_tensors(FAMILIES["dense"])
BROKEN = {
    "two layers": (dict(mtp_num_hidden_layers=2), TENSORS, "mtp_num_hidden_layers is 2; draft 'mtp' runs"),
    "embedding": (dict(mtp_use_dedicated_embeddings=True), TENSORS, "mtp_use_dedicated_embeddings is True; draft"),
    "lacks a norm": ({}, {n: t for n, t in TENSORS.items() if n != "mtp.norm.weight"}, "less 'mtp.': .* missing"),
    "has more": ({}, TENSORS | {"mtp.head.weight": np.zeros((3, 3), np.float32)}, "1 unexpected .head.weight"),
    "wide": ({}, TENSORS | {"mtp.fc.weight": np.zeros((64, 64), np.float32)}, "fc.weight is .64, 64., not .64, 128."),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_one_that_cannot_run_is_refused_or_left_out(name, tmp_path, unread, caplog):
    changes, tensors, message = BROKEN[name]
    path = write(tmp_path / "model", tensors=tensors, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_models(path, "mtp", AUTO)
    assert open_models(path, None, AUTO).draft is None
    assert "the checkpoint's own draft is left out" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_holds_the_same_draft(family, tmp_path):
    made, whole = open_weights(write(tmp_path / "model", family)).mtp(), tmp_path / "m.gguf"
    found = open_weights(write_mtp_gguf(whole, family)).mtp()
    # Files of Qwen3-Next are read as models of Qwen 3.5.
    assert dataclasses.replace(found.config, family=made.config.family) == made.config
    assert (found.path, found.files) == (whole / "mtp", whole)
    for one, other in zip(jax.tree.leaves(leaves_of(made)), jax.tree.leaves(leaves_of(found)), strict=True):
        np.testing.assert_array_equal(one, other)


GGUF_BROKEN = {
    "two layers": ({"layers": 2}, "qwen35.nextn_predict_layers is 2; draft 'mtp' runs"),
    "lacks a norm": ({"without": ("nextn.shared_head_norm.weight",)}, "less 'mtp.': .* missing .model.norm.weight"),
    "own head": ({"more": ("nextn.shared_head_head.weight",)}, "unexpected .blk.0.nextn.shared_head_head.weight"),
}


@pytest.mark.parametrize("name", GGUF_BROKEN)
def test_a_layer_of_a_gguf_file_that_cannot_run_is_refused(name, tmp_path):
    options, message = GGUF_BROKEN[name]
    weights = open_weights(write_mtp_gguf(tmp_path / "m.gguf", **options))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        weights.mtp()


@pytest.mark.parametrize("family", quick_part(["dense", "tied", "next"], lambda family: family == "dense"))
def test_converted_it_is_the_same_draft(family, tmp_path):
    source = write(tmp_path / "model", family)
    native = tmp_path / "native"
    convert(source, native, save_tokenizer=save_tokenizer)
    verify_native(native)
    made, found = (open_models(path, "mtp", AUTO).draft for path in (source, native))
    assert found.config == made.config and found.path == native / "mtp"
    assert open_models(native, None, AUTO).draft.config == made.config
    for one, other in zip(jax.tree.leaves(leaves_of(made)), jax.tree.leaves(leaves_of(found)), strict=True):
        np.testing.assert_array_equal(one, other)
    again = convert(native, tmp_path / "again", quantize="q8_0", save_tokenizer=save_tokenizer)
    assert open_weights(again.path).mtp().own_storage == Storage("q8_0")
    # The first layers of a model have none.
    assert open_weights(convert(source, tmp_path / "cut", layers=4).path).mtp is None


def test_a_damaged_draft_in_a_native_checkpoint_is_left_out(folder, tmp_path, caplog):
    native = convert(folder, tmp_path / "native", save_tokenizer=save_tokenizer).path
    manifest = native / "mtp" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"mtp"', '"eagle1"'))
    with pytest.raises(CheckpointError):
        open_models(native, "mtp", AUTO)
    assert open_models(native, None, AUTO).draft is None and "left out" in caplog.text
    with pytest.raises(CheckpointError, match="has SHA-256|bytes, and"):
        verify_native(native)


@pytest.mark.thorough
def test_a_draft_decodes_with_its_target(folder):
    """With the target's embedding and head, and plain decoding's text."""
    llm = LLM(folder, method=Chain(3))
    parts = internals(llm)
    assert llm.draft_path.name == "mtp" and repr("mtp") in repr(llm)
    assert {"embed", "head"} <= parts.params.draft.keys()
    assert all(parts.params.draft[leaf] is parts.params.target[leaf] for leaf in ("embed", "head"))
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    one, plain = (each.generate("w3 w1 w4", sampling) for each in (llm, llm.with_method("ar")))
    assert one.token_ids == plain.token_ids
    assert one.stats.speculative_decoding.num_draft_tokens > 0
