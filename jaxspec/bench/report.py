"""From a measurement to numbers: rates, ratios with intervals, the parts of a pass, and every sample."""

import dataclasses
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import jaxspec
from jaxspec.bench.prompts import list_categories
from jaxspec.bench.run import BASELINE, Answer, Column, Measurement, is_token_exact, verified_rows

# Rates of shorter answers say little: one round more or less changes them by half.
MIN_RATED_TOKENS = 8

RESAMPLES = 2000


def make_report(
    measured: Measurement, command: str, model: str, draft: str | None, target_devices: int = 1
) -> dict[str, Any]:
    """One JSON object: what was measured, how, where, and every sample; `target_devices` shared the target."""
    by_key, roofline = _index(measured), _roofline(measured)
    groups = {name: [p for p in measured.prompts if p.category == name] for name in list_categories(measured.prompts)}
    times = {label: dataclasses.asdict(found) for label, found in measured.pass_times.items()}
    return {
        "command": command,
        "model": model,
        "draft": draft,
        "environment": describe_environment(target_devices),
        "sampling": dataclasses.asdict(measured.sampling),
        "repeats": measured.repeats,
        "interrupted": measured.interrupted,
        "columns": [
            {
                "label": column.label,
                "method": column.method and column.method.name,
                "settings": dataclasses.asdict(column.method) if column.method else {},
                "compile_s": measured.compile_s[column.label],
                "pass_s": times.get(column.label),
            }
            for column in measured.columns
        ],
        "pass_context": measured.context,
        "weight_bytes": measured.weight_bytes,
        "weights": measured.weights,
        "kernels": measured.kernels.name,
        "roofline": roofline and {"gb_per_s": roofline, "seconds": _spread(measured.roofline_s)},
        "overall": _summarise_group(measured, by_key, measured.prompts),
        "categories": {name: _summarise_group(measured, by_key, prompts) for name, prompts in groups.items()},
        "differences": list(_differences(measured, by_key)),
        "answers_that_compiled": sum(any(stats.compile_s for stats in a.stats) for a in measured.answers),
        "samples": [_sample(answer) for answer in measured.answers],
    }


def describe_environment(devices: int = 1) -> dict[str, Any]:
    """Devices (of which `devices` were used), machine, versions, and peak memory in bytes."""
    device = jax.devices()[0]
    memory = device.memory_stats() if device.platform != "cpu" else None
    # By the modules themselves: a source tree that runs without being installed has no metadata.
    modules = {"jaxspec-decode": jaxspec, "jax": jax, "jaxlib": jaxlib, "numpy": np}
    versions = {name: module.__version__ for name, module in modules.items()}
    return {
        "device": f"{devices} of {len(jax.devices())} x {device.device_kind}",
        "machine": ", ".join(filter(None, (_processor(), f"{os.cpu_count()} cores", platform.machine()))),
        "versions": {"python": platform.python_version(), **versions},
        "peak_host_bytes": _peak_host_bytes(),
        "peak_device_bytes": (memory or {}).get("peak_bytes_in_use"),
    }


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


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean, by drawing `values` anew (seeded) with replacement; None for fewer than two."""
    if len(values) < 2:
        return None
    array = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(0, len(array), (RESAMPLES, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


Index = dict[tuple[str, str | int], list[Answer]]


def _index(measured: Measurement) -> Index:
    """Answers by column and prompt, in order of repeats."""
    by_key: Index = {}
    for answer in sorted(measured.answers, key=lambda a: a.repeat):
        by_key.setdefault((answer.label, answer.prompt.question_id), []).append(answer)
    return by_key


def _summarise_group(measured: Measurement, by_key: Index, prompts: Sequence[Any]) -> dict[str, Any]:
    ids = [prompt.question_id for prompt in prompts]
    rated = [i for i in ids if all(is_rated(a, measured.sampling.max_tokens) for a in by_key[BASELINE, i])]
    columns = {c.label: _summarise_column(measured, by_key, c, ids, rated) for c in measured.columns}
    return {"prompts": len(ids), "rated_prompts": len(rated), "columns": columns}


def is_rated(answer: Answer, max_tokens: int | None) -> bool:
    """Whether plain decoding's answer is long enough for a rate: `MIN_RATED_TOKENS`, or all that it may have."""
    if answer.tokens_per_s is None:
        return False
    return answer.timed_tokens >= MIN_RATED_TOKENS or answer.tokens == len(answer.stats) * (max_tokens or 0)


def _summarise_column(measured: Measurement, by_key: Index, column: Column, ids: list, rated: list) -> dict[str, Any]:
    label = column.label
    mine = [answer for i in ids for answer in by_key[label, i]]
    rated = [i for i in rated if all(answer.tokens_per_s for answer in by_key[label, i])]

    def ratios(rate: Callable[[Answer], Any], over: list) -> list[float]:
        pairs = (zip(by_key[label, i], by_key[BASELINE, i], strict=True) for i in over)
        return [statistics.median(rate(a) / rate(b) for a, b in pair) for pair in pairs]

    rates = [[answer.tokens_per_s or 0.0 for answer in by_key[label, i]] for i in rated]
    spread: dict[str, Any] | None = _spread([statistics.median(r) for r in rates]) if rates else None
    if spread:
        # An interrupted run has one repeat less of some prompts.
        means = [statistics.fmean(r) for r in zip(*rates, strict=False)]
        spread["repeat_std"] = statistics.stdev(means) if len(means) > 1 else None
    decode_s, roofline = sum(answer.decode_s for answer in mine), _roofline(measured)
    gb_per_s = (
        measured.weight_bytes * sum(a.timed_passes for a in mine) / decode_s / 1e9 if decode_s and roofline else None
    )
    drafted, accepted = _counted(mine, "num_draft_tokens"), _counted(mine, "num_accepted_draft_tokens")
    ttft_s = [statistics.median(statistics.fmean(s.ttft_s for s in a.stats) for a in by_key[label, i]) for i in ids]
    return {
        "rated_prompts": len(rated),
        "tokens_per_s": spread,
        "ttft_s": _spread(ttft_s),
        "speedup": _mean_with_interval(ratios(lambda a: a.tokens_per_s, rated)),
        "call_speedup": _mean_with_interval(ratios(lambda a: a.call_tokens_per_s, ids)),
        "call_tokens_per_s": statistics.fmean(
            statistics.median(a.call_tokens_per_s for a in by_key[label, i]) for i in ids
        ),
        "acceptance_length": sum(a.tokens for a in mine) / sum(a.passes for a in mine),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "split": _split(mine, column, measured, decode_s),
        "gb_per_s": None if column.model else gb_per_s,
        "of_roofline": gb_per_s / roofline if gb_per_s and roofline and not column.model else None,
        "exact": {
            "promise": "none" if column.model else "tokens" if is_token_exact(column.method, measured.sampling)
            else "distribution",
            "equal": sum(all(_first_difference(a, by_key) is None for a in by_key[label, i]) for i in ids),
            "prompts": len(ids),
        },
    }  # fmt: skip


def _split(answers: list[Answer], column: Column, measured: Measurement, decode_s: float) -> dict[str, float] | None:
    """Seconds per target pass, and of it the passes as timed alone; `rest_s` may be negative."""
    times, passes = measured.pass_times.get(column.label), sum(answer.timed_passes for answer in answers)
    if times is None or not decode_s or not passes:
        return None
    method, kernels = column.method, measured.kernels
    rows = [count for answer in answers for stats in answer.stats for count in verified_rows(stats, method, kernels)]
    target_s = sum(times.target_s[count] for count in rows) / passes
    draft_passes = sum(answer.timed_draft_passes for answer in answers) / passes
    draft_s = times.draft_root_s * min(draft_passes, 1.0) + times.draft_s * max(0.0, draft_passes - 1.0)
    whole_s = decode_s / passes
    return {"pass_s": whole_s, "target_s": target_s, "draft_s": draft_s, "rest_s": whole_s - target_s - draft_s}


def _counted(answers: list[Answer], name: str) -> int:
    counters = [stats.speculative_decoding for answer in answers for stats in answer.stats]
    return sum(getattr(each, name) for each in counters if each is not None)


def _first_difference(answer: Answer, by_key: Index) -> tuple[int, int] | None:
    """Turn and token, from 0, at which an answer leaves the baseline's of the same repeat."""
    baseline = by_key[BASELINE, answer.prompt.question_id]
    other = baseline[0 if answer.label == BASELINE else answer.repeat]
    for turn, (mine, theirs) in enumerate(zip(answer.token_ids, other.token_ids, strict=True)):
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            return turn, next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return None


def _differences(measured: Measurement, by_key: Index) -> Iterator[dict[str, Any]]:
    """Answers of methods that promise the baseline's tokens have others."""
    exact = {c.label for c in measured.columns if is_token_exact(c.method, measured.sampling)}
    for answer in measured.answers:
        difference = _first_difference(answer, by_key) if answer.label in exact else None
        if difference is not None:
            where = {"question_id": answer.prompt.question_id, "repeat": answer.repeat}
            yield {"label": answer.label, **where, "turn": difference[0], "token": difference[1]}


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


def _roofline(measured: Measurement) -> float | None:
    """GB/s of a pass over all weights; None where that was not measured."""
    if not measured.roofline_s:
        return None
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
