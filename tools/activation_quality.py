"""Effects of int8 activations: perplexity, most probable tokens and distributions of a model beside float32's.

    python tools/activation_quality.py [--model FILE ...] [--text FILE] [--tokens 10240] [--json FILE]

A text is read in windows of `WINDOW` tokens, each with a cache of its own, by the same model twice: with float32
activations and caches, and with int8 activations and float16 caches, as `auto` has them. The text is the docstrings of
Python's standard library unless a file is given.

One row per model: perplexity of both and their ratio; how often the most probable tokens agree; the mean KL divergence
of the int8 distribution from the float32 one, in nats per token; how many greedy texts of `PROMPTS` are the same, and
the mean place of the first other token in those that are not.
"""

import argparse
import ast
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench.prompts import load_prompts, select_prompts
from jaxspec.bench.run import encode_prompt
from jaxspec.llm import internals
from jaxspec.models.kv_cache import commit_rows, init_cache
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.program import Program

WINDOW, CHUNK = 512, 64
PROMPTS, TOKENS = 12, 64
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"activations": "float32", "kv_dtype": "float32"},
    "int8": {"activations": "int8", "kv_dtype": "float16"},
}


def main() -> None:
    """Measure each model, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[None], help="GGUF files [the default model]")
    parser.add_argument("--text", type=Path, help="a text file [docstrings of the standard library]")
    parser.add_argument("--tokens", type=int, default=10_240, help="tokens of the text, a multiple of 512 [10240]")
    parser.add_argument("--json", type=Path, help="where the rows go too")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8") if arguments.text else standard_docstrings()
    rows = []
    for model in arguments.model:
        rows.append(
            {"model": "default" if model is None else Path(model).name} | compare(model, text, arguments.tokens)
        )
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def standard_docstrings() -> str:
    """Docstrings of the standard library's modules, by name: the same for one version of Python."""
    texts = []
    for name in sorted(sys.stdlib_module_names):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            found = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
            texts += [found] if found and len(found) > 200 else []
    return "\n\n".join(texts)


def compare(model: str | None, text: str, tokens: int) -> dict[str, Any]:
    """One model's row."""
    llms = {name: jaxspec.LLM(model, method="ar", draft="none", **options) for name, options in SETTINGS.items()}
    ids = llms["int8"].encode(text)[:tokens]
    if len(ids) < WINDOW:
        sys.exit(f"the text has {len(ids)} tokens; a window has {WINDOW}")
    readers = [Reader(llm) for llm in llms.values()]
    loss, count, agree, divergence = dict.fromkeys(SETTINGS, 0.0), 0, 0, 0.0
    for start in range(0, len(ids) // WINDOW * WINDOW, WINDOW):
        window = np.array(ids[start : start + WINDOW], np.int32)
        for place, (exact, rounded) in enumerate(zip(*(reader.read(window) for reader in readers), strict=True)):
            known = window[place * CHUNK + 1 : (place + 1) * CHUNK + 1]
            exact, rounded = exact[: len(known)], rounded[: len(known)]
            for name, logs in zip(SETTINGS, (exact, rounded), strict=True):
                loss[name] -= float(logs[np.arange(len(known)), known].sum())
            count += len(known)
            agree += int((exact.argmax(-1) == rounded.argmax(-1)).sum())
            divergence += float((np.exp(exact) * (exact - rounded)).sum())
    perplexity = {name: math.exp(each / count) for name, each in loss.items()}
    return {
        "weights": str(internals(llms["int8"]).target.weights),
        "tokens": count,
        "perplexity_float32": round(perplexity["float32"], 4),
        "perplexity_int8": round(perplexity["int8"], 4),
        "change_percent": round(100 * (perplexity["int8"] / perplexity["float32"] - 1), 3),
        "same_argmax_percent": round(100 * agree / count, 2),
        "kl_nats": round(divergence / count, 6),
    } | compare_texts(llms)


def compare_texts(llms: dict[str, jaxspec.LLM]) -> dict[str, Any]:
    """How far greedy answers agree."""
    prompts = select_prompts(load_prompts(None), None, PROMPTS)
    sampling = jaxspec.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    same, firsts = 0, []
    for prompt in prompts:
        exact, rounded = (llm.generate([encode_prompt(llm, prompt)], sampling)[0].token_ids for llm in llms.values())
        other = next((i for i, (a, b) in enumerate(zip(exact, rounded, strict=True)) if a != b), None)
        same += other is None
        firsts += [] if other is None else [other]
    first = round(float(np.mean(firsts)), 1) if firsts else None
    return {"texts": len(prompts), "same_texts": same, "first_other_token": first}


class Reader:
    """Log-probabilities of one model after each token of a window."""

    def __init__(self, llm: jaxspec.LLM):
        """Compile."""
        self._params = internals(llm).params.target
        self._placement = placement = internals(llm).target

        def run(params: Any, cache: Any, token: Any) -> Any:
            position = cache.length + jnp.arange(CHUNK, dtype=jnp.int32)
            chain = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
            hidden, cache = forward(params, placement.cfg, token, position, cache, chain)
            return jax.nn.log_softmax(vocab_logits(params, placement.cfg, hidden)), commit_rows(cache, jnp.int32(CHUNK))

        shapes = placement.cache(WINDOW)
        logs = placement.array((CHUNK, placement.padded_vocab), jnp.float32)
        args = [placement.params(), shapes, placement.array((CHUNK,), jnp.int32)]
        self._program = Program("quality", run, placement.plan, args, (logs, shapes))
        self._start = Program("start", self._create, placement.plan, [], shapes)

    def read(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Float64 `[CHUNK, V]` at a time."""
        cache = self._start()
        for start in range(0, len(ids), CHUNK):
            logs, cache = self._program(self._params, cache, ids[start : start + CHUNK])
            yield np.asarray(logs)[:, : self._placement.cfg.vocab_size].astype(np.float64)

    def _create(self) -> Any:
        return init_cache(self._placement.cfg, self._placement.local_kv_heads, WINDOW, self._placement.kv_dtype)


if __name__ == "__main__":
    main()
