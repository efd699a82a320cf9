"""Events of a timeline, and the arithmetic of its summary."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.methods.swiftspec.messages import DraftCounts
from jaxspec.metrics import count_draft_tree

TARGET, DRAFT, SHARED = "target", "draft", "devices"
TRANSFERS, HOST = "transfers", "host"
DISPATCH, WAIT, READ = "dispatch", "wait", "read"
# Programs in which a tree grows; the last holds a turn as well, and verification takes turns with it.
GROWING = ("grow", "grow once", "turn and grow")
# Programs that hold the target's passes.
VERIFYING = ("round", "verify")
# Programs of a tree's draft that the target waits for.
TURNING = ("turn", "turn and grow")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that one row did without a break.

    Attributes:
      row: "target" and "draft" (or "devices", where both live), "transfers" or "host".
      name: of the program; "target->draft" and "draft->target" for transfers; "dispatch", "wait" or "read" on the host.
      start: in seconds since the trace began.
      end: likewise.
      round: counted from 0 over the whole trace.
      generation: counted from 0.
    """

    row: str
    name: str
    start: float
    end: float
    round: int
    generation: int = 0

    @property
    def length(self) -> float:
        """In seconds."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a trace shows. Rounds count that were read: one that was in flight when the text ended does not.

    Attributes:
      rounds: their number.
      passes: target passes that brought their tokens, as many as `count_speculation` has steps (and those that a stop
        cut off): a round that drafted nothing may hold several.
      overlap: share of the time in which a tree grew that lies within verification; None where nothing grew.
      idle: by row of devices, the share of time in which no program ran there, from the first program's start to the
        last verification's end.
      round_s: median seconds between two completions of the target; None with one round.
      program_s: by name, median seconds of a program or transfer.
      pass_s: median over rounds of the seconds of "verify", or plain decoding's "round", over the round's passes; None
        without such a program.
      transfer_s: median seconds of a round's transfers together; None without.
      sync_s: median seconds of a round's turn (with the growth that is in it, where that takes turns) and its transfers
        together: what a round waits for beside the target. None without a tree that outlives the rounds.
      host_s: median seconds of a round that Python was busy: dispatch, reading, and whatever lies between them, the
        caller's own work included, but no waiting; None with one round.
      dispatch_s: median seconds of these that went into dispatching.
      read_s: median seconds of these that went into reading.
      draft_tree: see `speculation.count_draft_tree`; None for methods without a tree that outlives the rounds.
    """

    rounds: int
    passes: int
    overlap: float | None
    idle: dict[str, float]
    round_s: float | None
    program_s: dict[str, float]
    pass_s: float | None
    transfer_s: float | None
    sync_s: float | None
    host_s: float | None
    dispatch_s: float
    read_s: float
    draft_tree: dict[str, Any] | None = None


def summarise(
    events: Sequence[Event],
    drafts: Mapping[int, DraftCounts] | None = None,
    passes: Mapping[int, int] | None = None,
) -> Summary:
    """Summarise a trace.

    Args:
      events: in any order; without any round that was read there is nothing to say.
      drafts: what the draft's side counted, by round.
      passes: target passes, by round; 1 where nothing is said.

    Raises:
      ValueError: no round was read.
    """
    was_read = {event.round for event in events if event.name == READ}
    if not was_read:
        raise ValueError("no round was read while the trace was taken")
    of_generation: dict[int, list[Event]] = collections.defaultdict(list)
    for event in events:
        if event.round in was_read:
            of_generation[event.generation].append(event)
    generations = [sorted(mine, key=lambda e: e.start) for _, mine in sorted(of_generation.items())]
    device_rows = {event.row for event in events} - {TRANSFERS, HOST}
    target = SHARED if SHARED in device_rows else TARGET

    busy: dict[str, float] = collections.defaultdict(float)
    span = grown = hidden = 0.0
    round_s: list[float] = []
    host_s: list[float] = []
    for mine in generations:
        ends = _last_ends(mine, target)
        if not ends:
            continue  # on devices of others
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

    counted = [event for mine in generations for event in mine]
    passes = {number: (passes or {}).get(number, 1) for number in was_read}
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    verifying_s: dict[int, float] = collections.defaultdict(float)
    sync_s: dict[int, float] = collections.defaultdict(float)
    turned = set()
    per_round: dict[tuple[str, int], float] = collections.defaultdict(float)
    for event in counted:
        if event.row != HOST:
            by_name[event.name].append(event.length)
        if event.name in VERIFYING:
            verifying_s[event.round] += event.length
        if event.name in TURNING:
            turned.add(event.round)
        if event.name in TURNING or event.row == TRANSFERS:
            sync_s[event.round] += event.length
        per_round[event.name if event.row == HOST else event.row, event.round] += event.length
    trees = [
        [drafts[number] for number in sorted({event.round for event in mine}) if number in drafts]
        for mine in generations
    ] if drafts else []  # fmt: skip
    return Summary(
        rounds=len(was_read),
        passes=sum(passes.values()),
        overlap=hidden / grown if grown else None,
        idle={row: 1 - busy[row] / span for row in sorted(device_rows, reverse=True) if span},
        round_s=_median(round_s),
        program_s={name: statistics.median(lengths) for name, lengths in by_name.items()},
        pass_s=_median([seconds / passes[number] for number, seconds in verifying_s.items()]),
        sync_s=_median([sync_s[number] for number in turned]),
        transfer_s=_median([seconds for (row, _), seconds in per_round.items() if row == TRANSFERS]),
        host_s=_median(host_s),
        dispatch_s=_median([s for (name, _), s in per_round.items() if name == DISPATCH]) or 0.0,
        read_s=_median([s for (name, _), s in per_round.items() if name == READ]) or 0.0,
        draft_tree=count_draft_tree(trees) if trees else None,
    )


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
    """Of each round but a generation's first, seconds from the read before to its own, waiting left out."""
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
