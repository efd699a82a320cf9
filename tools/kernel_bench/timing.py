"""Device time of one call of a small function.

A call is dispatched in tens of microseconds and runs in a few: a clock around it measures the host. So the time comes
from the profiler, which has CUPTI record when each kernel starts and ends: the sum of a call's kernels, without gaps
between them. What a fused kernel saves in launches comes on top of that, and the number of launches is reported.

Where the profiler shows no device (CPU, or a machine that forbids CUPTI), the time is that of a long loop inside one
program less that of a short one: dispatch cancels out, gaps between kernels stay in. There a result feeds the next
call, so that no call can be moved out of the loop; that adds a mean over the result and an addition to every call.

Every call works on operands that others have pushed out of the cache, as in decoding, where all other layers' weights
are read in between: `copies` are used in turn.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# function(operands, state) -> (result, new state); state is donated, as a cache is.
Function = Callable[[Any, Any], tuple[jax.Array, Any]]
Copies = Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]

# Twice the largest L2 cache of today's GPUs.
COLD_BYTES = 256 << 20
# Attention of one KV head after a thousand tokens reads half a megabyte.
MOST_COPIES = 512
LOOP_COPIES = 64  # in one program, which compiles the call as often
MOST_ROUNDS = 1 << 14


class Timing(NamedTuple):
    """Time of one call.

    Attributes:
      seconds: on the device.
      method: "trace" or "loop"; see the module.
      launches: kernels of one call, where they were counted.
    """

    seconds: float
    method: str
    launches: float | None = None


def count_copies(nbytes: int) -> int:
    """Copies of operands of `nbytes` that together do not fit into a cache."""
    return max(1, min(MOST_COPIES, -(-COLD_BYTES // nbytes)))


def time_calls(function: Function, copies: Copies, calls: int = 20, repeats: int = 3) -> Timing:
    """Device time of one call, over at least `calls` of them, every copy in turn.

    Args:
      function: traced once; it must not close over arrays.
      copies: operands and states. The first operand is a float array; states are used up.
      calls: at least so many are timed.
      repeats: of the loop; the fastest counts.
    """
    rounds = -(-calls // len(copies))
    # Without donation XLA would copy each state, and the copy would count.
    step = jax.jit(function, donate_argnums=1)
    operands, states = [operands for operands, _ in copies], [state for _, state in copies]

    def run(rounds: int) -> None:
        out = None
        for _ in range(rounds):
            for index, operand in enumerate(operands):
                out, states[index] = step(operand, states[index])
        jax.block_until_ready((out, states))

    run(1)
    if jax.default_backend() != "cpu":
        busy, launches = trace_device(functools.partial(run, rounds))
        if launches:
            count = rounds * len(copies)
            return Timing(busy / count, "trace", launches / count)
    return time_loop(function, list(zip(operands, states, strict=True))[:LOOP_COPIES], rounds, repeats)


def trace_device(run: Callable[[], None]) -> tuple[float, int]:
    """Seconds that the first GPU's streams were busy while `run` ran, and how many things they did; zeros if unseen."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        # Python's calls would fill the profile.
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return (0.0, 0) if not files else sum_streams(jax.profiler.ProfileData.from_file(str(files[0])).planes)


def sum_streams(planes: Any) -> tuple[float, int]:
    """Seconds and number of the events on the streams of the first GPU of a profile."""
    # Other lines of the same plane ("XLA Ops") show the same kernels again, grouped.
    durations = [
        event.duration_ns
        for plane in planes
        if plane.name == "/device:GPU:0"
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sum(durations) * 1e-9, len(durations)


def time_loop(function: Function, copies: Copies, rounds: int, repeats: int) -> Timing:
    """Time of one call by the difference between a long and a short loop; see the module."""
    operands = [operand for operand, _ in copies]

    def loop(count: jax.Array, operands: Any, states: Any) -> jax.Array:
        def once(_: Any, carry: Any) -> Any:
            fed, states = carry
            after = []
            for (first, *others), state in zip(operands, states, strict=True):
                out, state = function((first + fed.astype(first.dtype), *others), state)
                fed = jnp.minimum(jnp.abs(jnp.mean(out.astype(jnp.float32))), 1e-6)
                after.append(state)
            return fed, after

        return jax.lax.fori_loop(0, count, once, (jnp.float32(0), states))[0]

    program = jax.jit(loop)
    states = [state for _, state in copies]

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(np.int32(count), operands, states))
        return time.perf_counter() - start

    seconds(1)
    # Tiny calls drown in the noise of their dispatch: a time of nothing would win every comparison.
    while rounds <= MOST_ROUNDS:
        long, short = (min(seconds(count) for _ in range(repeats)) for count in (1 + rounds, 1))
        if long > short:
            return Timing((long - short) / (rounds * len(copies)), "loop")
        rounds *= 4
    raise RuntimeError("a long loop takes no longer than a short one: the clock does not see this call")


def median_step(sample: Callable[[int], float], passes: int, repeats: int = 3) -> float:
    """Seconds of one pass of a program that runs as many as it is told, dispatch taken out by the difference.

    Args:
      sample: seconds of so many passes; see `jaxspec.bench.microbench.time_pass`.
      passes: of the long run.
      repeats: of which the median is taken.
    """
    sample(1)
    return statistics.median((sample(1 + passes) - sample(1)) / passes for _ in range(repeats))
