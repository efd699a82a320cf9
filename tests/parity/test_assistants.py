"""Gemma 4's assistants against transformers on torch: every node of drafted trees, over rounds of decoding."""

import numpy as np
import pytest
import torch
import transformers

from jaxspec.checkpoint.load import open_weights
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.loading import OpenModels
from jaxspec.methods.core.round import read_rounds
from jaxspec.methods.specexec import SpecExec
from jaxspec.runtime.mesh import plan_mesh

V, WINDOW, TOLERANCE = 128, 8, 1e-4
SIZES = dict(
    vocab_size=V, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32, sliding_window=WINDOW,
    max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
TARGETS = {
    "sharing": dict(
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=V, num_kv_shared_layers=2, use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
    ),
    "keys are values": dict(
        hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, vocab_size_per_layer_input=0
    ),
}  # fmt: skip


def shake(model, seed):
    """Every parameter and every factor of a layer matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif "norm" in name or "layer_scalar" in name:
                tensor.copy_(1 + noise / 4)
    return model.eval()


def save_pair(folder, name, ordered):
    """Folders of a target and its assistant, and their models."""
    kinds = TARGETS[name]
    made = transformers.Gemma4TextConfig(
        **SIZES, **kinds, hidden_size=48, intermediate_size=64, num_hidden_layers=6, layer_types=KINDS * 3,
        attn_implementation="eager",
    )  # fmt: skip
    target = shake(transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32), 0)
    alike = {key: kinds[key] for key in ("attention_k_eq_v", "num_global_key_value_heads") if key in kinds}
    text = transformers.Gemma4TextConfig(
        **SIZES, **alike, hidden_size=24, intermediate_size=40, num_hidden_layers=3, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, num_kv_shared_layers=3, layer_types=[KINDS[0], KINDS[0], KINDS[1]],
        attn_implementation="eager",
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=48, use_ordered_embeddings=ordered, num_centroids=16,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    assistant = shake(transformers.Gemma4AssistantForCausalLM(config), 1)
    if ordered:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(V))
    with torch.no_grad():  # proposals are sure enough, so that trees grow deep
        assistant.model.norm.weight *= 3
    target.save_pretrained(folder / "target")
    assistant.save_pretrained(folder / "assistant")
    return target, assistant


def scores_along(target, assistant, text, path):
    """Log-probabilities after `text` and after each token of a drafted `path`, [1 + len(path), V]."""
    embed, rows = target.get_input_embeddings(), []
    with torch.no_grad():
        out = target.model(torch.tensor([text[:-1]]), use_cache=False, return_shared_kv_states=True)
        state, position = out.last_hidden_state[:, -1:], torch.tensor([[len(text) - 1]])
        for token in (text[-1], *path):
            inputs = torch.cat([embed(torch.tensor([[token]])), state], dim=-1)
            made = assistant(
                inputs_embeds=inputs, position_ids=position, shared_kv_states=dict(out.shared_kv_states)
            )  # fmt: skip
            state = made.last_hidden_state
            rows.append(made.logits[0, 0].log_softmax(-1).numpy())
    return np.stack(rows)


@pytest.mark.parametrize(("name", "ordered"), [("sharing", False), ("keys are values", False), ("sharing", True)])
def test_trees_have_the_scores_of_transformers(name, ordered, tmp_path, caplog):
    target, assistant = save_pair(tmp_path, name, ordered)
    opened = OpenModels(open_weights(tmp_path / "target"), open_weights(tmp_path / "assistant"))
    assert ("all tokens are scored" in caplog.text) == ordered
    assistant.config.use_ordered_embeddings = False  # which is what is computed here
    models = opened.place(plan_mesh(1), plan_mesh(1), "float32", "float32")
    method = SpecExec(8, width=2, branch=3, depth=4, ranking="probability")
    params, engine = opened.load(models), Engine(models, method, 150)
    engine.prepare()
    runner, rng, deepest = engine.runner, np.random.default_rng(5), 0
    for length in (2, 20, 70):
        text = rng.integers(0, V, length).tolist()
        state = runner.resume(params, runner.start(0, None), np.array(text, np.int32), 0)
        request = runner.place_request(SamplingParams(), 0)
        for _ in range(4):
            state, round_, _ = runner.round(params, state, request, 1)
            tree = state.draft.tree
            token, parent, own, child, score = (
                np.asarray(x) for x in (tree.token, tree.parent, tree.score, tree.child_token, tree.child_score)
            )
            for row in range(int(tree.size)):
                path, at = [], row
                while at:
                    path.insert(0, int(token[at]))
                    at = parent[at]
                expected = scores_along(target, assistant, text, path)[-1]
                most, found = TOLERANCE * np.ptp(expected), score[row] - own[row]
                np.testing.assert_allclose(found, np.sort(expected)[::-1][:3], rtol=0, atol=most)
                np.testing.assert_allclose(found, expected[child[row]], rtol=0, atol=most)
                deepest = max(deepest, len(path))
            (output,) = read_rounds(round_)
            text += output.tokens
    assert deepest >= 2
