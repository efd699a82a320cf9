"""Make tests/golden/smollm2_greedy.json: what Hugging Face's own Llama says, greedily, with the default model.

    python -m pip install -e '.[parity]'        (torch)
    python tools/make_golden.py [--output tests/golden/smollm2_greedy.json] [--threads 2]

The weights of the default GGUF file are dequantised by the `gguf` package and put into transformers'
`LlamaForCausalLM` in float32; jaxspec's readers and models take no part in it. Generation is greedy and runs on past
end-of-sequence tokens, so that every prompt has the same number of output tokens.

Prompt ids come from jaxspec's tokenizer, and must be those of transformers' own GGUF converter once the digit rule
that it drops is put back.

The prompts are those of the file that is there; a case of a name and a prompt alone is a new one.
Each case holds `name`, `messages` (chat) or `text` (raw), `prompt_ids`, `output_ids`, and `margins`: by
how much the logit of each chosen token beats the second best. A small one (the smallest is `min_margin`) is a near tie,
which another order of summation may decide the other way.
"""

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers

from jaxspec.checkpoint.shipped import SHA256, default_model_path
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer

NUM_TOKENS = 128
OUTPUT = Path(__file__).parents[1] / "tests/golden/smollm2_greedy.json"


def load_reference(path: Path) -> Any:
    """transformers' Llama in float32 with the weights of a Llama GGUF file."""
    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        eos_token_id=None,  # generation runs past it
    )
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weight = _undo_permutation(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = _undo_permutation(weight, kv_heads)
        weights[name] = torch.from_numpy(weight.copy())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config).float()
    model.load_state_dict(weights, strict=True)
    model.tie_weights()
    return model.eval()


def generate_greedily(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Output ids of a prompt, and the lead of each chosen logit over the second best."""
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=None,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    output = out.sequences[0, len(prompt) :].tolist()
    assert len(output) == NUM_TOKENS
    top = torch.topk(torch.cat(out.logits), 2).values
    return output, (top[:, 0] - top[:, 1]).tolist()


def encode(tokenizer: Tokenizer, reference: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a prompt, on which both tokenizers must agree."""
    if isinstance(prompt, str):
        ids, text = tokenizer.encode(prompt), prompt
    else:
        ids, text = tokenizer.encode_chat(prompt), tokenizer.apply_chat_template(prompt)
        assert text == reference.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    expected = reference(text, add_special_tokens=False)["input_ids"]
    if ids != expected:
        raise SystemExit(f"the tokenizers disagree on {text[:60]!r}:\n{ids}\n{expected}")
    return ids


def load_reference_tokenizer(path: Path) -> Any:
    """transformers' tokenizer of a GGUF file, with the digits split one by one as `tokenizer.ggml.pre` asks."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    split, backend = tokenizers.pre_tokenizers, tokenizer.backend_tokenizer
    backend.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return tokenizer


def write_cases(path: Path, cases: list[dict[str, Any]]) -> None:
    """Write the golden file, each long list on one line."""
    head = {
        "model": {"name": "SmolLM2-135M-Instruct.Q4_1.gguf", "sha256": SHA256},
        "made_by": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gguf": importlib.metadata.version("gguf"),
        },
        "num_tokens": NUM_TOKENS,
    }
    lines = ["{"]
    lines += [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines.append(' "cases": [')
    for index, case in enumerate(cases):
        body = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in case.items())
        lines.append("  {\n" + body + "\n  }" + ("," if index < len(cases) - 1 else ""))
    lines.append(" ]\n}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Generate every prompt and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = default_model_path()
    tokenizer, reference_tokenizer, model = load_tokenizer(path), load_reference_tokenizer(path), load_reference(path)
    cases = []
    for case in json.loads(OUTPUT.read_text(encoding="utf-8"))["cases"]:
        # A conversation goes through the chat template; a string is continued as it stands.
        name, prompt = case["name"], case.get("text", case.get("messages"))
        ids = encode(tokenizer, reference_tokenizer, prompt)
        output, margins = generate_greedily(model, ids)
        cases.append({
            "name": name,
            "text" if isinstance(prompt, str) else "messages": prompt,
            "prompt_ids": ids,
            "output_ids": output,
            "min_margin": round(min(margins), 6),
            "margins": [round(margin, 4) for margin in margins],
        })  # fmt: skip
        print(f"{name}: {len(ids)} prompt tokens, smallest margin {min(margins):.6f}")
        print("   ", repr(tokenizer.decode(output))[:160])
    write_cases(options.output, cases)


def _undo_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """From llama.cpp's interleaved rotary rows to Hugging Face's two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hugging_face_name(name: str) -> str:
    for old, new in (
        ("blk.", "model.layers."), ("token_embd.", "model.embed_tokens."), ("output_norm.", "model.norm."),
        ("attn_q.", "self_attn.q_proj."), ("attn_k.", "self_attn.k_proj."), ("attn_v.", "self_attn.v_proj."),
        ("attn_output.", "self_attn.o_proj."), ("attn_norm.", "input_layernorm."),
        ("ffn_gate.", "mlp.gate_proj."), ("ffn_up.", "mlp.up_proj."), ("ffn_down.", "mlp.down_proj."),
        ("ffn_norm.", "post_attention_layernorm."),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


if __name__ == "__main__":
    main()
