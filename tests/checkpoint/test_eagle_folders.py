"""Folders of feature drafts: published names map completely, what does not fit is refused with both values."""

import dataclasses
import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from eagle_folders import CONFIG, IDS, TARGET_DIM, VOCAB, random_eagle1, random_tensors, write_folder, write_speculators
from safetensors.numpy import load_file
from test_published_names import Source, Tensor
from tiny_models import FAMILIES

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.eagle import canonical_name, read_draft_config, split_leaves, write_eagle3
from jaxspec.checkpoint.keymaps import check_accounted
from jaxspec.checkpoint.load import Weights, open_weights
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.loading import OpenModels
from jaxspec.models.features import NORMED
from jaxspec.models.params import declare_leaves
from jaxspec.runtime.mesh import plan_mesh

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_eagle.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_tensor_has_a_place(name):
    model = PUBLISHED[name]
    kept = {n: tuple(shape) for n, shape in model["tensors"].items() if n not in ("d2t", "t2d")}
    tensors = {canonical_name(n): Tensor(shape) for n, shape in kept.items()}
    rows = model["tensors"].get("d2t")
    ids = None if rows is None else np.arange(rows[0]) * 4
    cfg = read_draft_config(Path("config.json"), model["config"], tensors, ids)
    check_accounted(Source(cfg, tensors))
    held = sum(math.prod(info.shape) for info in declare_leaves(cfg, "float16").values())
    assert held == sum(math.prod(shape) for shape in kept.values())
    assert abs(2 * held / 1e9 - model["gigabytes"]) < 0.05
    assert cfg.features.resolve(model["target_layers"]).layers == tuple(model["layers"])
    assert cfg.features.target_dim == model["target_dim"]
    lost = next(n for n in tensors if "up_proj" in n)
    with pytest.raises(CheckpointError, match="missing"):
        check_accounted(Source(cfg, {n: tensor for n, tensor in tensors.items() if n != lost}))


def leaves_of(path):
    weights = open_weights(path)
    infos = declare_leaves(weights.config, "float32")
    return weights.config, {name: weights.read(name, info) for name, info in infos.items()}


@pytest.mark.parametrize(
    "options", [{}, {"reduced": False, "embedding": True}, {"fc_norm": "each"}, {"fc_norm": "whole"}]
)
def test_what_is_written_is_what_was_read(options, tmp_path):
    tensors = random_tensors(3, **options)
    norms = {"fc_norm": options.get("fc_norm") == "each", "norm_before_fc": options.get("fc_norm") == "whole"}
    inner = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}
    cfg, leaves = leaves_of(write_folder(tmp_path / "given", tensors, eagle_config=inner, rope_theta=300.0, **norms))
    assert cfg.features.layers == (1, 1, 2) and cfg.rope.theta == 300
    assert cfg.head_ids == (() if options.get("reduced") is False else tuple(IDS))
    assert cfg.shares_embedding != options.get("embedding", False)
    write_eagle3(tmp_path / "written", cfg, leaves)
    again, back = leaves_of(tmp_path / "written")
    assert again == cfg
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(back[name], leaf)
    for name, tensor in load_file(tmp_path / "written" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, tensors[name])
    assert len(split_leaves(cfg, leaves)) == len(tensors) - 2 * ("d2t" in tensors)


def test_a_draft_can_be_converted(tmp_path):
    cfg, leaves = leaves_of(write_folder(tmp_path / "given", random_tensors(3)))
    convert(tmp_path / "given", tmp_path / "native")
    again, back = leaves_of(tmp_path / "native")
    assert again == cfg
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(back[name], leaf)


class Refused(NamedTuple):
    """A folder that does not open: its tensors, its settings, and what the error says."""

    tensors: dict
    settings: dict
    message: str


def changed(**tensors):
    made = random_tensors(0) | tensors
    return {name: tensor for name, tensor in made.items() if tensor is not None}


REFUSED = {
    "draft vocabulary": Refused(changed(), {"draft_vocab_size": 50}, "draft_vocab_size is 50, and the head has 67"),
    "members": Refused(changed(t2d=np.zeros(VOCAB, bool)), {}, "d2t names 67 tokens and t2d 0"),
    "no head": Refused(changed(**{"lm_head.weight": None}), {}, "d2t and no lm_head.weight"),
    "states": Refused(changed(), {"target_hidden_size": 40}, r"fc.weight is \[48, 144\].*3 states of a target 40 wide"),
    "two lists": Refused(
        changed(),
        {LAYER_IDS: [1, 1, 2], "eagle_config": {LAYER_IDS: [1, 1, 2]}},
        r"\[1, 1, 2\]; but eagle_config means the states \[2, 2, 3\]",
    ),
    "layers": Refused(changed(), {"num_hidden_layers": 3}, "num_hidden_layers is 3, but the files hold 1 layers"),
    "both norms": Refused(changed(), {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc is true"),
    "unknown": Refused(changed(), {"gate_of_states": 0.3}, "gate_of_states.*not known"),
    "another draft": Refused(changed(), {"architectures": ["DFlashDraftModel"]}, "this architecture"),
    "model type": Refused(changed(), {"model_type": "deepseek_v3"}, "llama and qwen3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_refused(name, tmp_path):
    tensors, settings, message = REFUSED[name]
    write_folder(tmp_path, tensors, **settings)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_weights(tmp_path)


def test_other_speculators_are_refused(tmp_path):
    write_speculators(tmp_path, random_tensors(0, first="layers.0"), speculators_model_type="dflash")
    with pytest.raises((CheckpointError, ConfigError), match="speculators_model_type is 'dflash'.*eagle3"):
        open_weights(tmp_path)


def test_the_ids_of_layers_mean_what_enters_or_leaves_them(tmp_path):
    tensors = random_tensors(0, first="layers.0")
    entering = write_speculators(tmp_path / "a", tensors, eagle_aux_hidden_state_layer_ids=[2, 5, 9])
    leaving = write_folder(
        tmp_path / "b", random_tensors(0), eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}
    )
    assert open_weights(entering).config.features.layers == (2, 5, 9)
    assert open_weights(leaving).config.features.layers == (3, 6, 10)
    assert open_weights(write_folder(tmp_path / "c", random_eagle1())).config.features.layers == (NORMED,)


TOKENS = [f"t{i}" for i in range(VOCAB)]


def pair(target, path):
    """Placements of a target of a geometry and the draft in a folder."""

    weights = Weights(Path("target"), target, (), None, None, None)  # pyright: ignore[reportArgumentType]
    plan = plan_mesh(1)
    return OpenModels(weights, open_weights(path), TOKENS).place(plan, plan, "float32")


def test_a_pair_that_does_not_fit_is_refused_with_both_values(tmp_path):
    target = FAMILIES["llama"]
    path = write_folder(tmp_path / "fits", random_tensors(0))
    _, draft = pair(target, path)
    assert draft is not None and draft.cfg.features is not None and draft.cfg.features.layers == (1, 1, 2)
    wide = dataclasses.replace(target, embed_dim=64)
    with pytest.raises(ConfigError, match=f"hidden states of {TARGET_DIM}, the target has 64"):
        pair(wide, path)
    with pytest.raises(ConfigError, match=f"vocabulary of {VOCAB}, the target has 102"):
        pair(dataclasses.replace(target, vocab_size=102), path)
    deep = write_folder(
        tmp_path / "deep", random_tensors(0), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}
    )
    with pytest.raises(ConfigError, match="hidden state 29, the target has 2 layers"):
        pair(target, deep)
    alone = write_folder(tmp_path / "alone", random_tensors(0, dim=32), hidden_size=32, target_hidden_size=TARGET_DIM)
    with pytest.raises((CheckpointError, ConfigError), match="width 48, the draft has 32"):
        open_weights(alone)


class Runs:
    """A pickle that would run a command."""

    def __reduce__(self):
        return (print, ("it ran",))


@pytest.mark.parametrize("payload", [{"fc.weight": Runs()}, Runs(), [1, 2]])
def test_a_pickle_that_asks_for_more_is_not_opened(payload, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
    with pytest.raises(CheckpointError, match="only as pickles"):
        open_weights(tmp_path)
    assert "it ran" not in capsys.readouterr().out
