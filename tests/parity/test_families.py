"""Tiny random models of every family against Hugging Face transformers on torch: logits and greedy tokens.

Each model is made by transformers, saved as safetensors and opened through jaxspec's own door. Plain geometries are in
tests/checkpoint/test_family_golden.py, which needs no torch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from marks import fast_part
from tiny_models import empty_cache, logits_after, on_one_device, relative_error, step_logits

from jaxspec.checkpoint.load import open_weights
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

LENGTH = 40
SLOTS = 64
TOLERANCE = 1e-4

SIZES = dict(
    vocab_size=101, hidden_size=48, intermediate_size=70, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip

Llama, Mistral = transformers.LlamaConfig, transformers.MistralConfig
Qwen2, Qwen3 = transformers.Qwen2Config, transformers.Qwen3Config
Mixtral, Qwen2Moe = transformers.MixtralConfig, transformers.Qwen2MoeConfig
Phi3 = transformers.Phi3Config
Gemma2, Gemma3 = transformers.Gemma2Config, transformers.Gemma3TextConfig
Gemma4 = transformers.Gemma4TextConfig
GptOss = transformers.GptOssConfig
Olmo3, SeedOss, SmolLM3 = transformers.Olmo3Config, transformers.SeedOssConfig, transformers.SmolLM3Config
Exaone4, Glm4 = transformers.Exaone4Config, transformers.Glm4Config
Granite, GraniteHybrid = transformers.GraniteConfig, transformers.GraniteMoeHybridConfig
Ministral3 = transformers.Ministral3Config

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=256,
    short_factor=[1 + i / 4 for i in range(4)], long_factor=[2 + i for i in range(4)],
)  # fmt: skip
QWEN_EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20)
GPT_OSS = dict(head_dim=12, num_local_experts=6, num_experts_per_tok=3, sliding_window=9)
GEMMA = dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=9, tie_word_embeddings=True)

MULTIPLIERS = dict(embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=5.0)
GRANITE_DENSE = MULTIPLIERS | dict(
    num_local_experts=0, shared_intermediate_size=70, layer_types=["attention"] * 2, hidden_size=96,
    num_attention_heads=6, mamba_n_heads=4,
)  # fmt: skip
PARTIAL_LONGROPE = dict(
    LONGROPE, partial_rotary_factor=0.75, short_factor=[1.0, 1.5, 2.5], long_factor=[2.0, 3.0, 4.0],
    original_max_position_embeddings=400,
)  # fmt: skip
MINISTRAL_ROPE = YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)

# Layers with a window and without one in turn.
GEMMA4 = dict(
    head_dim=8, global_head_dim=16, sliding_window=9, num_hidden_layers=6, tie_word_embeddings=True,
    layer_types=["sliding_attention", "full_attention"] * 3, vocab_size_per_layer_input=101,
    hidden_size_per_layer_input=0,
)  # fmt: skip

# The families of 2026. Four layers where one in four differs.
DENSE = {
    "olmo3": (
        Olmo3, dict(num_hidden_layers=4, sliding_window=9, rope_parameters={
            "full_attention": YARN, "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
        })
    ),
    "seed-oss": (SeedOss, dict(head_dim=12)),
    "seed-oss-out-bias": (SeedOss, dict(head_dim=12, attention_bias=False, attention_out_bias=True)),
    "smollm3": (SmolLM3, dict(num_hidden_layers=5)),
    "exaone4": (
        Exaone4, dict(num_hidden_layers=4, sliding_window=9, sliding_window_pattern=4, rope_parameters=LLAMA3)
    ),
    "exaone4-full": (Exaone4, dict(sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True)),
    "glm4": (Glm4, dict(head_dim=16, eos_token_id=2)),
    "glm4-no-bias": (Glm4, dict(head_dim=20, eos_token_id=2, attention_bias=False, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.6,
    ))),
    "granite": (Granite, MULTIPLIERS),
    "granite-dense": (GraniteHybrid, GRANITE_DENSE | dict(position_embedding_type="rope")),
    "granite-dense-nope": (GraniteHybrid, GRANITE_DENSE | dict(tie_word_embeddings=True)),
    "gemma4-small": (
        Gemma4, GEMMA4 | dict(
            hidden_size_per_layer_input=8, num_kv_shared_layers=2, use_double_wide_mlp=True,
            final_logit_softcapping=30.0,
        )
    ),
    "gemma4-keys-are-values": (Gemma4, GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "gemma4-experts": (
        Gemma4, GEMMA4 | dict(
            attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=6, top_k_experts=2,
            moe_intermediate_size=24,
        )
    ),
    "phi4-mini": (Phi3, dict(rope_parameters=PARTIAL_LONGROPE, original_max_position_embeddings=400)),
    "ministral3": (Ministral3, dict(head_dim=12, rope_parameters=MINISTRAL_ROPE)),
    "ministral3-sliding": (Ministral3, dict(head_dim=8, sliding_window=9, rope_parameters=MINISTRAL_ROPE)),
}  # fmt: skip
Lfm2, Qwen35 = transformers.Lfm2Config, transformers.Qwen3_5TextConfig
Qwen35Moe, Qwen3Next = transformers.Qwen3_5MoeTextConfig, transformers.Qwen3NextConfig
DELTA = dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[2, 0, 0],
        mrope_interleaved=True,
    ),
)  # fmt: skip
# Layers with a recurrence between those with attention.
HYBRID = {
    "lfm2": (Lfm2, dict(
        num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], block_auto_adjust_ff_dim=False,
    )),
    "lfm2-adjusted": (Lfm2, dict(
        num_hidden_layers=3, layer_types=["full_attention", "conv", "full_attention"], conv_L_cache=4,
        block_multiple_of=16,
    )),
    "qwen3.5": (Qwen35, dict(num_hidden_layers=4, **DELTA)),
    "qwen3.5-moe": (Qwen35Moe, DELTA | QWEN_EXPERTS | dict(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=30,
    )),
    "qwen3-next": (Qwen3Next, DELTA | QWEN_EXPERTS | dict(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=30,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    )),
    "qwen3.5-one-group": (Qwen35, DELTA | dict(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=3,
        linear_num_key_heads=3, linear_value_head_dim=12,
    )),
}  # fmt: skip
MODELS = DENSE | HYBRID | {
    "llama": (Llama, {}),
    "llama-one-group": (Llama, dict(num_attention_heads=4, num_key_value_heads=4, hidden_size=64, rms_norm_eps=1e-3)),
    "llama-one-kv-head": (Llama, dict(num_attention_heads=3, num_key_value_heads=1)),
    "llama-head-dim": (Llama, dict(head_dim=20)),
    "llama-llama3-rope": (Llama, dict(rope_parameters=LLAMA3)),
    "llama-linear-rope": (Llama, dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=4.0))),
    "llama-tied": (Llama, dict(tie_word_embeddings=True)),
    "mistral-sliding": (Mistral, dict(sliding_window=9, head_dim=12)),
    "qwen2-tied": (Qwen2, dict(tie_word_embeddings=True)),
    "qwen2-sliding": (Qwen2, dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen2-window-unused": (Qwen2, dict(use_sliding_window=False, sliding_window=9, max_window_layers=1)),
    "qwen3-tied": (Qwen3, dict(head_dim=8, tie_word_embeddings=True)),
    "qwen3-sliding": (
        Qwen3, dict(head_dim=20, num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    ),
    "llama-yarn-settings": (
        Llama, dict(rope_parameters=YARN | dict(beta_fast=8.0, beta_slow=2.0, truncate=False, attention_factor=1.3))
    ),
    "llama-dynamic": (Llama, dict(rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, factor=4.0))),
    "mixtral-sliding": (Mixtral, dict(num_local_experts=4, num_experts_per_tok=4, sliding_window=9)),
    "qwen2-moe-sparse": (
        Qwen2Moe,
        QWEN_EXPERTS | dict(
            shared_expert_intermediate_size=30, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3],
            norm_topk_prob=True,
        ),
    ),
    "gemma2-untied-uncapped": (
        Gemma2, GEMMA | dict(tie_word_embeddings=False, attn_logit_softcapping=None, final_logit_softcapping=None)
    ),
    "gemma3": (
        Gemma3, GEMMA | dict(num_hidden_layers=7, rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        })
    ),
    "phi3-sliding": (Phi3, dict(sliding_window=9)),
    "phi3-longrope": (Phi3, dict(rope_parameters=LONGROPE, original_max_position_embeddings=256)),
    "gpt-oss-clamped": (
        GptOss,
        GPT_OSS | dict(
            swiglu_limit=0.5, swiglu_alpha=1.2, layer_types=["full_attention", "sliding_attention"],
            rope_parameters=YARN | dict(truncate=False),
        ),
    ),
}  # fmt: skip


def make_model(name):
    """A random model whose every parameter matters: norms differ from one, biases from zero, weights have unit gain."""
    config_class, changes = MODELS[name]
    config = config_class(**{**SIZES, **changes}, attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            elif parameter_name.endswith(("bias", "sinks")):
                parameter.copy_(noise / 2)
            else:
                # Gemma stores its scales less one.
                less_one = config.model_type in ("gemma2", "gemma3_text")
                less_one |= hasattr(config, "linear_num_key_heads") and "linear" not in parameter_name
                parameter.copy_(noise / 4 + (0 if less_one else 1))
    return model


def open_saved(model, folder, dtype="float32"):
    """Save with transformers, load with jaxspec."""
    model.save_pretrained(folder, safe_serialization=True)
    weights = open_weights(folder)
    placement = Placement(weights.config, plan_mesh(1), np.dtype(dtype))
    return placement, weights.load(placement)


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].float().numpy()


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], length).astype(np.int32)


def prefilled_logits(params, cfg, tokens, chunk=None, places=None, slots=SLOTS):
    """Logits at every place, or some: what comes before it prefilled (in chunks), itself decoded."""

    counts = np.arange(tokens.shape[0]) if places is None else np.array(places)
    run = on_one_device(lambda params, tokens, count: logits_after(params, cfg, tokens, count, slots, chunk))
    if cfg.recurrent is not None and cfg.recurrent.kind == "delta":  # many loops, which a batch makes slow
        return np.stack([run(params, tokens, jnp.int32(count)) for count in counts])

    def run_all(params, tokens):
        return jax.vmap(lambda count: logits_after(params, cfg, tokens, count, slots, chunk))(jnp.array(counts))

    return on_one_device(run_all)(params, tokens)


def decoded_logits(params, cfg, tokens, slots=SLOTS):
    """Logits at every place, token by token."""

    def run(params, tokens):
        def step(cache, token):
            logits, cache = step_logits(params, cfg, token, cache)
            return cache, logits

        return jax.lax.scan(step, empty_cache(cfg, slots), tokens)[1]

    return on_one_device(run)(params, tokens)


def window_logits(params, cfg, tokens):
    """Logits at every place in one causal pass over a window; its mask holds no sliding window."""

    def run(params, tokens):
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        mask = rows[:, None] >= rows[None, :]
        hidden, _ = forward(params, cfg, tokens, rows, empty_cache(cfg, SLOTS), mask)
        return vocab_logits(params, cfg, hidden)

    return on_one_device(run)(params, tokens)


# The first setting of each family goes through every kind of pass, the others through those that differ most.
FIRST = set({family: name for name, (family, _) in reversed(MODELS.items())}.values())


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path):
    model = make_model(name)
    placement, params = open_saved(model, tmp_path)
    cfg, tokens = placement.cfg, tokens_of(LENGTH)
    expected = reference_logits(model, tokens)
    assert relative_error(decoded_logits(params, cfg, tokens), expected) < TOLERANCE
    # Boundaries inside and outside of the sliding window of nine positions.
    assert relative_error(prefilled_logits(params, cfg, tokens, chunk=7), expected) < TOLERANCE
    if name not in FIRST:
        return
    assert relative_error(prefilled_logits(params, cfg, tokens), expected) < TOLERANCE
    if cfg.sliding_window is None:
        assert relative_error(window_logits(params, cfg, tokens), expected) < TOLERANCE


@pytest.mark.parametrize("name", fast_part(DENSE | HYBRID, lambda name: name in ("exaone4", "ministral3", *HYBRID)))
def test_logits_of_300_tokens(name, tmp_path):
    """Prompts of 1 to 300 tokens, decoded one by one, and some of them prefilled in chunks."""
    model = make_model(name)
    placement, params = open_saved(model, tmp_path)
    cfg, tokens, places = placement.cfg, tokens_of(300), [0, 62, 63, 64, 127, 200, 299]
    expected = reference_logits(model, tokens)
    errors = [
        relative_error(decoded_logits(params, cfg, tokens, 384), expected),
        relative_error(prefilled_logits(params, cfg, tokens, 64, places, 384), expected[places]),
    ]
    print(name, *(f"{error:.1e}" for error in errors))
    assert max(errors) < TOLERANCE


WRAPPED = {
    "mistral3": ("Mistral3", "pixtral", Ministral3(**SIZES, head_dim=12, rope_parameters=MINISTRAL_ROPE)),
    "gemma3": ("Gemma3", "siglip_vision_model", Gemma3(**SIZES | GEMMA | dict(num_hidden_layers=7))),
    "gemma4": ("Gemma4", "gemma4_vision", Gemma4(**SIZES | GEMMA4 | dict(pad_token_id=0))),
    "qwen3_5": ("Qwen3_5", "qwen3_5_vision", Qwen35(**SIZES | DELTA | dict(num_hidden_layers=4))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_beside_a_vision_tower(name, tmp_path, caplog):
    kind, tower, text = WRAPPED[name]
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    if name == "qwen3_5":
        sizes = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=48)
    vision = transformers.AutoConfig.for_model(tower, **sizes, patch_size=14)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    config.tie_word_embeddings = name.startswith("gemma")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) / (4 if parameter.ndim < 2 else parameter.shape[-1] ** 0.5))
    placement, params = open_saved(model, tmp_path)
    projector = "embed_vision" if name == "gemma4" else "multi_modal_projector"
    left_out = "visual" if name == "qwen3_5" else f"{projector}, vision_tower"
    assert f"only the text model is loaded; left out: {left_out}" in caplog.text
    tokens = tokens_of(LENGTH)
    assert relative_error(decoded_logits(params, placement.cfg, tokens), reference_logits(model, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_saved_in_bfloat16_loaded_as_float32(name, tmp_path):
    placement, params = open_saved(make_model(name).to(torch.bfloat16), tmp_path)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    tokens = tokens_of(LENGTH)
    # The same rounded weights in float32; loaded anew, for `to` rounds the rotary frequencies too.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert model.lm_head.weight.dtype == torch.float32
    expected = reference_logits(model, tokens)
    assert relative_error(decoded_logits(params, placement.cfg, tokens), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3-rope", "mistral-sliding", "qwen2-sliding", "qwen3-tied"])
def test_greedy_generation_through_the_engine(name, tmp_path):
    model = make_model(name)
    placement, params = open_saved(model, tmp_path)
    engine = Engine(Models(placement), Autoregressive())
    engine.prepare()
    # Three chunks and more of the smaller size; the sliding window crosses their boundaries.
    for length in (1, 40, 65, 200):
        prompt = tokens_of(length, seed=length)
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        with engine.open(ModelParams(params), prompt.tolist(), sampling, 0) as session:
            while not session.done:
                session.step()
        assert session.tokens[length:] == generate(model, prompt, 40)


def generate(model, prompt, count):
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor(prompt[None].astype(np.int64))
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt) :].tolist()
