"""Folders of Gemma 4's assistants: found, refused, converted, and in use with their target."""

import json

import jax
import numpy as np
import pytest
from make import hf_config, random_tensors, tiny_config, write_hf
from native_models import write_tokenizer
from safetensors.numpy import save_file

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.hf import HFSource
from jaxspec.checkpoint.load import open_weights
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.llm import LLM, internals
from jaxspec.loading import open_model, open_models, plan_meshes
from jaxspec.methods.chain import Chain
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

TARGET = tiny_config("gemma4_text", max_context=512)
# As wide as no other part, and with keys in the file that are not used.
TEXT = tiny_config(
    "gemma4_text", embed_dim=32, mlp_dim=48, num_layers=2, sliding_layers=(True, False),
    kinds=LayerKinds(32, 2), logit_softcap=None,
)  # fmt: skip


def write_assistant(folder, text=None, tensors=None, **changes):
    """An assistant of `TARGET`; `text` overrides settings of its layers, `tensors` what the file holds."""
    rng, D = np.random.default_rng(2), TARGET.embed_dim
    made = random_tensors(TEXT, 1) | {
        "pre_projection.weight": rng.normal(0, 0.2, (32, 2 * D)).astype(np.float32),
        "post_projection.weight": rng.normal(0, 0.2, (D, 32)).astype(np.float32),
        "masked_embedding.centroids.weight": np.zeros((4, 32), np.float32),
        "masked_embedding.token_ordering": np.arange(TEXT.vocab_size),
    }  # fmt: skip
    config = {
        "model_type": "gemma4_assistant", "backbone_hidden_size": D, "use_ordered_embeddings": True,
        "num_centroids": 4, "centroid_intermediate_top_k": 2, "tie_word_embeddings": True,
        "text_config": hf_config(TEXT) | {"num_kv_shared_layers": 2} | (text or {}),
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(made | (tensors or {}), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma") / "model"
    tensors = {name: 4 * tensor for name, tensor in random_tensors(TARGET).items()}
    write_hf(folder, TARGET, tensors)
    write_tokenizer(folder, TARGET.vocab_size)
    return folder


def place(model, draft):
    """Placements of a pair."""
    method = Chain(3)
    opened = open_models(model, draft, method)
    return opened.place(*plan_meshes(EngineConfig(), method, opened), "float32")


def test_it_takes_the_last_state_and_the_keys_of_two_layers(target, tmp_path, caplog):
    cfg = place(target, write_assistant(tmp_path / "assistant")).draft.cfg
    assert cfg.features.kind == "assistant" and "all tokens are scored" in caplog.text
    # The target's layers 2 and 3 share the keys of 0 and 1.
    assert cfg.features.layers == (-1, -2, -3) and TARGET.states_dim(cfg.features.layers) == cfg.features.states_dim
    assert (cfg.embed_scale, cfg.attention_layers) == (TARGET.embed_scale, (0, 1))


REFUSED = {
    "another width": (dict(backbone_hidden_size=48), {}, {}, "fc.weight is .32, 128., not .32, 96."),
    "other layers": ({}, dict(num_kv_shared_layers=1), {}, "num_kv_shared_layers is 1; all layers of an assistant"),
    "wide": ({}, dict(use_double_wide_mlp=True), {}, "use_double_wide_mlp is True; assistants do not have it"),
    "inputs": ({}, dict(hidden_size_per_layer_input=8), {}, "hidden_size_per_layer_input is 8; assistants do not"),
    "experts": ({}, dict(enable_moe_block=True), {}, "enable_moe_block is True; assistants do not have it"),
    "another model": ({}, dict(model_type="llama"), {}, "lacks text_config of model_type 'gemma4_text'"),
    "a setting": (dict(new_thing=3), {}, {}, "new_thing is 3; this setting is not known"),
    "a tensor": ({}, {}, {"more.weight": np.zeros(3, np.float32)}, "1 unexpected .more.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_is_another_is_refused(name, tmp_path):
    changes, text, tensors, message = REFUSED[name]
    folder = write_assistant(tmp_path / "assistant", text, tensors, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_weights(folder)


def test_pairs_that_do_not_fit_are_refused(target, tmp_path, monkeypatch):
    assistant = write_assistant(tmp_path / "assistant")
    others = {
        "llama": (tiny_config("llama", max_context=512), "an assistant needs Gemma 4, the target is llama"),
        "wide": (tiny_config("gemma4_text", embed_dim=96), "it was made for hidden states of 64, the target has 96"),
        "heads": (
            tiny_config("gemma4_text", kinds=LayerKinds(16, 2, sharing=2, sharing_mlp_dim=192, inputs_dim=32)),
            "it was made for 2 KV heads of 32, layer 1 of the target has 2 of 16",
        ),
    }  # fmt: skip
    for name, (cfg, _) in others.items():
        write_hf(tmp_path / name, cfg)
        write_tokenizer(tmp_path / name, cfg.vocab_size)
    monkeypatch.setattr(HFSource, "read", None)
    for name, (_, message) in others.items():
        with pytest.raises(ConfigError, match=message):
            place(tmp_path / name, assistant)
    with pytest.raises(ConfigError, match="is a draft that is fed a target's hidden states; give it as the draft"):
        open_models(assistant, None, Chain(3))


@pytest.mark.thorough
def test_it_decodes_with_its_target_and_so_does_its_conversion(target, tmp_path):
    assistant = write_assistant(tmp_path / "assistant")
    native = convert(assistant, tmp_path / "native").path
    made, found = (open_model("draft", path) for path in (assistant, native))
    assert found.config == made.config
    placement = Placement(made.config, plan_mesh(1), np.dtype("float32"))
    for one, other in zip(jax.tree.leaves(made.load(placement)), jax.tree.leaves(found.load(placement)), strict=True):
        np.testing.assert_array_equal(one, other)
    llm = LLM(target, draft=native, method=Chain(3))
    parts = internals(llm)
    assert parts.params.draft["embed"] is parts.params.target["embed"]
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    one, plain = (each.generate("w3 w1 w4", sampling) for each in (llm, llm.with_method("ar")))
    assert one.token_ids == plain.token_ids
    assert one.stats.speculative_decoding.num_draft_tokens > 0
