"""Faults of several processes: one that ends, hangs or is too slow ends all others, with one message in each.

Each process writes once a second that it lives, and where its main thread is, into the key-value store of JAX's
coordinator, and reads what the others wrote. What waits for a process that will never come cannot be interrupted from
Python: the process ends itself, with status 1.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jax._src import distributed as jax_distributed

from jaxspec.errors import one_line

BEAT_S = 1.0
# Where a main thread is: loading and compiling, in the host's part of a step, waiting for a device, or elsewhere; and
# after the end.
PREPARING, STEPPING, WAITING, IDLE, ENDED = "preparing", "stepping", "waiting", "idle", "ended"
ALIVE, FAULT = "jaxspec/alive", "jaxspec/fault"
# All processes wait for their devices: after so many times the limit for a lost process, the devices are stuck.
STUCK = 40
LOST = "process 0, which the others meet at, is gone"


@dataclasses.dataclass
class _Seen:
    """What was last read of a process."""

    beat: int = -1
    where: str = PREPARING
    step: int = 0
    host: str = ""
    beat_at: float = 0.0  # when the beat changed, on this process's clock
    moved_at: float = 0.0  # when `where` or `step` changed


class _Watch:
    def __init__(self, client: Any, me: int, count: int, limit_s: float, start_s: float):
        self.client, self.me, self.count, self.limit_s, self.start_s = client, me, count, limit_s, start_s
        self.where, self.step = PREPARING, 0
        self.stopped = threading.Event()
        self.status = 0  # with which a process ends that has failed
        now = time.monotonic()
        self.answered_at = now  # when the coordinator last did
        self.seen = [_Seen(beat_at=now, moved_at=now) for _ in range(count)]

    def run_guard(self) -> None:
        """End this process where the coordinator takes calls and answers none: its host may have stopped."""
        while not self.stopped.wait(BEAT_S):
            if time.monotonic() - self.answered_at > self.limit_s:
                self.end(f"process 0, which the others meet at, has not answered for {self.limit_s:.0f} s")

    def run(self) -> None:
        beat, failed_at = 0, None
        while not self.stopped.wait(BEAT_S):
            beat += 1
            try:
                self.write(beat)
                entries = self.client.key_value_dir_get(f"{ALIVE}/")
                faults = self.client.key_value_dir_get(f"{FAULT}/")
            except Exception:  # jaxlib has no type of its own for a coordinator that is gone
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > self.limit_s / 3:
                    self.end("process 0, which the others meet at, does not answer")
                continue
            failed_at, self.answered_at = None, time.monotonic()
            for _, text in sorted(faults):
                self.end(text)
            if (message := self.judge(entries, time.monotonic())) is not None:
                with contextlib.suppress(Exception):  # one of the lost may be the coordinator
                    self.client.key_value_set(f"{FAULT}/{self.me}", message, allow_overwrite=True)
                    if self.me == 0:
                        time.sleep(2 * BEAT_S)  # it holds what the others have to read
                self.end(message)

    def write(self, beat: int) -> None:
        content = [beat, self.where, self.step, socket.gethostname()]
        self.client.key_value_set(f"{ALIVE}/{self.me}", json.dumps(content), allow_overwrite=True)

    def judge(self, entries: list[tuple[str, str]], now: float) -> str | None:
        """What is wrong with some process, from what all wrote; None where nothing is."""
        for key, text in entries:
            seen, (beat, where, step, host) = self.seen[int(key.rsplit("/", 1)[1])], json.loads(text)
            if beat != seen.beat:
                seen.beat, seen.host, seen.beat_at = beat, host, now
            if (where, step) != (seen.where, seen.step):
                seen.where, seen.step, seen.moved_at = where, step, now
        longest = max((now - other.moved_at for other in self.seen if other.where == WAITING), default=0.0)
        last = max(other.step for other in self.seen)
        for process, seen in enumerate(self.seen):
            name, still = f"process {process} ({seen.host or 'not seen yet'})", now - seen.moved_at
            if seen.where == ENDED:
                if any(other.where == WAITING and other.step > seen.step for other in self.seen) and still > BEAT_S:
                    return f"{name} has ended while others still wait for it"
                continue
            if process != self.me and now - seen.beat_at > self.limit_s:
                return f"{name} is gone: it has not answered for {self.limit_s:.0f} s"
            if seen.where == STEPPING and still > self.limit_s:
                return f"{name} hangs: it has not moved for {still:.0f} s, in step {seen.step}"
            late = seen.step < last and min(still, longest) > self.limit_s
            if seen.where in (IDLE, WAITING) and late:
                return f"{name} does not follow: it is at step {seen.step} and the others wait at step {last}"
            if seen.where == PREPARING and still > self.start_s:
                return f"{name} has not loaded its models within {self.start_s:.0f} s"
        if all(other.where in (WAITING, ENDED) for other in self.seen) and longest > STUCK * self.limit_s:
            return f"the devices have not answered for {longest:.0f} s"
        return None

    def end(self, message: str) -> None:
        if self.stopped.is_set():
            return
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, f"jaxspec: error: {one_line(message)}; process {self.me} ends, too\n".encode())
        os._exit(1)


_watch: _Watch | None = None


def start(client: Any, me: int, count: int, limit_s: float, start_s: float) -> None:
    """Watch the other processes in a thread of its own until this one ends."""
    global _watch
    _watch = _Watch(client, me, count, limit_s, start_s)
    for run in (_watch.run, _watch.run_guard):
        threading.Thread(target=run, name="jaxspec-watch", daemon=True).start()
    atexit.register(leave)
    before = sys.excepthook

    def report_and_show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report(error)
        before(kind, error, trace)

    sys.excepthook = report_and_show


def end_without_coordinator() -> None:
    """End this process: process 0, or its host, is gone, and the coordinator with it."""
    me = jax_distributed.global_state.process_id
    with contextlib.suppress(OSError):
        os.write(2, f"jaxspec: error: {LOST}; process {me} ends, too\n".encode())
    os._exit(1)


def interrupt() -> None:
    """This process was interrupted and ends at once: tell the others, for two beats at most."""
    if _watch is not None and not _watch.stopped.is_set():
        # In a thread of its own: a coordinator that is gone must not hold the process.
        thread = threading.Thread(target=report, args=("it was interrupted",), daemon=True)
        thread.start()
        thread.join(2.5 * BEAT_S)


def report(error: object, status: int = 1) -> None:
    """This process fails: tell the others why, watch no longer, and end with `status`."""
    if _watch is None or _watch.stopped.is_set():
        return
    _watch.stopped.set()
    _watch.status = status
    with contextlib.suppress(Exception):  # the coordinator may be what has failed
        _watch.client.key_value_set(f"{FAULT}/{_watch.me}", f"process {_watch.me} failed: {one_line(error)}")
        if _watch.me == 0:
            time.sleep(2 * BEAT_S)  # it holds what the others have to read


def await_verdict() -> None:
    """A device failed, maybe as another process is gone: give the watch the time to say so, and to end this one."""
    if _watch is not None and not _watch.stopped.is_set():
        _watch.where = IDLE
        time.sleep(_watch.limit_s + 3 * BEAT_S)


def leave() -> None:
    """The end of a process that has done its work."""
    watch = _watch
    if watch is None:
        return
    failed = watch.stopped.is_set()
    watch.stopped.set()
    watch.where = ENDED
    with contextlib.suppress(Exception):  # a coordinator that is gone needs no farewell
        watch.write(-2)
        if failed:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(watch.status)  # JAX would wait for the others
        # Process 0 holds the messages: it goes last.
        watch.client.wait_at_barrier("jaxspec/end", int(watch.limit_s * 1000))
    with contextlib.suppress(Exception):
        jax_distributed.global_state.shutdown()


@contextlib.contextmanager
def _at(where: str, steps: int = 0) -> Iterator[None]:
    if _watch is None:
        yield
        return
    before, _watch.where = _watch.where, where
    _watch.step += steps
    try:
        yield
    finally:
        _watch.where = before


def stepping() -> contextlib.AbstractContextManager[None]:
    """Within, the main thread is in a step that all processes take: it must move on within the limit."""
    return _at(STEPPING, 1)


def waiting() -> contextlib.AbstractContextManager[None]:
    """Within, the main thread waits for devices or for other processes."""
    return _at(WAITING)


def waiting_in_step() -> contextlib.AbstractContextManager[None]:
    """As `waiting` within a step; elsewhere a process may wait for the next one as long as it likes."""
    return _at(WAITING) if _watch is not None and _watch.where == STEPPING else contextlib.nullcontext()


def preparing() -> contextlib.AbstractContextManager[None]:
    """Within, models load or compile, which may take long."""
    return _at(PREPARING)


def ready() -> None:
    """The models are loaded: what happens between two steps is up to the caller."""
    if _watch is not None:
        _watch.where = IDLE
