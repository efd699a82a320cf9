"""Goals of GPU kernels, and whether they did."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from kernel_bench.rounds import SPECEXEC_RATIOS

ATTENTION_SPEEDUP = 1.5
VERIFY_RATIO = 1.15
BANDWIDTH_SHARE = 0.70
ATTENTION_ROWS, ATTENTION_PREFIX = 8, 1024
STEP_PREFIX = 512
# Written down before anything of these ran: packed steps and exact numerics of one row, and the share of the link.
PACKED_SPEEDUP, EXACT_RATIO, LINK_SHARE = 2.5, 1.10, 0.80
PACKED = ("int4_g128", "q4_k")


def judge(parts: dict[str, dict[str, Any]], bandwidth: float | None) -> list[dict[str, Any]]:
    """Each target with what was measured; `met` is None where something is missing.

    Args:
      parts: results by name; see `parts.run_rows`.
      bandwidth: bytes per second of the device.
    """
    verdicts = [*_judge_tests(parts), *_judge_forms(parts), *_judge_defaults(parts), *_judge_link(parts)]
    verdicts += [_judge_attention(row) for row in _rows(parts, "tree_attention") if _is_target(row)]
    steps = [row for row in _rows(parts, "steps") if row.get("kernels") == "auto" and row.get("prefix") == STEP_PREFIX]
    seconds = {row["rows"]: row.get("seconds") for row in steps}
    ratio = _divide(seconds.get(16), seconds.get(1))
    target = f"verify(16) at most {VERIFY_RATIO} of verify(1), llama-3-8b, prefix {STEP_PREFIX}"
    verdicts.append(_verdict(target, ratio, most=VERIFY_RATIO))
    plain = next((row for row in steps if row["rows"] == 1), {})
    rate = _divide(plain.get("bytes"), plain.get("seconds"))
    target = f"a plain step at {BANDWIDTH_SHARE:.0%} of memory bandwidth or more, llama-3-8b bfloat16"
    verdicts.append(_verdict(target, _divide(rate, bandwidth), least=BANDWIDTH_SHARE))
    if not any("attention" in verdict["target"] for verdict in verdicts):
        verdicts.insert(0, _verdict(_attention_target("any model"), None))
    return verdicts


def _judge_tests(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    outcomes = [row["outcome"] for row in _rows(parts, "tests") if "outcome" in row]
    failed = float(sum(outcome == "failed" for outcome in outcomes)) if outcomes else None
    return [_verdict("no test fails", failed, most=0)]


def _judge_forms(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps of other forms beside those of `auto` in bfloat16."""
    seconds = {(row["kernels"], row["rows"]): row.get("seconds") for row in _rows(parts, "steps")
               if row.get("prefix") == STEP_PREFIX}  # fmt: skip
    verdicts = []
    for name in PACKED:
        gain = _divide(seconds.get(("auto", 1)), seconds.get((f"pallas-triton {name}", 1)))
        target = f"a step with {name} weights {PACKED_SPEEDUP} times as fast as bfloat16"
        verdicts.append(_verdict(target, gain, least=PACKED_SPEEDUP))
    for rows in (1, 8):
        cost = _divide(seconds.get(("auto exact", rows)), seconds.get(("auto", rows)))
        target = f"exact numerics at most {EXACT_RATIO} of the time, T={rows}"
        verdicts.append(_verdict(target, cost, most=EXACT_RATIO))
    return verdicts


def _judge_defaults(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels that `auto` leaves out until this is met: then it may have them. Large budgets."""
    seconds = {row["name"]: row.get("seconds") for row in _rows(parts, "rounds")}
    verdicts = []
    for method, accepted in (("plain", 0), ("specexec", 2)):
        of_auto, of_all = (
            seconds.get(f"rounds, {method}{more}, {accepted} accepted") for more in ("", ", pallas-triton")
        )
        target = f"add_norm and move_rows pay in rounds of {method}"
        verdicts.append(_verdict(target, _divide(of_auto, of_all), least=1.0))
    for budget, most in SPECEXEC_RATIOS.items():
        ratio = _divide(seconds.get(f"rounds, specexec {budget}, 4 accepted"), seconds.get("rounds, plain, 0 accepted"))
        target = f"a round of specexec {budget} at most {most} rounds of plain decoding"
        verdicts.append(_verdict(target, ratio, most=most))
    return verdicts


def _judge_link(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rates = {row["name"]: row.get("bytes_per_s") for row in _rows(parts, "offload")}
    share = _divide(rates.get("streamed pass"), rates.get("link"))
    return [_verdict(f"streamed layers at {LINK_SHARE:.0%} of the link or more", share, least=LINK_SHARE)]


def best_kernel(row: dict[str, Any]) -> str | None:
    """Name of the fastest kernel of ours in a row, or None."""
    times = {name: timing["seconds"] for name, timing in row.get("times", {}).items() if name != "xla"}
    return min(times, key=times.__getitem__) if times else None


def speedup(row: dict[str, Any], name: str | None) -> float | None:
    """Time of XLA's form over that of an implementation, or None where one of them was not seen by the profiler.

    The clock around a loop counts the gaps between launches, which the profiler does not: the two do not compare.
    """
    timings = [row.get("times", {}).get(each) for each in ("xla", name)]
    if any(timing is None or timing["method"] != "trace" for timing in timings):
        return None
    return _divide(*(timing["seconds"] for timing in timings if timing))


def _judge_attention(row: dict[str, Any]) -> dict[str, Any]:
    """The default kernel counts, not the fastest that there is."""
    name = row.get("auto")
    return _verdict(f"{_attention_target(row['model'])} ({name})", speedup(row, name), least=ATTENTION_SPEEDUP)


def _attention_target(model: str) -> str:
    return f"attention {ATTENTION_SPEEDUP} times XLA's speed at T={ATTENTION_ROWS}, prefix {ATTENTION_PREFIX}, {model}"


def _is_target(row: dict[str, Any]) -> bool:
    sizes = row.get("sizes", {})
    return sizes.get("T") == ATTENTION_ROWS and sizes.get("prefix") == ATTENTION_PREFIX


def _verdict(
    target: str, measured: float | None, *, least: float = -math.inf, most: float = math.inf
) -> dict[str, Any]:
    return {"target": target, "measured": measured, "met": None if measured is None else least <= measured <= most}


def _rows(parts: dict[str, dict[str, Any]], name: str) -> Sequence[dict[str, Any]]:
    rows: Iterable[dict[str, Any]] = parts.get(name, {}).get("rows", ())
    return list(rows)


def _divide(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
