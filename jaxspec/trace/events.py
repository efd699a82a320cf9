"""Events of a timeline, and the arithmetic of its summary."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from jaxspec.methods.core.round import DraftCounts
from jaxspec.results import DraftTreeStats
from jaxspec.stream_events import count_draft_tree

TARGET, DRAFT, SHARED = "target", "draft", "devices"
TRANSFERS, HOST = "transfers", "host"
DISPATCH, WAIT, READ = "dispatch", "wait", "read"
# Programs in which a tree grows. The last one also moves the root, and runs in turn with verification.
GROWING = ("expand", "expand once", "advance and expand")
# Programs that hold the target's passes. "decode 4" is the "decode" of four steps; a streamed pass is "verify open", a
# "layer 0" and so on, and "verify close".
VERIFYING = ("verify", "decode", "layer")
# Programs of a tree's draft that the target waits for.
ADVANCING = ("advance", "advance and expand")


@dataclasses.dataclass(frozen=True)
class Event:
    """One uninterrupted activity of one row; times are in seconds since the trace began."""

    row: str  # "target" and "draft" (or "devices", where both live), "transfers" or "host"
    name: str  # of a program; "target->draft", "draft->target" for transfers; "dispatch", "wait", "read" on the host
    start: float
    end: float
    round: int  # from 0 over the whole trace
    generation: int = 0  # from 0

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class TraceSummary:
    """Medians and shares over the rounds that were read, without one in flight at the end; times are in seconds."""

    rounds: int
    passes: int  # target passes of these rounds; a round without a draft may hold several
    overlap: float | None  # share of the time of tree growth that lies within verification; None where nothing grew
    idle: dict[str, float]  # by row, share of time without a program, from first start to the last verification's end
    round_s: float | None  # median time between two completions of the target; None with one round
    program_s: dict[str, float]  # by name, median time of a program or transfer; all layers together are "layer"
    pass_s: float | None  # median over rounds of the time of a target pass; None without one
    transfer_s: float | None  # median of a round's transfers together; None without
    # What a round adds to the target's passes: median of its transfers and `ADVANCING` programs (wholly) together.
    sync_s: float | None  # None without a tree that outlives the rounds
    host_s: float | None  # median time of a round that Python was busy, caller's work included; None with one round
    dispatch_s: float  # median of the dispatch in it
    read_s: float  # median of the reading in it
    draft_tree: DraftTreeStats | None = None  # None without a tree that outlives the rounds


def is_verifying(program: str) -> bool:
    """Whether a program holds passes of the target."""
    return program.split()[0] in VERIFYING


def summarise(
    events: Sequence[Event], drafts: Mapping[int, DraftCounts] | None = None, passes: Mapping[int, int] | None = None
) -> TraceSummary:
    """Summarise; `drafts` and target `passes` (else 1) are by round. Raises `ValueError` if no round was read."""
    was_read = {event.round for event in events if event.name == READ}
    if not was_read:
        raise ValueError("no round was read while the trace was taken")
    of_generation: dict[int, list[Event]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda e: (e.generation, e.start)):
        if event.round in was_read:
            of_generation[event.generation].append(event)
    device_rows = {event.row for event in events} - {TRANSFERS, HOST}
    target = SHARED if SHARED in device_rows else TARGET

    busy: dict[str, float] = collections.defaultdict(float)
    span = grown = hidden = 0.0
    round_s: list[float] = []
    host_s: list[float] = []
    for mine in of_generation.values():
        ends = _last_ends(mine, target)
        if not ends:
            continue  # its programs ran on devices that are not traced
        start, stop = min(event.start for event in mine if event.row != HOST), max(ends.values())
        span += stop - start
        inside = [_clip(event, start, stop) for event in mine if event.row in device_rows and event.start < stop]
        verifying = [event for event in inside if event.row == target and event.name not in GROWING]
        for event in inside:
            busy[event.row] += event.length
            if event.name in GROWING:
                grown += event.length
                hidden += sum(max(0.0, min(event.end, v.end) - max(event.start, v.start)) for v in verifying)
        round_s += [after - before for before, after in itertools.pairwise(ends.values())]
        host_s += _host_times([event for event in mine if event.row == HOST])

    counted = [event for mine in of_generation.values() for event in mine]
    passes = {number: (passes or {}).get(number, 1) for number in was_read}
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for event in counted:
        if event.row != HOST:
            by_name["layer" if event.name.startswith("layer ") else event.name].append(event.length)
    turned = {event.round for event in counted if event.name in ADVANCING}
    verify_s = _sum_rounds(event for event in counted if is_verifying(event.name))
    sync_s = _sum_rounds(event for event in counted if event.name in ADVANCING or event.row == TRANSFERS)
    trees = [
        [drafts[number] for number in sorted({event.round for event in mine}) if number in drafts]
        for mine in of_generation.values()
    ] if drafts else []  # fmt: skip
    return TraceSummary(
        rounds=len(was_read),
        passes=sum(passes.values()),
        overlap=hidden / grown if grown else None,
        idle={row: 1 - busy[row] / span for row in sorted(device_rows, reverse=True) if span},
        round_s=_median(round_s),
        program_s={name: statistics.median(lengths) for name, lengths in by_name.items()},
        pass_s=_median([seconds / passes[number] for number, seconds in verify_s.items()]),
        transfer_s=_median([*_sum_rounds(event for event in counted if event.row == TRANSFERS).values()]),
        sync_s=_median([sync_s[number] for number in turned]),
        host_s=_median(host_s),
        dispatch_s=_median([*_sum_rounds(event for event in counted if event.name == DISPATCH).values()]) or 0.0,
        read_s=_median([*_sum_rounds(event for event in counted if event.name == READ).values()]) or 0.0,
        draft_tree=count_draft_tree(trees) if trees else None,
    )


def _sum_rounds(events: Iterable[Event]) -> dict[int, float]:
    """Seconds of some events, by round."""
    sums: dict[int, float] = collections.defaultdict(float)
    for event in events:
        sums[event.round] += event.length
    return sums


def _last_ends(events: Sequence[Event], row: str) -> dict[int, float]:
    """When the last program of each round ended on a row, by round, in order."""
    ends: dict[int, float] = {}
    for event in events:
        if event.row == row:
            ends[event.round] = max(event.end, ends.get(event.round, event.end))
    return dict(sorted(ends.items()))


def _clip(event: Event, start: float, stop: float) -> Event:
    return dataclasses.replace(event, start=max(event.start, start), end=min(event.end, stop))


def _host_times(events: Sequence[Event]) -> list[float]:
    """Host seconds per round, from one read to the next without waiting; a generation's first round is left out."""
    times, since, waited = [], None, 0.0
    for event in sorted(events, key=lambda e: e.start):
        if event.name == WAIT:
            waited += event.length
        elif event.name == READ:
            if since is not None:
                times.append(event.end - since - waited)
            since, waited = event.end, 0.0
    return times


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
