"""Drafts that share their target's embedding: on disk, beside their target, and as `LLM` finds and refuses them."""

import dataclasses
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make import tiny_config
from native_models import EOS_IDS, random_leaves, write_model
from train.export import save_draft

from jaxspec.checkpoint import shipped
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.load import open_weights
from jaxspec.checkpoint.native.checkpoint import read_leaf, restore_native
from jaxspec.checkpoint.native.manifest import open_native
from jaxspec.checkpoint.shared_weights import share_embedding
from jaxspec.checkpoint.shipped import find_shipped_draft
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.files import vocabulary_digest
from jaxspec.llm import LLM, internals
from jaxspec.loading import check_vocabulary
from jaxspec.methods.chain import Chain
from jaxspec.models.params import declare_params, leaf_name
from jaxspec.models.quantization import Storage, decode_blocks, encode_blocks
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, SharedEmbedding
from jaxspec.runtime.sharding import place_array
from pallas_kernels.linear.blocks import Blocks, dequantise

FLOAT32, BF16 = np.dtype("float32"), jnp.dtype(jnp.bfloat16)
TARGET = tiny_config()
TIED = tiny_config(tied=True)
VOCAB = TARGET.vocab_size
# 23 of 72 ids, which no number of devices divides.
HEAD_IDS = tuple(range(2, VOCAB - 1, 3))
DRAFT = tiny_config(num_layers=1, shares_embedding=True, head_ids=HEAD_IDS)
WHOLE = dataclasses.replace(DRAFT, head_ids=())
DIGEST = vocabulary_digest([f"w{i}" for i in range(VOCAB)])


def named(tree):
    return {leaf_name(path): leaf for path, leaf in jax.tree.flatten_with_path(tree)[0]}


def draft_arrays(cfg, seed=3):
    """Its own parameters, as training leaves them."""
    leaves = random_leaves(cfg, seed=seed)
    return jax.tree.map_with_path(lambda path, _: leaves[leaf_name(path)] / 8, declare_params(cfg, np.float32))


def write_draft(folder, cfg=DRAFT, vocabulary=DIGEST, **options):
    return save_draft(folder, draft_arrays(cfg), cfg, vocabulary, EOS_IDS, **options)


def edit_manifest(folder, change):
    file = folder / "jaxspec.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


# On disk


@pytest.mark.parametrize("cfg", [DRAFT, WHOLE, dataclasses.replace(WHOLE, tied=True)], ids=["some", "all", "tied"])
def test_what_is_written_is_read(tmp_path, cfg):
    checkpoint = write_draft(tmp_path / "draft", cfg)
    assert checkpoint == open_native(tmp_path / "draft")
    assert (checkpoint.config, checkpoint.vocabulary, checkpoint.eos_ids) == (cfg, DIGEST, EOS_IDS)
    assert checkpoint.storage == Storage("float32")
    assert not [name for name in checkpoint.infos if name.startswith(("embed", "head"))]
    restored, expected = named(restore_native(checkpoint, plan_mesh(1))), named(draft_arrays(cfg))
    assert list(restored) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(restored[name], array, err_msg=name)
    # Neither a tokenizer nor anything unfinished lies beside.
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == ["arrays", "jaxspec.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_weights_in_blocks(tmp_path):
    checkpoint = write_draft(tmp_path / "draft", quantize="q8_0")
    assert checkpoint.storage == Storage("q8_0")
    assert checkpoint.num_bytes < write_draft(tmp_path / "plain").num_bytes / 3
    for name, array in named(draft_arrays(DRAFT)).items():
        stored = read_leaf(checkpoint, name)
        if name.endswith("norm"):
            np.testing.assert_array_equal(stored, array)
            continue
        expected = encode_blocks(np.reshape(array, (*array.shape[: stored.ndim - 2], -1)), "q8_0")
        np.testing.assert_array_equal(stored, expected.reshape(stored.shape), err_msg=name)
        error = np.abs(decode_blocks(stored, "q8_0").reshape(array.shape) - array).max()
        assert error < np.abs(array).max() / 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("vocabulary"), "missing keys: .'vocabulary'"),
        (lambda m: m.update(vocabulary=7), "vocabulary must be the digest of the target's, got 7"),
        (lambda m: m["model"].update(shares_embedding=False), "unknown keys: .'vocabulary'"),
        (lambda m: m["model"].update(head_ids=[3, 2]), "head_ids must be ascending token ids below 72, each once"),
        (lambda m: m["model"].update(head_ids=[False, True]), "head_ids"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path, change, message):
    write_draft(tmp_path / "draft")
    edit_manifest(tmp_path / "draft", change)
    with pytest.raises(CheckpointError, match=message):
        open_native(tmp_path / "draft")


def test_converted_to_another_type_it_is_the_same_draft(tmp_path):
    """No tokenizer is asked for: there is none."""
    write_draft(tmp_path / "draft")
    half = convert(tmp_path / "draft", tmp_path / "half", "bfloat16")
    assert (half.config, half.vocabulary, half.eos_ids) == (DRAFT, DIGEST, EOS_IDS)
    assert half.storage == Storage("bfloat16")
    blocks = convert(tmp_path / "draft", tmp_path / "blocks", quantize="q8_0")
    assert (blocks.vocabulary, blocks.storage) == (DIGEST, Storage("q8_0"))
    same = write_draft(tmp_path / "same", quantize="q8_0")
    for name, array in named(draft_arrays(DRAFT)).items():
        expected = array.astype(half.infos[name].dtype)
        np.testing.assert_array_equal(read_leaf(half, name), expected, strict=True)
        np.testing.assert_array_equal(read_leaf(blocks, name), read_leaf(same, name), strict=True)


# Beside its target


def placed(cfg, plan, storage="float32", shared=None, **options):
    storage = Storage(storage) if isinstance(storage, str) else storage
    return Placement(cfg, plan, FLOAT32, storage=storage, shared_embedding=shared, **options)


def random_target(placement):
    """Parameters of a target, placed; blocks are rounded numbers."""
    leaves = random_leaves(placement.cfg)

    def make(path, shape):
        name = leaf_name(path)
        array = leaves[name]
        if shape.dtype == np.uint8:
            array = encode_blocks(array, placement.weights.type_of(name)).reshape(*array.shape[:1], *shape.shape[1:])
        return place_array(array.astype(shape.dtype), shape)

    whole = placement.params()
    needed = {name: whole[name] for name in ("embed", "head") if name in whole}
    return jax.tree.map_with_path(make, needed), leaves


def table_of(cfg, leaves):
    return leaves["embed" if cfg.tied else "head"]


@pytest.mark.parametrize(("cfg", "degree"), [(TARGET, 2), (TIED, 1)], ids=["untied", "tied"])
def test_on_the_targets_devices_nothing_is_copied_but_the_rows_of_a_head(cfg, degree):
    plan = plan_mesh(degree)
    target = placed(cfg, plan)
    params, leaves = random_target(target)
    shared = SharedEmbedding(cfg, target.weights)
    whole = share_embedding(placed(WHOLE, plan, shared=shared), params)
    assert sorted(whole) == (["embed"] if cfg.tied else ["embed", "head"])
    assert all(whole[name] is params[name] for name in whole)
    some = share_embedding(placed(DRAFT, plan, shared=shared), params)
    assert sorted(some) == ["embed", "head"] and some["embed"] is params["embed"]
    rows = len(HEAD_IDS)
    assert some["head"].shape == (rows + rows % degree, cfg.embed_dim)
    np.testing.assert_array_equal(np.asarray(some["head"])[:rows], table_of(cfg, leaves)[list(HEAD_IDS)])
    assert not np.asarray(some["head"])[rows:].any()


@pytest.mark.parametrize(("cfg", "degree"), [(TARGET, 4), (TIED, 1)], ids=["untied", "tied"])
def test_on_other_devices_it_has_copies(cfg, degree):
    """From any number of devices to two others: 72 rows are padded for five and not for two."""
    target, plan = placed(cfg, plan_mesh(degree), vocab_rows=75), plan_mesh(2, 4)
    params, leaves = random_target(target)
    shared = SharedEmbedding(cfg, target.weights)
    for draft_cfg in (WHOLE, DRAFT):
        draft = placed(draft_cfg, plan, shared=shared)
        given, shapes = share_embedding(draft, params), draft.shared_params()
        assert list(given) == list(shapes)
        for name, leaf in given.items():
            expected = leaves[name] if name in leaves else leaves["embed"]
            if name == "head" and draft_cfg.head_ids:
                expected = table_of(cfg, leaves)[list(HEAD_IDS)]
            assert (leaf.shape, leaf.dtype, leaf.sharding) == tuple(
                getattr(shapes[name], attribute) for attribute in ("shape", "dtype", "sharding")
            )
            assert leaf.devices() == set(plan.devices)
            np.testing.assert_array_equal(np.asarray(leaf)[: len(expected)], expected)
            assert not np.asarray(leaf)[len(expected) :].any()


def values_of(leaf):
    return np.asarray(dequantise(leaf) if isinstance(leaf, Blocks) else leaf, np.float32)


@pytest.mark.parametrize(
    ("lent", "own"),
    [("float32", "float32"), ("float32", "q8_0"), ("bfloat16", "float32"), ("q8_0", "bfloat16"), ("q8_0", "q4_0")],
)
def test_a_restricted_head_is_kept_as_the_draft_is(lent, own):
    plan = plan_mesh(1)
    target = placed(TARGET, plan, lent)
    params, leaves = random_target(target)
    draft = placed(DRAFT, plan, own, SharedEmbedding(TARGET, target.weights))
    given = share_embedding(draft, params)
    # The embedding stays the target's, whatever the draft keeps its own weights in.
    assert jax.tree.leaves(given["embed"])[0] is jax.tree.leaves(params["embed"])[0]
    head, shape = given["head"], draft.shared_params()["head"]
    assert jax.tree.structure(head) == jax.tree.structure(shape)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(head)] == [(x.shape, x.dtype) for x in jax.tree.leaves(shape)]
    rows = values_of(params["head"])[list(HEAD_IDS)]
    if own == lent or (lent, own) == ("bfloat16", "float32") or (lent, own) == ("q8_0", "float32"):
        np.testing.assert_array_equal(values_of(head), rows)
    elif own == "bfloat16":
        np.testing.assert_array_equal(head, rows.astype(BF16))
    else:
        expected = decode_blocks(encode_blocks(rows, own), own).reshape(rows.shape)
        np.testing.assert_array_equal(values_of(head), expected)
    assert np.abs(values_of(head) - leaves["head"][list(HEAD_IDS)]).max() < {"q4_0": 0.6}.get(own, 0.05)


def test_the_tokens_that_a_draft_can_propose():
    plan = plan_mesh(2)
    assert placed(DRAFT, plan).num_tokens == len(HEAD_IDS)
    assert placed(DRAFT, plan, vocab_limit=11).num_tokens == 3  # 2, 5 and 8
    assert placed(WHOLE, plan).num_tokens == VOCAB
    vocab = placed(DRAFT, plan).vocab
    assert (vocab.subset, vocab.local_size, vocab.vocab_size) == (HEAD_IDS, (len(HEAD_IDS) + 1) // 2, VOCAB)


# Shipped


@pytest.fixture
def drafts(tmp_path, monkeypatch):
    """An empty folder in the place of the shipped drafts."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(shipped.importlib.resources, "files", lambda package: folder)
    return folder


def test_the_shipped_draft_is_that_of_the_vocabulary_and_the_width(drafts):
    assert shipped.shipped_drafts() == [] and find_shipped_draft(TARGET, DIGEST) is None
    write_draft(drafts / "alike", vocabulary="0" * 64)
    assert find_shipped_draft(TARGET, DIGEST) is None
    write_draft(drafts / "fits")
    write_draft(drafts / "wide", dataclasses.replace(DRAFT, embed_dim=96))
    assert [draft.path.name for draft in shipped.shipped_drafts()] == ["alike", "fits", "wide"]
    assert find_shipped_draft(TARGET, DIGEST) == drafts / "fits"
    assert find_shipped_draft(dataclasses.replace(TARGET, embed_dim=96), DIGEST) == drafts / "wide"
    assert find_shipped_draft(dataclasses.replace(TARGET, embed_dim=32), DIGEST) is None
    assert find_shipped_draft(dataclasses.replace(TARGET, vocab_size=80), DIGEST) is None
    assert find_shipped_draft(TARGET, "0" * 64) == drafts / "alike"


def test_a_damaged_draft_is_left_out_with_one_warning(drafts, caplog):
    write_draft(drafts / "broken", vocabulary="0" * 64)
    write_draft(drafts / "fits")
    (drafts / "broken" / "jaxspec.json").write_text('{"format": "jaxspec"')
    for _ in range(2):
        assert find_shipped_draft(TARGET, DIGEST) == drafts / "fits"
        assert find_shipped_draft(TARGET, "0" * 64) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the draft broken, which ships with jaxspec, is damaged and left out: " in record.getMessage()


# Vocabularies


def test_digests_tell_vocabularies_apart():
    tokens = ["a", "b", "\udc80"]
    assert vocabulary_digest(tokens) == vocabulary_digest(tuple(tokens)) and len(DIGEST) == 64
    assert len({vocabulary_digest(t) for t in (tokens, tokens[::-1], tokens[:2], ["ab", "\udc80"], [*tokens, ""])}) == 5
    check_vocabulary(tokens, vocabulary_digest(tokens), (8, 8))
    with pytest.raises(ConfigError, match="does not fit the target.*digest 000000000000; that of this one is"):
        check_vocabulary(tokens, "0" * 64, (8, 8))
    with pytest.raises(ConfigError, match="embedding of width 9, the target's has 8"):
        check_vocabulary(tokens, vocabulary_digest(tokens), (8, 9))


# In use


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "model"
    write_model(folder, TARGET)
    return folder


@pytest.fixture
def load(model):
    def load(**options):
        return LLM(model, **options)

    return load


@pytest.fixture
def uncompiled(monkeypatch):
    """Models load, and do not decode."""
    monkeypatch.setattr(Engine, "prepare", lambda self, tokens=None: 0.0)
    monkeypatch.setattr("jaxspec.llm.remember_program", lambda *arguments: None)
    monkeypatch.setattr(Engine, "runner", types.SimpleNamespace(programs=()))


@pytest.mark.thorough
def test_a_draft_decodes_with_its_target(tmp_path, load, model, drafts):
    """Given by its path, or found by its vocabulary; blocks or numbers; and the text is the target's own."""
    write_draft(drafts / "small", quantize="q8_0")
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=4, ignore_eos=True)
    found = load(method=Chain(3))
    assert found.draft_path == drafts / "small"
    if internals(found).kernels.native:
        assert internals(found).models.draft.weights == Storage("q8_0")
    assert internals(found).params.draft["embed"] is internals(found).params.target["embed"]
    one = found.generate("w3 w1 w4", sampling)
    plain = found.with_method("ar").generate("w3 w1 w4", sampling)
    assert one.token_ids == plain.token_ids
    assert one.stats.speculative_decoding.num_draft_tokens > 0
    leaves = jax.tree.leaves(internals(found).params.draft)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)


def test_a_model_loaded_without_the_shipped_draft_has_none_for_other_methods_either(load, drafts, uncompiled):
    write_draft(drafts / "small")
    assert load().draft_path == drafts / "small" and load(draft="none").draft_path is None
    llm = load(method="ar").with_method("auto")
    assert (llm.draft_path, internals(llm).engine.method.name) == (None, "auto")
    with pytest.raises(ConfigError, match="needs a draft model"):
        llm.with_method("chain")


def test_drafts_of_other_targets_are_refused(tmp_path, load):
    write_draft(tmp_path / "other", vocabulary="0" * 64)
    with pytest.raises(ConfigError, match="the draft does not fit the target.*digest 000000000000"):
        load(draft=tmp_path / "other")
    write_draft(tmp_path / "wide", dataclasses.replace(DRAFT, embed_dim=96))
    with pytest.raises(ConfigError, match="an embedding of width 96, the target's has 64"):
        load(draft=tmp_path / "wide")


def test_a_draft_is_no_model(tmp_path):
    write_draft(tmp_path / "draft")
    assert open_weights(tmp_path / "draft").vocabulary == DIGEST
    with pytest.raises(ConfigError, match="draft: is a draft without an embedding of its own; give it as the draft"):
        LLM(tmp_path / "draft")


def test_a_damaged_shipped_draft_stops_only_methods_that_need_it(drafts, load, uncompiled, caplog):
    """Its arrays, which are read last."""
    write_draft(drafts / "small")
    shutil.rmtree(drafts / "small" / "arrays")
    with pytest.raises(CheckpointError, match="small"):
        load(method=Chain(3))
    with pytest.raises(CheckpointError, match="small"):
        load(draft=drafts / "small")
    assert not caplog.records
    llm = load()
    assert (llm.draft_path, internals(llm).params.draft, internals(llm).models.draft) == (None, None, None)
    assert internals(llm).params.target["embed"].shape == (VOCAB, TARGET.embed_dim)
    (record,) = caplog.records
    assert "the draft small, which ships with jaxspec, is damaged and left out: " in record.getMessage()
