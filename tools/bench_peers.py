"""jaxspec's methods, llama.cpp and transformers side by side: the same prompts and model file, interleaved on CPU.

    python -m pip install llama-cpp-python torch transformers gguf
    python tools/bench_peers.py [--methods ar,lookup,auto] [--max-prompts 12] [-n 96] [--repeats 3] [--out FILE]

All decode greedily, one sequence, with the same prompt tokens, and give the same number of tokens: end-of-sequence
tokens are ignored. For each prompt and repeat every column answers once, in rotating order; ratios are taken within a
repeat, and their median over repeats counts. The table has two rates: of the whole call, prefill included, and of
decoding, after the first token. The baseline of the speed-up is jaxspec's plain decoding (`ar`, several tokens per
dispatch). The result is one Markdown table.
"""

import argparse
import dataclasses
import importlib.util
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import conversation, environment_line, make_parser, make_table, read_prompts, write_report
from rich.progress import Progress

from jaxspec.bench.columns import loading_method, make_columns
from jaxspec.bench.report import make_report
from jaxspec.bench.run import Column, measure
from jaxspec.bench.tables import format_ratio, speed_cells
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.results import Completion, DecodeStats

# The types that llama.cpp may requantise the file to, by peer.
REQUANTISED = {f"llama.cpp-{name}": f"LLAMA_FTYPE_MOSTLY_{name.upper()}" for name in ("q4_0", "q4_k_m", "q8_0")}
PEERS: dict[str, tuple[str, ...]] = {name: ("llama_cpp",) for name in ("llama.cpp", "llama.cpp-lookup", *REQUANTISED)}
PEERS["transformers"] = ("torch", "transformers", "gguf")
# What llama.cpp's Python package proposes for its prompt lookup on a CPU.
LOOKUP_TOKENS = 2
INSTALL = "python -m pip install llama-cpp-python torch transformers gguf"
NAMES = ("method", "tokens/s", "speed-up (95 %)", "acceptance length", "whole call tokens/s", "speed-up of the call")

# (prompt ids, number of tokens) -> that many tokens, one by one
Generate = Callable[[list[int], int], Iterator[int]]


class Peer:
    """Another library's decoder, which answers like an `LLM` so that `jaxspec.bench` can measure it."""

    def __init__(self, name: str, llm: Any, generate: Generate):
        """Join a decoder to jaxspec's own tokenizer: every column gets the same ids.

        Args:
          name: for the completions.
          llm: encodes prompts and decodes texts.
          generate: the decoder.
        """
        self.name, self.tokenizer = name, llm.tokenizer
        # Nothing is compiled ahead, and nothing runs after an answer.
        engine = SimpleNamespace(prepare=lambda tokens: 0.0, settle=lambda: None)
        self._internals = SimpleNamespace(engine=engine)
        self._llm, self._generate = llm, generate

    def chat(self, messages: Any, sampling: SamplingParams) -> Completion:
        """Answer a conversation."""
        return self.generate(messages, sampling)

    def generate(self, prompt: Any, sampling: SamplingParams) -> Completion:
        """Exactly `max_tokens` tokens, greedily.

        Raises:
          ConfigError: the decoder gave another number of tokens.
        """
        assert sampling.max_tokens is not None and sampling.temperature == 0 and sampling.ignore_eos
        ids = self._llm.encode(prompt)
        tokens: list[int] = []
        start = first = last = time.perf_counter()
        for token in self._generate(ids, sampling.max_tokens):
            last = time.perf_counter()
            first = last if not tokens else first
            tokens.append(int(token))
        if len(tokens) != sampling.max_tokens:
            raise ConfigError(f"{self.name} gave {len(tokens)} tokens, {sampling.max_tokens} were asked for")
        decode_s = last - first
        rate = (len(tokens) - 1) / decode_s if decode_s > 0 else None
        stats = DecodeStats(len(ids), len(tokens), first - start, decode_s, rate, 0.0)
        return Completion(self._llm.tokenizer.decode(tokens), tuple(tokens), "length", stats, self.name)


def missing_packages(peers: Sequence[str]) -> list[str]:
    """Packages that these peers need and that are not installed."""
    return [name for peer in peers for name in PEERS[peer] if importlib.util.find_spec(name) is None]


def load_llama(path: Path, context: int, threads: int, name: str = "llama.cpp") -> Generate:
    """llama.cpp on a GGUF file; `name` says with what, see `PEERS`.

    Raises:
      ConfigError: llama.cpp cannot requantise the file.
    """
    import llama_cpp  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    if name == "llama.cpp-lookup":
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # pyright: ignore[reportMissingImports]

        options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        if name in REQUANTISED:
            own, path = path, Path(folder) / "requantised.gguf"
            wanted = llama_cpp.llama_model_quantize_default_params()
            wanted.ftype, wanted.allow_requantize = getattr(llama_cpp, REQUANTISED[name]), True
            if llama_cpp.llama_model_quantize(str(own).encode(), str(path).encode(), wanted):
                raise ConfigError(f"{name}: llama.cpp cannot requantise {own}")
        llama = llama_cpp.Llama(str(path), **options)  # the file stays mapped

    def generate(ids: list[int], count: int) -> Iterator[int]:
        llama.reset()
        for index, token in enumerate(llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0), 1):
            yield token
            if index == count:
                return

    return generate


def load_transformers(path: Path, threads: int) -> Generate:
    """transformers in float32 with the weights of a GGUF file; it has no product of quantized blocks."""
    import torch  # pyright: ignore[reportMissingImports]
    from make_golden import load_reference

    torch.set_num_threads(threads)
    model = load_reference(path)

    def generate(ids: list[int], count: int) -> Iterator[int]:
        # One step after another, as `model.generate` does, so that each token has its time.
        cache, tokens = None, torch.tensor([ids])
        with torch.inference_mode():
            for _ in range(count):
                out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, tokens = out.past_key_values, out.logits[:, -1].argmax(dim=-1, keepdim=True)
                yield tokens.item()

    return generate


def markdown(report: dict[str, Any], command: str) -> str:
    """The table and how it was measured."""
    rows = [
        [label, *speed_cells(row), f"{row['call_tokens_per_s']:.1f}", format_ratio(row["call_speedup"])]
        for label, row in report["overall"]["columns"].items()
    ]
    interrupted = "\n\nThe run was interrupted: the numbers are of the answers that were complete."
    return f"""# Side by side: jaxspec, llama.cpp and transformers

```
{command}
```

{Path(report["model"]).name}, {report["weights"]} (transformers: float32), greedy, {report["overall"]["prompts"]}
prompts, {report["sampling"]["max_tokens"]} tokens each, {report["repeats"]} interleaved repeats.
{environment_line()}.

Tokens/s are after the first token. The speed-up is over jaxspec's plain decoding with several tokens per dispatch
(`ar`), taken within a repeat of the same prompt, with a bootstrap 95 % interval over prompts. The whole call includes
prefill.

{make_table(NAMES, rows)}{interrupted * report["interrupted"]}
"""


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, max_prompts=12, max_tokens=96)
    parser.add_argument("--model", help="GGUF file [the default model]")
    parser.add_argument("--draft", help="checkpoint of the draft [the one shipped for the default model]")
    parser.add_argument("--beside", help="another draft, which the methods that draft are measured with, too")
    parser.add_argument("--methods", default="ar,lookup,auto", help="of jaxspec, by comma; ar is always there")
    parser.add_argument("--peers", default=",".join(PEERS), help="other libraries, by comma")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the other libraries")
    parser.add_argument("--out", type=Path, default=Path("docs/results/peers-cpu.md"), help="Markdown to write")
    arguments = parser.parse_args(words)
    arguments.peers = [name.strip() for name in arguments.peers.split(",") if name.strip()]
    if unknown := [name for name in arguments.peers if name not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}")
    if missing := missing_packages(arguments.peers):
        parser.error(f"not installed: {', '.join(missing)}; run: {INSTALL}")
    if not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out {arguments.out} must lie in a folder that exists")
    if arguments.beside is not None and not any(c.method.drafts for c in make_columns(arguments.methods.split(","))):
        parser.error(f"--beside: none of --methods {arguments.methods} uses a draft")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    arguments = parse(words)
    columns = make_columns(arguments.methods.split(","))
    drafting = [column for column in columns if column.method.drafts]
    from jaxspec.llm import LLM
    from jaxspec.loading import has_draft

    prompts = [dataclasses.replace(prompt, turns=prompt.turns[:1]) for prompt in read_prompts(arguments)]
    drafted = has_draft(arguments.model, arguments.draft)
    method = loading_method(columns, drafted, given=False)
    llm = LLM(arguments.model, draft=arguments.draft, method=method, session_memory=0)
    context = max(len(llm.encode(conversation(prompt))) for prompt in prompts) + arguments.max_tokens

    def load(name: str) -> Peer:
        if name == "transformers":
            return Peer(name, llm, load_transformers(llm.model_path, arguments.threads))
        return Peer(name, llm, load_llama(llm.model_path, context + 16, arguments.threads, name))

    peers = [Column(name, None, load(name)) for name in arguments.peers]
    if arguments.beside is not None:
        other = LLM(arguments.model, draft=arguments.beside, method=method, session_memory=0)
        peers += [Column(f"{c.label}, other draft", None, other.with_method(c.method)) for c in drafting]
    sampling = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    with Progress(transient=True) as bar:
        task = bar.add_task("", total=None)
        measured = measure(
            llm, [*columns, *peers], prompts, sampling, arguments.repeats,
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )  # fmt: skip
    command = shlex.join(["python", "tools/bench_peers.py", *(sys.argv[1:] if words is None else words)])
    draft = llm.draft_path and str(llm.draft_path)
    report = make_report(measured, command, str(llm.model_path), draft)
    text = markdown(report, command)
    write_report(arguments.json, **report)
    arguments.out.write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
