"""How many draft passes a round has: chosen from measured times (docs/algorithms.md, "Choosing the depth")."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.methods.core.cost_model import PRIOR_MEAN
from jaxspec.methods.core.timing import time_turns
from jaxspec.runtime import hosts

# Samples of each timed program; their median counts.
SAMPLES = 5


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Draft passes of a round.

    Attributes:
      depth: d, passes beside a verification, or in turn with it.
      refill: passes that a batch waits for after a root that the draft had not evaluated.
      ratio: time of a verification over that of a draft pass; None where it was not measured.
    """

    depth: int
    refill: int
    ratio: float | None = None


def choose_schedule(
    ratio: float, depth: int | None, refill: int | None, *, most_depth: int, most_refill: int, overlap: bool
) -> Schedule:
    """Fill in what is None, for a verification that takes as long as `ratio` draft passes.

    Growth beside a verification is free as long as it is shorter: as many passes as fit, at most `most_depth`. Passes
    that a batch waits for are weighed: at most `most_refill` after a miss, and where draft and target take turns at
    most `most_depth` in every round.
    """
    if depth is None:
        fitting = math.floor(ratio) if overlap else waited_passes(ratio, most_depth)
        depth = max(1, min(most_depth, fitting))
    if refill is None:
        refill = waited_passes(ratio, most_refill) if overlap else 0
    return Schedule(depth, refill, ratio)


def waited_passes(ratio: float, most: int) -> int:
    """Passes of growth, 0 to `most`, for which a batch after a miss should wait: most expected tokens per second.

    Each level of the tree is accepted with the chance that is assumed of a token of unknown probability. The pass that
    evaluates the root gives one level, each further pass another one.
    """

    def speed(passes: int) -> float:
        tokens = sum(PRIOR_MEAN**level for level in range(passes + 2))
        return tokens / (ratio + 1 + passes)

    return max(range(most + 1), key=speed)


def longest_mean(num_rows: int, depth: int, refill: int) -> int:
    """The largest mean acceptance length that overlapped trees can have, whatever the draft (docs/algorithms.md)."""
    return min(num_rows, max(2 + refill, depth))


def time_in_turn(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each step; a step dispatches, and its result is waited for.

    Each step may set itself up before it returns the call that is timed.
    """

    def turn() -> dict[str, float]:
        seconds = {}
        for name, prepare in steps.items():
            dispatch = prepare()
            start = time.perf_counter()
            jax.block_until_ready(dispatch())
            seconds[name] = time.perf_counter() - start
        return seconds

    # A process without a part in a step has nothing to wait for.
    measured = hosts.gather("times of steps", time_turns(turn, SAMPLES))
    return {name: max(times[name] for times in measured) for name in steps}
