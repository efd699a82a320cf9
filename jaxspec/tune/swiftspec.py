"""Which devices for the draft, which for the target: the profile that SwiftSpec is placed by (paper, section 3.5).

For each split: times of verify(bs) and expand(w) on its meshes, d from their ratio (floor and floor + 1), and real
decoding with each. What counts is the measured tokens per second.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.bench.microbench import time_pass, time_target_pass
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import MIN_RATED_TOKENS, make_report
from jaxspec.bench.run import BASELINE, Column, Measurement, measure
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Method
from jaxspec.methods.swiftspec.settings import SwiftSpec

BATCHES = (8, 16)
WIDTH = 8
DEEPEST = 8
CONTEXT = 256
PASS_REPEATS = 9
# What speculation has to gain over plain decoding to be worth a preset: less is noise.
LEAST_GAIN = 1.02

# (target devices, draft devices) -> a loaded pair
Load = Callable[[int, int], LLM]
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class SplitTimes:
    """Seconds of single passes of one split, medians.

    Attributes:
      target_devices: of the target.
      draft_devices: of the draft.
      verify_s: of the target, by rows bs.
      expand_s: of the draft, w rows.
    """

    target_devices: int
    draft_devices: int
    verify_s: Mapping[int, float]
    expand_s: float

    def depths(self, batch: int) -> tuple[int, ...]:
        """d: as many draft passes as fit into a verification, and one more."""
        fitting = min(max(1, math.floor(self.verify_s[batch] / self.expand_s)), DEEPEST)
        return (fitting,) if fitting == DEEPEST else (fitting, fitting + 1)


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """A method on a split, decoded with.

    Attributes:
      times: of the split.
      method: `SwiftSpec`, or plain decoding on the target's devices.
      tokens_per_s: median over the prompts that all splits and methods have a rate for.
      tokens_per_pass: the generation rate on these.
      gain: geometric mean over prompts of the speed-up over plain decoding on the same split, interleaved with it.
    """

    times: SplitTimes
    method: Method
    tokens_per_s: float
    tokens_per_pass: float
    gain: float


def profile_splits(
    load: Load, devices: int, prompts: Sequence[BenchPrompt], sampling: SamplingParams, repeats: int, command: str,
    progress: Progress = lambda what: None,
) -> list[SplitResult]:  # fmt: skip
    """Decode with every split of the devices; all results, the fastest first.

    Args:
      load: gives a model and its draft on so many devices each.
      devices: to be split.
      prompts: what is decoded.
      sampling: how, with `max_tokens`.
      repeats: answers to each prompt.
      command: for the report.
      progress: told what is going on.

    Raises:
      ConfigError: the answers are too short to have a rate.
    """
    measurements = []
    rated = list(prompts)
    for target_devices in range(1, devices):
        split = f"target {target_devices}, draft {devices - target_devices}"
        progress(f"{split}: loading")
        llm = load(target_devices, devices - target_devices)
        progress(f"{split}: single passes")
        times = time_split(llm)
        methods = [SwiftSpec(batch, WIDTH, depth=depth) for batch in BATCHES for depth in times.depths(batch)]
        columns = [Column(BASELINE, Autoregressive()), *(Column(_label(m), m) for m in methods)]
        measured = measure(
            llm, columns, prompts, sampling, repeats,
            lambda what, done, total, split=split: progress(f"{split}: {what} ({done} of {total})"),
        )  # fmt: skip
        rated = [prompt for prompt in rated if is_rated(measured, prompt)]
        if not rated:
            raise ConfigError(
                f"{split}: no prompt has answers that can be timed, which takes {MIN_RATED_TOKENS} tokens behind the "
                "first round of plain decoding and two rounds of each other method: raise --max-tokens or give "
                "other --prompts"
            )
        measurements.append((times, measured, (str(llm.model_path), str(llm.draft_path))))
    results = []
    for times, measured, paths in measurements:
        # What one split could not time is left out of all.
        measured = dataclasses.replace(measured, prompts=tuple(rated))
        report = make_report(measured, command, *paths, target_devices=times.target_devices)
        summaries = report["overall"]["columns"]
        results += [_result(times, column.method, summaries[column.label]) for column in measured.columns]
    return sorted(results, key=lambda result: -result.tokens_per_s)


def is_rated(measured: Measurement, prompt: BenchPrompt) -> bool:
    """Whether each column's answers to a prompt have a rate, and plain decoding's are long enough for one."""
    most = measured.sampling.max_tokens
    enough = MIN_RATED_TOKENS if most is None else min(MIN_RATED_TOKENS, most - 1)
    mine = [answer for answer in measured.answers if answer.prompt.question_id == prompt.question_id]
    return all(a.tokens_per_s and (a.label != BASELINE or a.timed_tokens >= enough) for a in mine)


def pick(results: Sequence[SplitResult]) -> SplitResult:
    """The fastest, or the fastest plain decoding where speculation does not gain on it."""
    plain = max((r for r in results if isinstance(r.method, Autoregressive)), key=lambda r: r.tokens_per_s)
    return results[0] if results[0].tokens_per_s >= LEAST_GAIN * plain.tokens_per_s else plain


def time_split(llm: LLM) -> SplitTimes:
    """Time verify(bs) and expand(w), in turn."""
    models = llm.engine.models
    assert models.draft is not None and llm.draft_params is not None
    runs: dict[int, Callable[..., float]] = {
        rows: time_target_pass(models.target, llm.params, rows, CONTEXT) for rows in BATCHES
    }
    runs[0] = time_pass(models.draft, llm.draft_params, WIDTH, CONTEXT)
    for run in runs.values():
        run()
    samples: dict[int, list[float]] = {rows: [] for rows in runs}
    for _ in range(PASS_REPEATS):
        for rows, run in runs.items():
            samples[rows].append(run())
    medians = {rows: statistics.median(values) for rows, values in samples.items()}
    return SplitTimes(
        models.target.plan.tensor, models.draft.plan.tensor, {rows: medians[rows] for rows in BATCHES}, medians[0]
    )


def _label(method: SwiftSpec) -> str:
    return f"bs {method.batch}, d {method.depth}"


def _result(times: SplitTimes, method: Method, summary: Mapping[str, Any]) -> SplitResult:
    rate, gain = summary["tokens_per_s"]["median"], summary["speedup"]["geometric_mean"]
    return SplitResult(times, method, rate, summary["tokens_per_pass"], gain)
