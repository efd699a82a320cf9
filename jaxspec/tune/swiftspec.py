"""Which devices for the draft and which for the target: the profile that places SwiftSpec (paper, section 3.5).
For each split of the devices: times of verify(bs) and expand(w) on its meshes, d from their ratio (floor and
floor + 1), and real decoding with each. Plain decoding and serial trees on all devices are measured beside them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxspec.bench.microbench import PassTimer, median_times, time_pass, time_target_pass
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.tune.costs import CONTEXT, PASSES
from jaxspec.tune.run import Candidate, Progress, Trial

ROWS = (8, 16)
WIDTH = 8
DEEPEST = 8
PASS_REPEATS = 9

# (target devices, draft devices or None for shared ones) -> a loaded pair
Load = Callable[[int, int | None], Any]


@dataclasses.dataclass(frozen=True)
class SplitTimes:
    """Median seconds of single passes on one split."""

    verify_s: Mapping[int, float]  # of the target, by rows bs
    expand_s: float  # of the draft, w rows

    def depths(self, rows: int) -> tuple[int, ...]:
        """d: as many draft passes as fit into a verification, and one more."""
        fitting = min(max(1, math.floor(self.verify_s[rows] / self.expand_s)), DEEPEST)
        return (fitting,) if fitting == DEEPEST else (fitting, fitting + 1)


def split_devices(load: Load, devices: int, progress: Progress) -> Iterator[Trial]:
    """A trial for all `devices` shared, then one for each split, from the middle outwards."""
    splits = sorted(range(1, devices), key=lambda target: abs(2 * target - devices))
    for index, (target, draft) in enumerate([(devices, None), *((n, devices - n) for n in splits)]):
        where = f"target {target}, draft {draft}" if draft else f"{target} shared"
        progress(f"{where}: loading", index, devices)
        try:
            trial = _time_split(load(target, draft), where, target, draft)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            progress(f"{where}: out of memory, left out", index, devices)
            continue
        yield trial
        del trial


def time_split(llm: Any) -> SplitTimes:
    """Time verify(bs) and expand(w), in turn."""
    models = llm.engine.models
    timers: dict[int, PassTimer] = {rows: time_target_pass(models.target, llm.params, rows, CONTEXT) for rows in ROWS}
    timers[0] = time_pass(models.draft, llm.draft_params, WIDTH, CONTEXT, levels=PASSES)
    medians = median_times(timers, PASS_REPEATS, dict.fromkeys(timers, PASSES))
    return SplitTimes({rows: medians[rows] for rows in ROWS}, medians[0])


def _time_split(llm: Any, where: str, target: int, draft: int | None) -> Trial:
    times = time_split(llm)
    # On shared devices growth is in turn with verification: each further pass delays the target.
    depths = {rows: times.depths(rows) if draft else (1, 2) for rows in ROWS}
    placed = {"target_devices": target}
    candidates = []
    for rows in ROWS:
        for depth in depths[rows]:
            settings: dict[str, Any] = {"num_draft_tokens": rows - 1, "width": WIDTH, "depth": depth}
            settings |= {} if draft else {"overlap": False}
            label = f"bs {rows}, w {WIDTH}, d {depth} ({where})"
            own = {"draft_devices": draft} if draft else {}
            candidates.append(Candidate(label, SwiftSpec(**settings), preset=settings, placed=own))
    verify = ", ".join(f"{rows} rows {1e3 * seconds:.2f} ms" for rows, seconds in times.verify_s.items())
    line = f"{where}: verify {verify}; expand {1e3 * times.expand_s:.2f} ms"
    return Trial(llm, candidates, placed, f" ({where})", dataclasses.asdict(times), (line,))
