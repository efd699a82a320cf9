"""Make tests/golden/smollm2_greedy.json: what Hugging Face's own Llama says, greedily, with the default model.

    python -m pip install -e '.[parity]'        (torch)
    python tools/make_golden.py [--output tests/golden/smollm2_greedy.json] [--threads 2]

The weights of the default GGUF file are dequantised by the `gguf` package and put into transformers'
`LlamaForCausalLM` in float32; jaxspec's readers and models take no part in it. Generation is greedy and runs on past
end-of-sequence tokens, so that every prompt has the same number of output tokens.

Prompt ids come from jaxspec's tokenizer, and must be those of transformers' own GGUF converter once the digit rule
that it drops is put back.

Each case of the file holds `name`, `messages` (chat) or `text` (raw), `prompt_ids`, `output_ids`, and `margins`: by
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

_HARBOUR = """\
The harbour of Saint-Aldric was built three times. The first harbour was a row of oak piles driven into the mud by \
fishermen who wanted to unload herring without wading. It lasted nineteen years. In the winter of 1703 a storm that \
the parish register calls "the great wind" lifted the piles out one by one and laid them on the beach in a neat \
line, as if someone had meant to count them. The fishermen did count them, found that eleven of forty-two were \
missing, and burned the rest for warmth.

The second harbour was the work of an engineer named Judith Marchetti, who had studied the tides of the bay for six \
years before she asked for any money. She argued that the storm had not destroyed the piles because they were weak, \
but because they were stiff: a wall that does not move must take the whole force of a wave, while a wall that gives \
way a little takes only a part of it. Her breakwater was a long slope of loose stones, each about the weight of a \
cow. Every winter the sea moved some of them, and every spring the town put them back. The council complained about \
the cost of the spring work, which came to 340 crowns a year, until a clerk showed that the old piles had cost 410.

The third harbour is the one that visitors see today. It was finished in 1911 and is made of concrete. Its designer, \
Paul Oyelaran, kept the slope of stones and put his wall behind it, so that the stones would break the waves and the \
wall would only have to hold back still water. When people asked him why he had not simply built a taller wall, he \
said that the sea was patient and that it was better to argue with it than to shout. The wall has been repaired \
twice: once after a ship, the Margarethe, ran into it in fog, and once after the frost of 1963, which opened a crack \
as wide as a hand along forty metres of the parapet.

There are still stones in the harbour that belong to Marchetti's slope. They can be told from the later ones by a \
small cross that her masons cut into the upper face, so that anyone who moved a stone would know which way up it had \
lain. The schoolchildren of Saint-Aldric count the crosses each May. The number goes down by two or three every \
year, and nobody knows where the missing stones go, although the fishermen, when they are asked, say that the sea is \
still counting.
"""

# A conversation goes through the chat template; a string is continued as it stands.
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "prose": "The old lighthouse keeper climbed the stairs for the last time, carrying a lamp, a loaf of bread and",
    "code": (
        "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
        '    """Merge two sorted lists into one sorted list."""\n'
        "    merged = []\n    i = j = 0\n"
    ),
    "maths": [{"role": "user", "content": "A train covers 348.5 km in 4 h 15 min. What is its mean speed in km/h?"}],
    "french": [{"role": "user", "content": "Explique en français pourquoi la mer est salée, avec un exemple."}],
    "chinese_emoji": "你好！今天天气很好，我们去公园散步吧。🌞🐶 Translation and notes, line by line:\n",
    "long": [
        {"role": "user", "content": f"{_HARBOUR}\nWho built the second harbour, and why was it a slope of stones?"}
    ],
    "one_token": "The",
    "json": '{"cities": [{"name": "Paris", "country": "France", "population": 2102650}, {"name": "Tokyo", "country":',
    "turns": [
        {"role": "system", "content": "You are a terse assistant. Answer with numbered lists."},
        {"role": "user", "content": "Name three metals."},
        {"role": "assistant", "content": "1. Iron\n2. Copper\n3. Tin"},
        {"role": "user", "content": "Now give one use of each, and the year 2024 price if you know it."},
    ],
}


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
    for name, prompt in PROMPTS.items():
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
