"""Dividing devices between a draft and the target: the profile that places SwiftSpec (paper, section 3.5).

All devices for the target come first: plain decoding, chains and trees in turn. Then each split of the devices: times
of verify(bs) and expand(w) on its meshes, settings that follow from them, and real decoding with each. A split that
cannot fit by its bytes is left out before it is loaded, and one that does not fit after all when that shows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxspec.bench.microbench import PassTimer, median_times, time_pass, time_target_pass
from jaxspec.llm import internals
from jaxspec.methods.chain import Chain
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swiftspec.schedule import waited_passes
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.tune.plan import list_splits
from jaxspec.tune.run import CONTEXT, Candidate, Progress, Trial, is_out_of_memory

# Sizes that are timed: rows of a batch, and leaves of a draft pass.
ROWS, WIDTHS = (8, 16, 32), (4, 8, 16)
WIDTH = 8
# Twice the rows are tried where they take at most so many times as long; another width where it costs so much more or
# so much less than `WIDTH`.
MORE_ROWS, WIDER, NARROWER = 1.5, 1.25, 0.75
CHAINS = (2, 4, 8)
# Budgets of large trees: those whose pass takes at most `KNEE` times that of one row.
BUDGETS, KNEE = (16, 64, 256, 1024, 4096), 2.0
PASS_REPEATS = 9
# Passes per sample, in one program: its dispatch belongs to a round, not to each pass.
PASSES = 4

# (target devices, draft devices or None for shared ones) -> a loaded pair
Load = Callable[[int, int | None], Any]
# The same devices -> why they cannot hold the pair, by their bytes; None where they can.
Refuse = Callable[[int, int | None], str | None]


@dataclasses.dataclass(frozen=True)
class SplitTimes:
    """Median seconds of single passes on one split."""

    verify_s: Mapping[int, float]  # of the target, by rows bs
    expand_s: Mapping[int, float]  # of the draft, by width w

    def settings(self, *, shared: bool) -> list[dict[str, Any]]:
        """Settings of SwiftSpec that the times suggest: sizes around bs = w = 8, each with the depths that fit."""
        rows, widths = [ROWS[0]], [WIDTH]
        for n in ROWS[1:]:
            if self.verify_s[n] > MORE_ROWS * self.verify_s[rows[-1]]:
                break
            rows.append(n)
        widths += [w for w in WIDTHS if w > WIDTH and self.expand_s[w] <= WIDER * self.expand_s[WIDTH]]
        widths += [w for w in WIDTHS if w < WIDTH and self.expand_s[w] <= NARROWER * self.expand_s[WIDTH]]
        found = [self._with(n, WIDTH, depth, shared) for n in rows for depth in self.depths(n, WIDTH, shared=shared)]
        return found + [self._with(rows[0], w, self.depths(rows[0], w, shared=shared)[0], shared) for w in widths[1:]]

    def depths(self, rows: int, width: int, *, shared: bool) -> tuple[int, ...]:
        """d: as many draft passes as fit into a verification, and one more; at most what a batch can use.

        On shared devices growth is in turn: as many as are expected to pay, and one more.
        """
        ratio = self.verify_s[rows] / self.expand_s[width]
        fitting = waited_passes(ratio, rows) if shared else math.floor(ratio)
        fitting = max(1, min(fitting, rows))
        return (fitting,) if fitting == rows else (fitting, fitting + 1)

    def _with(self, rows: int, width: int, depth: int, shared: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {"num_draft_tokens": rows - 1, "width": width, "depth": depth}
        if shared:
            return settings | {"overlap": False, "reuse": False}
        refill = waited_passes(self.verify_s[rows] / self.expand_s[width], rows - 2)
        return settings | ({"refill": refill} if refill else {})


def split_devices(load: Load, devices: int, progress: Progress, refuse: Refuse = lambda *_: None) -> Iterator[Trial]:
    """A trial for all `devices` shared, then one for each split, the middle first; one pair is held at a time."""
    for index, (target, draft) in enumerate(list_splits(devices)):
        where = f"target {target}, draft {draft}" if draft else f"{target} shared"
        if why := refuse(target, draft):
            progress(f"{where}: {why}, left out", index, devices)
            continue
        progress(f"{where}: loading", index, devices)
        try:
            trial = _time_split(load(target, draft), where, target, draft)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            progress(f"{where}: out of memory, left out", index, devices)
            continue
        yield trial
        del trial


def time_split(llm: Any) -> SplitTimes:
    """Time verify(bs) and expand(w), in turn; several passes in one program, so that dispatch is not counted."""
    models, params = internals(llm).models, internals(llm).params
    assert models.draft is not None and params.draft is not None
    timers: dict[Any, PassTimer] = {
        ("verify", rows): time_target_pass(models.target, params.target, rows, CONTEXT) for rows in ROWS
    }
    timers |= {
        ("expand", width): time_pass(models.draft, params.draft, width, CONTEXT, levels=PASSES) for width in WIDTHS
    }
    medians = median_times(timers, PASS_REPEATS, PASSES)
    return SplitTimes({n: medians["verify", n] for n in ROWS}, {w: medians["expand", w] for w in WIDTHS})


def time_budgets(llm: Any) -> dict[int, float]:
    """Seconds of target passes of one row, then of ever larger budgets until one is over the knee."""
    target, params, found = internals(llm).target, internals(llm).params.target, {}
    for rows in (1, *(budget + 1 for budget in BUDGETS)):
        try:
            timer = time_target_pass(target, params, rows, CONTEXT)
            found[rows] = median_times({rows: timer}, PASS_REPEATS)[rows]
        except (MemoryError, RuntimeError) as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
            break  # larger trees do not fit either
        if found[rows] > KNEE * found[1]:
            break
    return found


def knee(times: Mapping[int, float]) -> int:
    """The largest timed budget whose pass takes at most `KNEE` times that of one row; the smallest if none does."""
    return max((rows - 1 for rows, seconds in times.items() if rows > 1 and seconds <= KNEE * times[1]),
               default=BUDGETS[0])  # fmt: skip


def _time_split(llm: Any, where: str, target: int, draft: int | None) -> Trial:
    times, shared = time_split(llm), draft is None
    placed: dict[str, Any] = {"target_devices": target}
    own = {} if shared else {"draft_devices": draft}
    candidates, lines = [], []
    if shared:
        budgets = time_budgets(llm)
        candidates += [Candidate(f"chain {n} ({where})", Chain(n)) for n in CHAINS]
        best = knee(budgets)
        candidates.append(Candidate(f"specexec {best} ({where})", SpecExec(best)))
        passes = ", ".join(f"{rows} rows {1e3 * seconds:.2f} ms" for rows, seconds in budgets.items())
        lines.append(f"{where}: large trees: {passes}; the knee is at {best}")
    for settings in times.settings(shared=shared):
        label = f"bs {settings['num_draft_tokens'] + 1}, w {settings['width']}, d {settings['depth']} ({where})"
        candidates.append(Candidate(label, SwiftSpec(**settings), preset=settings, placed=own))
    verify = ", ".join(f"{rows} rows {1e3 * seconds:.2f} ms" for rows, seconds in times.verify_s.items())
    expand = ", ".join(f"{width} leaves {1e3 * seconds:.2f} ms" for width, seconds in times.expand_s.items())
    lines.insert(0, f"{where}: verify {verify}; expand {expand}")
    return Trial(llm, candidates, placed, f" ({where})", dataclasses.asdict(times), tuple(lines))
