"""SpecExec where the target's weights stream: tokens/s over the budget, at fixed seconds of a pass.

    python tools/bench_offload.py [--pass-seconds 0.25 1 4] [--budgets 16 64] [--max-prompts 12] [--log FILE]

The default model's layers stay in host memory. A throttled store gives them at the bandwidth with which one pass takes
as long as asked for: a slow disk, or a model so much larger. Plain decoding, SpecExec, SpecInfer (shapes of about as
many tokens) and SwiftSpec, whose tree grows while layers stream, answer the same prompts. A speed-up is over plain
decoding at the same bandwidth. Intervals come from drawing the prompts anew.

The whole table takes hours. With --log each answer is a line of that file as soon as it is there: a run that was
stopped goes on from the file, and the table is made of all of it. --limit ends a run after so many answers.
"""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_lengths import SPECEXEC, SPECINFER
from harness import (
    AnswerLog,
    conversation,
    format_interval,
    make_parser,
    make_table,
    pooled_interval,
    read_prompts,
    write_report,
)

import jaxspec
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.llm import internals
from jaxspec.methods.core.cost_model import USUAL_DEPTH
from jaxspec.offload.stores import WeightStore
from jaxspec.offload.stream import LayerStream

PLAIN = "plain"


class Key(NamedTuple):
    """The question of one answer."""

    method: str
    pass_seconds: float
    temperature: float
    prompt: str


class Counts(NamedTuple):
    """Tokens after the first round and their seconds; passes and their seconds, the prompt's included."""

    tokens: int
    decode_s: float
    passes: int
    pass_s: float


class ThrottledStore(WeightStore):
    """Another store that gives no more than a fixed number of bytes per second: a slower disk or bus, for measuring."""

    def __init__(self, store: WeightStore, bytes_per_s: float):
        """Bytes are counted as programs take them."""
        self.layouts, self.experts, self._store, self._rate = store.layouts, store.experts, store, bytes_per_s
        self._free_at, self._lock = 0.0, threading.Lock()

    @property
    def counters(self) -> tuple[int, int, float]:
        return self._store.counters

    def fill(self, layer: int, leaf: int, buffers: list[np.ndarray], expert: int | None = None) -> None:
        self._store.fill(layer, leaf, buffers, expert)
        with self._lock:
            # Time in which nothing was asked for does not add up.
            self._free_at = max(time.perf_counter(), self._free_at)
            self._free_at += sum(buffer.nbytes for buffer in buffers) / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


def main(words: Sequence[str] | None = None) -> None:
    """Answer what is missing, print the rows that are complete, write the table."""
    parser = make_parser(__doc__, max_prompts=12, max_tokens=32)
    parser.add_argument("--pass-seconds", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    parser.add_argument("--budgets", type=int, nargs="+", default=list(SPECEXEC))
    parser.add_argument("--overlapped", type=int, nargs="*", default=[16, 64, 256], help="draft tokens of SwiftSpec")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--log", type=Path, help="JSON lines, one for each answer; a run goes on from them")
    parser.add_argument("--limit", type=int, help="most answers of this run")
    arguments = parser.parse_args(words)
    methods, prompts = list_methods(arguments.budgets, arguments.overlapped), read_prompts(arguments)
    llm = jaxspec.LLM(method=jaxspec.SpecExec(1), offload="host", session_memory=0)
    plan = internals(llm).offload_plan
    assert plan is not None
    settings = {"model": llm.model_path.name, "max_tokens": arguments.max_tokens, "bytes": plan.pass_bytes}
    log = AnswerLog(arguments.log, settings)
    wanted = {
        (name, seconds, temperature): [Key(name, seconds, temperature, str(prompt.question_id)) for prompt in prompts]
        for name in methods
        for seconds in arguments.pass_seconds
        for temperature in arguments.temperatures
    }
    keys = [key for some in wanted.values() for key in some]
    missing = [key for key in keys if key not in log.known]
    print(f"{len(keys) - len(missing)} of {len(keys)} answers are there", flush=True)
    run(llm, methods, prompts, missing[: arguments.limit], log, arguments.max_tokens)
    rows: list[dict[str, Any]] = []
    for (name, seconds, temperature), some in wanted.items():
        if all(key in log.known for key in some):
            counts = [Counts(*log.known[key]) for key in some]
            rows.append(summarise(name, seconds, temperature, counts, rows))
    print(format_rows(rows))
    write_report(arguments.json, settings=settings, rows=rows)


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
    llm: jaxspec.LLM, methods: Mapping[str, Any], prompts: Sequence[BenchPrompt], missing: Sequence[Key],
    log: AnswerLog, max_tokens: int,
) -> None:  # fmt: skip
    """Answer the missing keys in order, and keep each answer."""
    stream, plan = internals(llm).layer_stream, internals(llm).offload_plan
    by_id = {str(prompt.question_id): prompt for prompt in prompts}
    assert isinstance(stream, LayerStream) and plan is not None
    store, nbytes = stream.store, plan.pass_bytes
    for name, keys in itertools.groupby(missing, key=lambda key: key.method):
        decoder = llm.with_method(methods[name])
        decoder.generate("Warm up.", jaxspec.SamplingParams(max_tokens=4))
        for seconds, same in itertools.groupby(keys, key=lambda key: key.pass_seconds):
            stream.reset()
            stream.store = ThrottledStore(store, nbytes / seconds)
            for key in same:
                sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=key.temperature, seed=1)
                stats = decoder.chat(conversation(by_id[key.prompt]), sampling).stats
                assert stats.offload is not None
                tokens = round((stats.tokens_per_s or 0.0) * stats.decode_s)
                log.add(key, Counts(tokens, stats.decode_s, stats.offload.passes, stats.offload.pass_s))
        stream.reset()
        stream.store = store


def summarise(
    name: str, seconds: float, temperature: float, counts: Sequence[Counts], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Tokens/s over all prompts and its interval, tokens per pass, speed-up over plain decoding among `rows`."""
    tokens, decode_s, passes, pass_s = (sum(column) for column in zip(*counts, strict=True))
    # Of each answer, the pass of the prompt and the first round lie before the clock starts.
    rounds = passes - 2 * len(counts)
    found = {
        "method": name, "pass_seconds": seconds, "temperature": temperature, "tokens_per_s": tokens / decode_s,
        "interval": pooled_interval([(count.tokens, count.decode_s) for count in counts]),
        "tokens_per_pass": tokens / max(rounds, 1), "measured_pass_s": pass_s / passes,
    }  # fmt: skip
    same = (PLAIN, seconds, temperature)
    plain = [row for row in rows if (row["method"], row["pass_seconds"], row["temperature"]) == same]
    found["speed_up"] = 1.0 if name == PLAIN else found["tokens_per_s"] / plain[0]["tokens_per_s"] if plain else None
    return found


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    head = ("method", "s of a pass", "temperature", "tokens/s", "95 %", "speed-up", "tokens per pass", "measured s")
    return make_table(head, [
        [
            row["method"], row["pass_seconds"], row["temperature"], f"{row['tokens_per_s']:.2f}",
            format_interval(row["interval"]), f"{row['speed_up']:.2f}" if row["speed_up"] else "",
            f"{row['tokens_per_pass']:.2f}", f"{row['measured_pass_s']:.3f}",
        ]
        for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    main()
