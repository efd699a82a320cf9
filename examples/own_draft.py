"""Draft models of your own: any checkpoint with the target's tokenizer, or the target without some of its blocks.

    python examples/own_draft.py

Both drafts here are made from the default model without any training, so that few of their tokens are accepted. The
text is the same with each of them: the target decides every token.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import jaxspec

PROMPT = "The three laws of motion are"


def main() -> None:
    """Decode the same prompt plainly, with the first layers as a draft, and with a draft that skips blocks."""
    sampling = jaxspec.SamplingParams(max_tokens=48)
    plain = jaxspec.LLM(method="ar").generate(PROMPT, sampling)
    with tempfile.TemporaryDirectory() as folder:
        layers = str(Path(folder) / "first-layers")
        convert = [sys.executable, "-m", "jaxspec", "convert", "default", layers, "--layers", "12"]
        subprocess.run(convert, check=True)
        for draft in (layers, "self:attention=4,8,12,16,20,24;mlp=6,10,14,18,22"):
            llm = jaxspec.LLM(draft=draft, method=jaxspec.Chain(num_draft_tokens=3))
            out = llm.generate(PROMPT, sampling)
            assert out.token_ids == plain.token_ids
            counters = out.stats.speculative_decoding
            assert counters is not None
            print(f"{draft}: {counters.mean_acceptance_length:.2f} tokens per pass")
    print(PROMPT + plain.text)


if __name__ == "__main__":
    main()
