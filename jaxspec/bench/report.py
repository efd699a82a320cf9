"""From a measurement to numbers, and from numbers to tables."""

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.bench.prompts import list_categories
from jaxspec.bench.run import BASELINE, Answer, Measurement, is_token_exact, verified_rows
from pallas_kernels.registry import Kernels

# Rates of shorter answers say little: one round more or less changes them by half.
MIN_RATED_TOKENS = 8

RESAMPLES = 2000
SHOWN_DIFFERENCES = 5

DEFINITIONS = {
    "tokens/s": "tokens received after the first round, per second from the first round to the last; of a prompt, the "
    "median over repeats. Mean (± standard deviation of that mean between repeats), median, 5th and 95th percentile "
    "over prompts.",
    "rated prompts": f"those to which plain decoding answers at least {MIN_RATED_TOKENS} tokens (or all that it may) "
    "after the first one; tokens/s and speed-up are over these. A method that says everything in one round has no rate "
    "there and is measured on the others, whose number n then stands beside its tokens/s.",
    "TTFT": "time to the first token, prefill and first round, without compiling; mean over prompts of the median over "
    "repeats.",
    "speed-up": "tokens/s over that of plain decoding, taken within one repeat on the same prompt; median over "
    "repeats, then mean over prompts, with a bootstrap 95 % interval over prompts.",
    "call": "the same ratio for all tokens of an answer over the whole call, first token included; over all prompts.",
    "tokens/pass": "generation rate: tokens received per target pass, bonus token included; 1.00 is plain decoding.",
    "accepted": "draft tokens accepted over draft tokens proposed.",
    "verify, draft, other": "a method's target and draft passes, timed alone with as many rows as they had, times "
    "their number after the first round, over the time after the first round; other is what remains, and is shown as 0 "
    "where the sum exceeds the whole (passes that overlap, or a machine whose speed drifts).",
    "GB/s": "bytes of all weights times target passes, per second after the first round; the roofline is a chain of "
    "matrix-vector products that reads every weight once and does nothing else.",
    "exact": "prompts with the very tokens of plain decoding in every repeat (plain decoding: of its own first "
    "repeat); law where the method promises the distribution only.",
}


def make_report(
    measured: Measurement, command: str, model: str, draft: str | None, target_devices: int = 1
) -> dict[str, Any]:
    """One JSON object: what was measured, how, where, and every sample.

    Args:
      measured: from `measure`.
      command: the command line that asked for it.
      model: the target's checkpoint.
      draft: the draft's, if there is one.
      target_devices: devices that shared the target.
    """
    by_key = _index(measured)
    groups = {name: [p for p in measured.prompts if p.category == name] for name in list_categories(measured.prompts)}
    return {
        "command": command,
        "model": model,
        "draft": draft,
        "environment": describe_environment(target_devices),
        "sampling": dataclasses.asdict(measured.sampling),
        "repeats": measured.repeats,
        "definitions": DEFINITIONS,
        "columns": [
            {
                "label": column.label,
                "method": column.method.name,
                "settings": dataclasses.asdict(column.method),
                "compile_s": measured.compile_s[column.label],
                "pass_s": dataclasses.asdict(measured.pass_times[column.label]),
            }
            for column in measured.columns
        ],
        "pass_context": measured.context,
        "weight_bytes": measured.weight_bytes,
        "weights": measured.weights,
        "kernels": measured.kernels.name,
        "roofline": {
            "gb_per_s": _roofline(measured),
            "seconds": _spread(measured.roofline_s),
        },
        "overall": _summarise_group(measured, by_key, measured.prompts),
        "categories": {name: _summarise_group(measured, by_key, prompts) for name, prompts in groups.items()},
        "differences": _differences(measured, by_key),
        "answers_that_compiled": sum(answer.compile_s > 0 for answer in measured.answers),
        "samples": [_sample(answer) for answer in measured.answers],
    }


def bootstrap_interval(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """95 % interval of the mean of `values`, by drawing them anew with replacement; None for fewer than two.

    The draws are seeded: the same values give the same interval.
    """
    if len(values) < 2:
        return None
    array = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(0, len(array), (resamples, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def describe_environment(devices: int = 1) -> dict[str, Any]:
    """Devices (of which `devices` were used), machine, versions, and the most memory ever held, in bytes."""
    device = jax.devices()[0]
    memory = device.memory_stats() if device.platform != "cpu" else None
    versions = {name: importlib.metadata.version(name) for name in ("jaxspec-decode", "jax", "jaxlib", "numpy")}
    return {
        "device": f"{devices} of {len(jax.devices())} x {device.device_kind}",
        "machine": ", ".join(filter(None, (_processor(), f"{os.cpu_count()} cores", platform.machine()))),
        "versions": {"python": platform.python_version(), **versions},
        "peak_host_bytes": _peak_host_bytes(),
        "peak_device_bytes": (memory or {}).get("peak_bytes_in_use"),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables for people: speed by category, where the time goes, definitions, and where it was measured."""
    console.print(_speed_table(report))
    console.print(_time_table(report))
    for line in [*_notes(report), *_footer(report)]:
        console.print(line, markup=False, highlight=False)
    console.print()
    for name, definition in report["definitions"].items():
        console.print(f"{name}: {definition}", style="dim", markup=False, highlight=False)


Index = dict[tuple[str, str | int], list[Answer]]


def _index(measured: Measurement) -> Index:
    """Answers by column and prompt, in order of repeats."""
    by_key: Index = {}
    for answer in sorted(measured.answers, key=lambda a: a.repeat):
        by_key.setdefault((answer.label, answer.prompt.question_id), []).append(answer)
    return by_key


def _summarise_group(measured: Measurement, by_key: Index, prompts: Sequence[Any]) -> dict[str, Any]:
    ids = [prompt.question_id for prompt in prompts]
    enough = min(MIN_RATED_TOKENS, (measured.sampling.max_tokens or MIN_RATED_TOKENS) - 1)
    rated = [i for i in ids if all(a.tokens_per_s and a.timed_tokens >= enough for a in by_key[BASELINE, i])]
    columns = {c.label: _summarise_column(measured, by_key, c, ids, rated) for c in measured.columns}
    return {"prompts": len(ids), "rated_prompts": len(rated), "columns": columns}


def _summarise_column(measured: Measurement, by_key: Index, column: Any, ids: list, rated: list) -> dict[str, Any]:
    label = column.label
    mine = [answer for i in ids for answer in by_key[label, i]]
    rated = [i for i in rated if all(answer.tokens_per_s for answer in by_key[label, i])]

    def ratios(rate: Callable[[Answer], Any], over: list) -> list[float]:
        pairs = (zip(by_key[label, i], by_key[BASELINE, i], strict=True) for i in over)
        return [statistics.median(rate(a) / rate(b) for a, b in pair) for pair in pairs]

    rates = [[answer.tokens_per_s or 0.0 for answer in by_key[label, i]] for i in rated]
    spread: dict[str, Any] | None = _spread([statistics.median(r) for r in rates]) if rates else None
    if spread:
        means = [statistics.fmean(r) for r in zip(*rates, strict=True)]
        spread["repeat_std"] = statistics.stdev(means) if len(means) > 1 else None
    decode_s = sum(answer.decode_s for answer in mine)
    gb_per_s = measured.weight_bytes * sum(a.timed_passes for a in mine) / decode_s / 1e9 if decode_s else None
    drafted, accepted = _counted(mine, "num_draft_tokens"), _counted(mine, "num_accepted_draft_tokens")
    return {
        "rated_prompts": len(rated),
        "tokens_per_s": spread,
        "ttft_s": _spread([statistics.median(a.ttft_s for a in by_key[label, i]) for i in ids]),
        "speedup": _mean_with_interval(ratios(lambda a: a.tokens_per_s, rated)),
        "call_speedup": _mean_with_interval(ratios(lambda a: a.call_tokens_per_s, ids)),
        "tokens_per_pass": sum(a.tokens for a in mine) / sum(a.passes for a in mine),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "split": _split(mine, column.method, measured.kernels, measured.pass_times[label], decode_s),
        "gb_per_s": gb_per_s,
        "of_roofline": gb_per_s / _roofline(measured) if gb_per_s else None,
        "exact": {
            "promise": "tokens" if is_token_exact(column.method, measured.sampling) else "law",
            "equal": sum(all(_first_difference(a, by_key) is None for a in by_key[label, i]) for i in ids),
            "prompts": len(ids),
        },
    }


def _split(
    answers: list[Answer], method: Any, kernels: Kernels, pass_times: Any, decode_s: float
) -> dict[str, float] | None:
    if not decode_s:
        return None
    passes = sum(answer.timed_passes for answer in answers)
    rows = [count for answer in answers for stats in answer.stats for count in verified_rows(stats, method, kernels)]
    verify_s = sum(pass_times.target_s[count] for count in rows)
    further = max(0.0, sum(answer.timed_draft_passes for answer in answers) - passes)
    draft_s = pass_times.draft_root_s * passes + pass_times.draft_s * further
    other_s = decode_s - verify_s - draft_s
    return {
        "decode_s": decode_s, "verify_s": verify_s, "draft_s": draft_s, "other_s": other_s,
        "target_pass_s": verify_s / passes,
        "verify": verify_s / decode_s, "draft": draft_s / decode_s, "other": max(0.0, other_s / decode_s),
    }  # fmt: skip


def _counted(answers: list[Answer], name: str) -> int:
    return sum((stats.speculative_decoding or {}).get(name, 0) for answer in answers for stats in answer.stats)


def _first_difference(answer: Answer, by_key: Index) -> tuple[int, int] | None:
    """Turn and token, from 0, at which an answer leaves the baseline's of the same repeat."""
    baseline = by_key[BASELINE, answer.prompt.question_id]
    other = baseline[0 if answer.label == BASELINE else answer.repeat]
    for turn, (mine, theirs) in enumerate(zip(answer.token_ids, other.token_ids, strict=True)):
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            return turn, next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return None


def _differences(measured: Measurement, by_key: Index) -> list[dict[str, Any]]:
    """Where answers that promise the baseline's tokens have others."""
    exact = {c.label for c in measured.columns if is_token_exact(c.method, measured.sampling)}
    found = []
    for answer in measured.answers:
        difference = _first_difference(answer, by_key) if answer.label in exact else None
        if difference is not None:
            turn, token = difference
            where = {"question_id": answer.prompt.question_id, "repeat": answer.repeat, "turn": turn, "token": token}
            found.append({"label": answer.label, **where})
    return found


def _sample(answer: Answer) -> dict[str, Any]:
    return {
        "label": answer.label,
        "question_id": answer.prompt.question_id,
        "category": answer.prompt.category,
        "repeat": answer.repeat,
        "tokens_per_s": answer.tokens_per_s,
        "timed_tokens": answer.timed_tokens,
        "timed_passes": answer.timed_passes,
        "token_ids": [list(ids) for ids in answer.token_ids],
        "finish_reasons": list(answer.finish_reasons),
        "stats": [dataclasses.asdict(stats) for stats in answer.stats],
    }


def _roofline(measured: Measurement) -> float:
    return measured.weight_bytes / statistics.median(measured.roofline_s) / 1e9


def _spread(values: Iterable[float]) -> dict[str, float]:
    array = np.asarray(list(values), np.float64)
    p5, median, p95 = np.percentile(array, [5, 50, 95])
    return {"mean": float(array.mean()), "median": float(median), "p5": float(p5), "p95": float(p95)}


def _mean_with_interval(values: list[float]) -> dict[str, float | None] | None:
    if not values:
        return None
    low, high = bootstrap_interval(values) or (None, None)
    geometric = statistics.geometric_mean(values)
    return {"mean": statistics.fmean(values), "geometric_mean": geometric, "low": low, "high": high}


def _speed_table(report: dict[str, Any]) -> Table:
    kind = "greedy" if report["sampling"]["temperature"] == 0 else f"temperature {report['sampling']['temperature']}"
    title = f"Speed, {kind}, answers of up to {report['sampling']['max_tokens']} tokens"
    columns = ("", "tokens/s", "median", "p5 to p95", "TTFT ms", "speed-up", "95 %", "call", "tokens/pass", "exact")
    table = _table(title, columns)
    groups = list(report["categories"].items()) if len(report["categories"]) > 1 else []
    for name, group in [*groups, ("overall", report["overall"])]:
        rated = group["rated_prompts"]
        count = f"{group['prompts']} prompt{'s'[: group['prompts'] > 1]}" + (
            f", {rated} rated" if rated != group["prompts"] else ""
        )
        table.add_row(f"[bold]{name}[/] [dim]({count})[/]")
        for label, row in group["columns"].items():
            table.add_row("  " + label.replace("[", "\\["), *_speed_cells(row, rated))
        table.add_section()
    return table


def _speed_cells(row: dict[str, Any], rated: int) -> list[str]:
    rate, speedup, exact = row["tokens_per_s"], row["speedup"], row["exact"]
    std = f" ± {rate['repeat_std']:.1f}" if rate and rate["repeat_std"] is not None else ""
    few = f" (n={row['rated_prompts']})" if row["rated_prompts"] != rated else ""
    bounds = speedup and speedup["low"] is not None
    return [
        f"{rate['mean']:.1f}{std}{few}" if rate else "-",
        f"{rate['median']:.1f}" if rate else "-",
        f"{rate['p5']:.1f} to {rate['p95']:.1f}" if rate else "-",
        f"{row['ttft_s']['mean'] * 1e3:.0f}",
        f"{speedup['mean']:.2f}" if speedup else "-",
        f"{speedup['low']:.2f} to {speedup['high']:.2f}" if bounds else "-",
        f"{row['call_speedup']['mean']:.2f}",
        f"{row['tokens_per_pass']:.2f}",
        "law" if exact["promise"] == "law" else f"{exact['equal']}/{exact['prompts']}",
    ]


def _time_table(report: dict[str, Any]) -> Table:
    columns = (
        "",
        "accepted",
        "verify",
        "draft",
        "other",
        "target pass ms",
        "draft pass ms",
        "GB/s",
        "of roofline",
        "compile s",
    )
    table = _table("Where the time goes, all prompts", columns)
    for column in report["columns"]:
        row = report["overall"]["columns"][column["label"]]
        split, gb_per_s, accepted = row["split"], row["gb_per_s"], row["draft_acceptance_rate"]
        table.add_row(
            column["label"].replace("[", "\\["),
            _percent(accepted),
            *(_percent(split and split[part]) for part in ("verify", "draft", "other")),
            f"{split['target_pass_s'] * 1e3:.1f}" if split else "-",
            f"{column['pass_s']['draft_s'] * 1e3:.1f}" if column["pass_s"]["draft_s"] else "-",
            f"{gb_per_s:.1f}" if gb_per_s else "-",
            _percent(row["of_roofline"]),
            f"{column['compile_s']:.1f}",
        )
    return table


def _notes(report: dict[str, Any]) -> list[str]:
    """What a reader must not miss."""
    lines = []
    for label, row in report["overall"]["columns"].items():
        speedup = row["speedup"]
        if label != BASELINE and speedup and speedup["high"] is not None and speedup["high"] < 1:
            lines.append(f"{label} is slower than plain decoding here: {speedup['mean']:.2f} times its speed.")
    for label in report["overall"]["columns"]:
        found = list({d["question_id"]: d for d in reversed(report["differences"]) if d["label"] == label}.values())[
            ::-1
        ]
        for d in found[:SHOWN_DIFFERENCES]:
            place = f"token {d['token']}" + (f" of turn {d['turn']}" if d["turn"] else "")
            lines.append(
                f"{label} leaves plain decoding at {place} of prompt {d['question_id']} (repeat {d['repeat']})."
            )
        if len(found) > SHOWN_DIFFERENCES:
            lines.append(f"{label} leaves it in {len(found) - SHOWN_DIFFERENCES} further prompts.")
    if report["differences"]:
        lines.append("jaxspec-check tells ties within rounding from faults.")
    if report["answers_that_compiled"]:
        lines.append(
            f"{report['answers_that_compiled']} timed answers compiled something: their times hold its traces."
        )
    return lines


def _footer(report: dict[str, Any]) -> list[str]:
    environment, roofline = report["environment"], report["roofline"]
    peak = environment["peak_device_bytes"] or environment["peak_host_bytes"]
    eos = "ignored" if report["sampling"]["ignore_eos"] else "respected"
    return [
        f"roofline {roofline['gb_per_s']:.1f} GB/s over {report['weight_bytes'] / 1e6:.0f} MB of weights · "
        f"single passes at {report['pass_context']} tokens of context · {report['repeats']} repeats, columns "
        f"interleaved · end-of-sequence tokens {eos}" + (f" · peak memory {peak / 1e9:.1f} GB" if peak else ""),
        f"{environment['device']} · {environment['machine']} · "
        + ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        report["command"],
    ]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"


def _processor() -> str:
    """Name of the processor, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _peak_host_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
