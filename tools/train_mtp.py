"""Train a small hybrid of Qwen 3.5's form and its layer for multi-token prediction, and write them as one folder.

    python tools/distil_draft.py sample DATA --tokens 200000
    python tools/train_mtp.py DATA FOLDER
    jaxspec-bench --model FOLDER --methods ar,auto

The text is what the default model wrote. The hybrid learns it first, and the layer then learns what the hybrid says of
it: its distribution over the next tokens but one, two, ..., the later ones from the layer's own states, as a chain
drafts. Needs the extra `parity` (torch); a folder that is there already is refused.
"""

import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train.runs import read_conversations
from train.shards import read_meta
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    get_cosine_schedule_with_warmup,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from jaxspec.checkpoint.shipped import default_model_path
from jaxspec.text.tokenizer import load_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PEAK, WARM_UP = 2e-3, 10  # learning rate, and updates until it is reached
WIDTH = 512  # D; heads are 64 wide, the MLP is 6 D
# Rows and tokens of a batch, and tokens of a chain that the layer learns.
ROWS, LENGTH, DEPTH = 4, 128, 2


class Mtp(torch.nn.Module):
    """The layer, with the names that published folders give its tensors after `mtp.`."""

    def __init__(self, config: Qwen3_5TextConfig):
        """Random weights, but for `fc`, which adds token and state."""
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        assert config.layer_types is not None
        index = config.layer_types.index("full_attention")
        self.fc = torch.nn.Linear(2 * D, D, bias=False)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, index)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (Qwen3_5RMSNorm(D, eps) for _ in range(3))
        self.fc.weight.data = torch.eye(D).repeat(1, 2)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, rotary: Any, mask: torch.Tensor) -> torch.Tensor:
        """Own states of rows [B, R, D] that see each other as `mask`, bool [R, R], says."""
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        x = self.layers[0](self.fc(torch.cat(both, dim=-1)), rotary, mask[None, None])
        return self.norm(x)


def steps_of(mtp: Mtp, model: Qwen3_5ForCausalLM, token: torch.Tensor, states: torch.Tensor, depth: int) -> list:
    """Own states [B, n, D] of n = T - depth rows after 1 to `depth` tokens of a chain; `token` is [B, T].

    Row t of step d has token t + d. It sees the first step's rows up to t, and its own ones of the steps between.
    """
    n = token.shape[1] - depth
    row, fed, out = torch.arange(n), [states[:, :n]], []
    for step in range(1, depth + 1):
        place = torch.cat([row + d for d in range(1, step + 1)])
        embedded = model.model.embed_tokens(token[:, place])
        of, at = row.repeat(step), torch.arange(step).repeat_interleave(n)
        first = (at[None] == 0) & (of[None] <= of[:, None])
        mask = first | ((at[None] <= at[:, None]) & (of[None] == of[:, None]))
        rotary = model.model.rotary_emb(embedded, (place - 1)[None])
        out.append(mtp(embedded, torch.cat(fed, dim=1), rotary, mask)[:, -n:])
        fed.append(out[-1])
    return out


def make_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[1], chat_template=TEMPLATE)


def main(
    data: Annotated[list[Path], typer.Argument(help="Folders of sampled conversations, then the folder to write.")],
    vocab: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 2048,
    base_steps: Annotated[int, typer.Option(help="Updates of the hybrid.")] = 300,
    steps: Annotated[int, typer.Option(help="Updates of the layer after these.")] = 150,
) -> None:
    """Train both and write them."""
    *folders, folder = data
    if not folders:
        raise typer.BadParameter("name folders of sampled conversations, and then the one to write")
    if folder.exists():
        raise typer.BadParameter(f"{folder}: is there already; name another folder")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    source, begin = load_tokenizer(default_model_path()), read_meta(folders[0])["prefix"]
    # A conversation follows the mark of its first question.
    begin = begin[len(begin) - 1 - begin[::-1].index(begin[0]) : -1]
    texts = [
        source.decode([*begin, *c.token.tolist()], skip_special_tokens=False) for c in read_conversations(folders, 0)
    ]
    tokenizer = make_tokenizer(texts, vocab)
    text = torch.tensor(list(itertools.chain(*(tokenizer(t + "\n")["input_ids"] for t in texts))))
    heads = WIDTH // 64
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=6 * WIDTH, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=heads // 4 or 1, head_dim=64, linear_num_key_heads=heads,
        linear_num_value_heads=heads, linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=False, eos_token_id=MARKS.index(MARKS[1]),
    )  # fmt: skip
    model, mtp = Qwen3_5ForCausalLM(config).bfloat16(), Mtp(config).bfloat16()
    optimizers = [torch.optim.AdamW(each.parameters(), PEAK, betas=(0.9, 0.95)) for each in (model, mtp)]
    schedules = [
        get_cosine_schedule_with_warmup(optimizer, WARM_UP, count)
        for optimizer, count in zip(optimizers, (base_steps, steps), strict=True)
    ]
    typer.echo(f"{len(text)} tokens; {sum(w.numel() for w in model.parameters()) / 1e6:.1f}M parameters, the layer "
               f"{sum(w.numel() for w in mtp.parameters()) / 1e6:.1f}M")  # fmt: skip
    begun = time.monotonic()
    for step in range(base_steps + steps):
        at = rng.integers(0, len(text) - LENGTH - 1, ROWS)
        token = torch.stack([text[i : i + LENGTH] for i in at])
        learns_base = step < base_steps
        if step == base_steps:  # the layer begins as the hybrid's last one
            mtp.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        optimizer, schedule = optimizers[not learns_base], schedules[not learns_base]
        with torch.set_grad_enabled(learns_base):
            states = model.model(input_ids=token, use_cache=False).last_hidden_state
            logits = model.lm_head(states).float()
        if learns_base:
            losses = [F.cross_entropy(logits[:, :-1].flatten(0, 1), token[:, 1:].flatten())]
        else:
            n, losses, hits = LENGTH - DEPTH, [], []
            for d, own in enumerate(steps_of(mtp, model, token, states, DEPTH), 1):
                drafted, teacher = model.lm_head(own).float(), logits[:, d : d + n]
                losses.append(F.cross_entropy(drafted.flatten(0, 1), teacher.softmax(-1).flatten(0, 1)))
                hits.append((drafted.argmax(-1) == teacher.argmax(-1)).float().mean().item())
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_((model if learns_base else mtp).parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            agreed = "" if learns_base else f", agreement {' '.join(f'{hit:.3f}' for hit in hits)}"
            typer.echo(f"step {step + 1}: {time.monotonic() - begun:.0f} s, loss {losses[0].item():.3f}{agreed}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"mtp.{name}": weight.contiguous() for name, weight in mtp.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    typer.run(main)
