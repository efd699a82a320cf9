"""SpecExec where the target's weights stream: tokens/s over the budget, at fixed seconds of a pass.

    python tools/bench_offload.py [--pass-seconds 0.25 1 4] [--budgets 16 64] [--max-prompts 12] [--answers FILE]

The default model's layers stay in host memory, and a throttled store gives them at the bandwidth with which one pass
takes as long as asked for: a slow disk, or a model so much larger. Plain decoding, SpecExec, SpecInfer (shapes of about
as many tokens) and SwiftSpec, whose tree grows while layers stream, answer the same prompts; a speed-up is over plain
decoding at the same bandwidth. Intervals come from drawing the prompts anew.

The whole table takes hours. With `--answers` each answer is a line of that file as soon as it is there: a run that was
stopped goes on from the file, and the table is made of all of it. `--limit` ends a run after so many answers.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_budgets import SPECEXEC, SPECINFER, pooled_interval

import jaxspec
from jaxspec.bench.environment import describe_environment
from jaxspec.bench.prompts import BenchPrompt, load_prompts, select_prompts
from jaxspec.methods.core.cost_model import USUAL_DEPTH
from jaxspec.offload.stores import ThrottledStore
from jaxspec.offload.stream import LayerStream

PLAIN = "plain"


class Key(NamedTuple):
    """What one answer is to."""

    method: str
    pass_seconds: float
    temperature: float
    prompt: str


class Counts(NamedTuple):
    """Tokens after the first round and their seconds; passes and their seconds, that of the prompt included."""

    tokens: int
    decode_s: float
    passes: int
    pass_s: float


class Answers:
    """Answers by what they are to; with a file each is written at once, and those of an earlier run are there."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        """Read the file, if it exists; SystemExit where it is of other settings."""
        self._path, self.known = path, dict[Key, Counts]()
        if path is None:
            return
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps({"settings": settings}) + "\n")
            return
        text = path.read_text()
        # What was being written when a run was stopped has no end of line.
        whole = text[: text.rfind("\n") + 1]
        first, *lines = whole.splitlines() or ["{}"]
        if (found := json.loads(first).get("settings")) != settings:
            raise SystemExit(f"{path} is of other settings ({found}) than these ({settings}): give another file")
        if whole != text:
            path.write_text(whole)
        for line in lines:
            row = json.loads(line)
            self.known[Key(*row["of"])] = Counts(*row["counts"])

    def add(self, key: Key, counts: Counts) -> None:
        """Keep an answer."""
        self.known[key] = counts
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps({"of": key, "counts": counts}) + "\n")


def main() -> None:
    """Answer what is not answered yet, print a line for each combination that is complete, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass-seconds", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    parser.add_argument("--budgets", type=int, nargs="+", default=list(SPECEXEC))
    parser.add_argument("--overlapped", type=int, nargs="*", default=[16, 64, 256], help="draft tokens of SwiftSpec")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--max-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--answers", type=Path, help="JSON lines, one for each answer; a run goes on from them")
    parser.add_argument("--limit", type=int, help="most answers of this run")
    parser.add_argument("--json", type=Path, help="the table")
    arguments = parser.parse_args()
    methods = list_methods(arguments.budgets, arguments.overlapped)
    prompts = select_prompts(load_prompts(None), None, arguments.max_prompts)
    llm = jaxspec.LLM(method=jaxspec.SpecExec(1), offload="host", session_memory=0)
    assert llm.offload_plan is not None
    settings = {"model": llm.model_path.name, "max_tokens": arguments.max_tokens, "bytes": llm.offload_plan.pass_bytes}
    answers = Answers(arguments.answers, settings)
    combinations = list(itertools.product(arguments.pass_seconds, arguments.temperatures))
    wanted = [
        Key(name, seconds, temperature, str(prompt.question_id))
        for name in methods
        for seconds, temperature in combinations
        for prompt in prompts
    ]
    left = [key for key in wanted if key not in answers.known]
    print(f"{len(wanted) - len(left)} of {len(wanted)} answers are there", flush=True)
    run(llm, methods, prompts, left[: arguments.limit], answers, arguments.max_tokens)
    rows: list[dict[str, Any]] = []
    for name, (seconds, temperature) in itertools.product(methods, combinations):
        keys = [Key(name, seconds, temperature, str(prompt.question_id)) for prompt in prompts]
        if all(key in answers.known for key in keys):
            counts = [answers.known[key] for key in keys]
            rows.append(summarise(name, seconds, temperature, counts, rows))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        report = {"settings": settings, "environment": describe_environment(), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def list_methods(budgets: Sequence[int], overlapped: Sequence[int]) -> dict[str, Any]:
    """Methods by label."""
    methods: dict[str, Any] = {PLAIN: "ar"}
    methods |= {f"specexec {n}": jaxspec.SpecExec(n) for n in budgets}
    near = [min(SPECINFER, key=lambda tokens: abs(tokens - budget)) for budget in budgets]
    methods |= {f"specinfer {n}": jaxspec.SpecInfer(SPECINFER[n]) for n in dict.fromkeys(near)}
    for n in overlapped:
        width, branch = jaxspec.SpecExec(n).draft_rows, min(32, n)
        methods[f"swiftspec {n}"] = jaxspec.SwiftSpec(n, width, branch, depth=USUAL_DEPTH, refill=USUAL_DEPTH)
    return methods


def run(
    llm: jaxspec.LLM, methods: Mapping[str, Any], prompts: Sequence[BenchPrompt], left: Sequence[Key],
    answers: Answers, max_tokens: int,
) -> None:  # fmt: skip
    """Answer what is left, in order, and keep each answer."""
    stream, by_id = llm.layer_stream, {str(prompt.question_id): prompt for prompt in prompts}
    assert isinstance(stream, LayerStream) and llm.offload_plan is not None
    store, nbytes = stream.store, llm.offload_plan.pass_bytes
    for name, keys in itertools.groupby(left, key=lambda key: key.method):
        decoder = llm.with_method(methods[name])
        decoder.generate("Warm up.", jaxspec.SamplingParams(max_tokens=4))
        for seconds, same in by_seconds(keys):
            stream.reset()
            stream.store = ThrottledStore(store, nbytes / seconds)
            for key in same:
                answers.add(key, answer(decoder, by_id[key.prompt], key.temperature, max_tokens))
        stream.reset()
        stream.store = store


def by_seconds(keys: Iterator[Key]) -> Iterator[tuple[float, Iterator[Key]]]:
    """Keys of the same seconds of a pass, which follow each other."""
    return itertools.groupby(keys, key=lambda key: key.pass_seconds)


def answer(llm: jaxspec.LLM, prompt: BenchPrompt, temperature: float, max_tokens: int) -> Counts:
    """Answer one prompt."""
    sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    stats = llm.chat([{"role": "user", "content": prompt.turns[0]}], sampling).stats
    assert stats.offload is not None
    tokens = round((stats.tokens_per_s or 0.0) * stats.decode_s)
    return Counts(tokens, stats.decode_s, stats.offload["passes"], stats.offload["pass_s"])


def summarise(
    name: str, seconds: float, temperature: float, counts: Sequence[Counts], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """Tokens/s over all prompts and its interval, tokens per pass, speed-up over plain decoding among `rows`."""
    tokens, decode_s, passes, pass_s = (sum(column) for column in zip(*counts, strict=True))
    # Of each answer, the pass of the prompt and the first round lie before the clock starts.
    rounds = passes - 2 * len(counts)
    found = {
        "method": name, "pass_seconds": seconds, "temperature": temperature, "tokens_per_s": tokens / decode_s,
        "interval": pooled_interval([(count.tokens, count.decode_s) for count in counts]),  # pyright: ignore[reportArgumentType]
        "tokens_per_pass": tokens / max(rounds, 1), "measured_pass_s": pass_s / passes,
    }  # fmt: skip
    plain = [
        row for row in rows
        if (row["method"], row["pass_seconds"], row["temperature"]) == (PLAIN, seconds, temperature)
    ]  # fmt: skip
    found["speed_up"] = 1.0 if name == PLAIN else found["tokens_per_s"] / plain[0]["tokens_per_s"] if plain else None
    return found


def line(row: Mapping[str, Any]) -> str:
    """One row in words; the last number is the speed-up over the acceptance length."""
    low, high = row["interval"] or (np.nan, np.nan)
    speed_up = row["speed_up"] or np.nan
    return (
        f"{row['method']:<16} pass {row['pass_seconds']:<5} T={row['temperature']:<4} "
        f"{row['tokens_per_s']:6.2f} tokens/s ({low:.2f} to {high:.2f})  {speed_up:.2f}x  "
        f"{row['tokens_per_pass']:.2f} tokens/pass  {row['measured_pass_s']:.3f} s/pass  "
        f"{speed_up / row['tokens_per_pass']:.2f} of it"
    )


if __name__ == "__main__":
    main()
