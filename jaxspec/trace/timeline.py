"""When each program of a generation ran on its devices, as a Chrome/Perfetto trace and as a summary.

A thread per row waits for a small result of each program, in the order of dispatch, and notes the time of completion. A
program starts at the latest of its dispatch, the completion of its inputs, and that of the program before it on the
same devices. The clock is the host's. A completion is noted tens of microseconds late, or milliseconds where the CPU
has no free core.
"""

import collections
import contextlib
import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.files import write_whole
from jaxspec.methods.core.round import Models, StepOutput
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.trace import Launch, Read, recording
from jaxspec.trace import events
from jaxspec.trace.events import DISPATCH, HOST, READ, TRANSFERS, WAIT, Event, TraceSummary

# Generations whose latest results are kept, to tell which program made an input.
GENERATIONS = 32


@dataclasses.dataclass(eq=False)
class _Mark:
    """An event; a watcher fills in its end."""

    row: str
    name: str
    round: int
    generation: int
    dispatched: float
    inputs: tuple["_Mark", ...] = ()
    end: float | None = None


# By row and name of a program or transfer: its latest mark and results.
_Latest = dict[tuple[str, str], tuple[_Mark, tuple[jax.Array, ...]]]


class _Watcher:
    """A thread that notes when results of one row are ready, in order."""

    def __init__(self, row: str):
        self._waiting: queue.SimpleQueue[tuple[_Mark, jax.Array] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"trace {row}", daemon=True)
        self._thread.start()

    def watch(self, mark: _Mark, result: jax.Array) -> None:
        self._waiting.put((mark, result))

    def close(self) -> None:
        """Wait for all results that were handed over."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            mark, result = item
            try:
                result.block_until_ready()
            except Exception:
                continue  # the program failed; reading the round raises the error
            mark.end = time.perf_counter()
            del item, result


class Timeline:
    """A `runtime.trace.Recorder` of the generations that run while it is entered; a process can have one at a time.

    >>> with Timeline(models) as timeline:
    ...     llm.generate("The sea is")
    >>> timeline.summary().overlap, timeline.write("out.json")
    """

    def __init__(self, models: Models):
        """Give the devices of each model a row."""
        target, draft = models.target.plan, None if models.draft is None else models.draft.plan
        if draft is None or set(draft.devices) == set(target.devices):
            plans = {events.SHARED: target}
        else:
            plans = {events.TARGET: target, events.DRAFT: draft}
        self._rows = {frozenset(plan.devices): row for row, plan in plans.items()}
        self._labels = {row: _label(row, plan) for row, plan in plans.items()}
        # Models on the same devices send nothing to each other.
        others = (HOST,) if len(plans) == 1 else (TRANSFERS, HOST)
        self._labels |= {row: row for row in others}
        self._watchers: dict[str, _Watcher] = {}
        self._marks: list[_Mark] = []
        self._host: list[Event] = []
        self._open: list[tuple[str, float, int, int]] = []  # host events that have begun, the innermost last
        self._latest: dict[int, _Latest] = {}  # by generation, the one that ran last at the end
        self._results: dict[int, StepOutput] = {}  # by round
        self._current: tuple[int, int] | None = None  # round and generation that are being dispatched
        self._rounds = self._generations = 0
        self._exit = contextlib.ExitStack()
        self._began = time.perf_counter()

    def __enter__(self) -> "Timeline":
        self._exit.enter_context(recording(self))
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        self.end()

    def begin(self) -> None:
        """Start to watch, for another recorder that hands on what it is told."""
        self._watchers = {row: _Watcher(row) for row in self._labels if row != HOST}
        self._began = time.perf_counter()

    def end(self) -> None:
        """Wait for all that was watched."""
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers = {}
        self._latest.clear()

    def generation(self, state: Any, launch: Launch, read: Read) -> tuple[Launch, Read]:
        # Prefill has no result to watch. Wait for it, so that the first round starts after it.
        jax.block_until_ready(state)
        generation, self._generations = self._generations, self._generations + 1
        launched: collections.deque[int] = collections.deque()

        def watched_launch(*args: Any) -> Any:
            number, self._rounds = self._rounds, self._rounds + 1
            launched.append(number)
            self._current = number, generation
            try:
                with self._on_host(DISPATCH, number, generation):
                    return launch(*args)
            finally:
                self._current = None

        def watched_read(round_: Any, *args: Any) -> Any:
            number = launched.popleft()
            with self._on_host(WAIT, number, generation):
                jax.block_until_ready(round_)
            with self._on_host(READ, number, generation):
                results = read(round_, *args)
            if len(results) == 1:  # a session that was opened here may go on when no trace is taken any more
                self._results[number] = results[0]
            return results

        return watched_launch, watched_read

    def program(self, name: str, plan: MeshPlan, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        row = self._rows.get(frozenset(plan.devices))
        if self._current is None or row is None:
            return run(*args)
        mark = self._mark(row, name, args)
        results = run(*args)
        if type(results) is not tuple:
            return results  # state alone, which the next program may donate: there is nothing to wait for
        self._remember(mark, *results[1:])
        # All results of a program are ready at once.
        self._watchers[row].watch(mark, jax.tree.leaves(results[1:])[-1])
        return results

    def transfer(self, move: Callable[[], jax.Array], array: jax.Array, plan: MeshPlan) -> jax.Array:
        source, end = (self._rows.get(frozenset(devices)) for devices in (array.sharding.device_set, plan.devices))
        if self._current is None or source is None or end is None or source == end:
            return move()
        mark = self._mark(TRANSFERS, f"{source}->{end}", (array,))
        arrived = move()
        self._remember(mark, arrived)
        self._watchers[TRANSFERS].watch(mark, arrived)
        return arrived

    def wait(self, array: jax.Array) -> None:
        if self._current is None:
            array.block_until_ready()
            return
        with self._on_host(WAIT, *self._current):
            array.block_until_ready()

    def _mark(self, row: str, name: str, args: tuple[Any, ...]) -> _Mark:
        assert self._current is not None
        made = [
            maker
            for maker, results in self._latest.get(self._current[1], {}).values()
            if any(result is arg for result in results for arg in args)
        ]
        mark = _Mark(row, name, *self._current, time.perf_counter(), tuple(made))
        self._marks.append(mark)
        return mark

    def _remember(self, mark: _Mark, *results: Any) -> None:
        """Keep a program's results until it runs again; every consumer has been dispatched by then."""
        latest = self._latest.pop(mark.generation, {})
        latest[mark.row, mark.name] = mark, tuple(result for result in results if isinstance(result, jax.Array))
        self._latest[mark.generation] = latest
        if len(self._latest) > GENERATIONS:
            del self._latest[next(iter(self._latest))]

    @contextlib.contextmanager
    def _on_host(self, name: str, number: int, generation: int) -> Iterator[None]:
        # A wait within a dispatch cuts it in two, so that events of a row never overlap.
        self._cut(time.perf_counter())
        self._open.append((name, time.perf_counter(), number, generation))
        try:
            yield
        finally:
            now = time.perf_counter()
            self._cut(now)
            self._open.pop()
            if self._open:
                outer, _, *of = self._open[-1]
                self._open[-1] = (outer, now, of[0], of[1])

    def _cut(self, now: float) -> None:
        if self._open:
            name, start, number, generation = self._open[-1]
            self._host.append(Event(HOST, name, start - self._began, now - self._began, number, generation))

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, by row and time; complete after the timeline is left."""
        ends = self._ends()
        found, free = [], dict.fromkeys(self._labels, 0.0)
        for mark, end in ends.items():
            start = max(mark.dispatched, free[mark.row], *(ends.get(made, 0.0) for made in mark.inputs))
            free[mark.row] = end
            span = start - self._began, end - self._began
            found.append(Event(mark.row, mark.name, *span, mark.round, mark.generation))
        rows = list(self._labels)
        return tuple(sorted([*found, *self._host], key=lambda e: (rows.index(e.row), e.start)))

    def _ends(self) -> dict[_Mark, float]:
        """Completions by mark, in order of dispatch, without failed programs.
        A consumer ends after its producer. Where a thread noted the producer too late, the consumer's end corrects it.
        """
        ends: dict[_Mark, float] = {}
        latest: dict[_Mark | str, float] = {}  # by mark and by row, from what follows
        for mark in reversed(self._marks):
            if mark.end is None:
                continue
            end = min(mark.end, latest.get(mark, mark.end), latest.get(mark.row, mark.end))
            ends[mark] = latest[mark.row] = end
            for made in mark.inputs:
                latest[made] = min(end, latest.get(made, end))
        return dict(reversed(ends.items()))

    @property
    def rounds_read(self) -> int:
        """Rounds that the engine has read, over all generations."""
        return len(self._results)

    def summary(self) -> TraceSummary:
        drafts = {number: result.draft for number, result in self._results.items() if result.draft is not None}
        passes = {number: _passes(result) for number, result in self._results.items()}
        return events.summarise(self.events, drafts, passes)

    def to_json(self) -> dict[str, Any]:
        """The trace in Chrome's trace-event form: complete events, times in microseconds, one thread per row."""
        threads = {row: number for number, row in enumerate(self._labels, start=1)}
        rows = [
            {"ph": "M", "pid": 1, "tid": threads[row], "name": name, "args": args}
            for row, label in self._labels.items()
            for name, args in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": threads[row]}))
        ]
        process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "jaxspec"}}
        found = [
            {
                "ph": "X", "pid": 1, "tid": threads[event.row], "name": event.name, "cat": event.row,
                "ts": _microseconds(event.start), "dur": _microseconds(event.end) - _microseconds(event.start),
                "args": self._details(event),
            }
            for event in self.events
        ]  # fmt: skip
        summary = dataclasses.asdict(self.summary()) if self._results else {}
        return {"traceEvents": [process, *rows, *found], "displayTimeUnit": "ms", "otherData": summary}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json`, or raise `OSError`. An interrupted write leaves the old file or none."""
        write_whole(Path(path), json.dumps(self.to_json(), allow_nan=False) + "\n")

    def _details(self, event: Event) -> dict[str, Any]:
        details: dict[str, Any] = {"round": event.round, "generation": event.generation}
        result = self._results.get(event.round)
        if result is None or (event.name != READ and not events.is_verifying(event.name)):
            return details
        details["passes"] = _passes(result)
        if event.name != READ:
            return details
        details |= {"tokens": len(result.tokens), "accepted": result.accepted, "drafted": result.drafted}
        return details if result.draft is None else details | result.draft._asdict()


def _passes(result: StepOutput) -> int:
    return sum(1 for _ in result.passes())


def _label(row: str, plan: MeshPlan) -> str:
    return f"{row} ({plan.devices[0].platform} {', '.join(str(device.id) for device in plan.devices)})"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
