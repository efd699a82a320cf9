"""Requests in one thread: a queue, and up to N answers that are decoded in turn, a round each."""

import collections
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Generator
from typing import Literal, Protocol

from jaxspec.errors import JaxspecError
from jaxspec.results import READING, Completion, Stream, StreamEvent
from jaxspec.runtime import trace

Outcome = StreamEvent | Exception


class QueueError(JaxspecError):
    """A request is not decoded to its end: the queue is full or closed, or its time is over."""

    def __init__(self, message: str, reason: Literal["full", "closed", "dead", "timeout"]):
        """Keep what a program can tell apart as `reason`."""
        super().__init__(message)
        self.reason = reason


class Watcher(trace.Recorder, Protocol):
    """A recorder of one request's rounds, which is told when they have ended."""

    def close(self) -> None: ...


class Observer:
    """Counts what a scheduler does; this one counts nothing."""

    def queue(self, waiting: int, running: int) -> None:
        """So many requests wait and are decoded now."""

    def finish(self, completion: Completion, queued_s: float, first_s: float, whole_s: float) -> None:
        """An answer is complete; times in seconds since its request arrived."""

    def cancel(self) -> None:
        """A caller gave an answer up."""


class OrderedLock:
    """A lock that threads get in the order in which they ask; its holder may take it again."""

    def __init__(self):
        """Free."""
        self._changed = threading.Condition()
        self._waiting: collections.deque[object] = collections.deque()
        self._holder, self._depth = 0, 0  # a thread's number, and how often it holds the lock
        self._dropped: collections.deque[Generator[StreamEvent, None, None]] = collections.deque()

    def __enter__(self) -> None:
        me, ticket = threading.get_ident(), object()
        with self._changed:
            if self._holder != me:
                self._waiting.append(ticket)
                try:
                    while self._holder or self._waiting[0] is not ticket:
                        self._changed.wait()
                    self._holder = me
                finally:  # an interrupt leaves no place behind that would stop the others
                    self._waiting.remove(ticket)
                    self._changed.notify_all()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        """Give the lock up once; the last time, close first what was dropped meanwhile."""
        with self._changed:
            dropped = self._dropped.popleft() if self._depth == 1 and self._dropped else None
            if dropped is None:
                self._depth -= 1
                if not self._depth:
                    self._holder = 0
                    self._changed.notify_all()
                return
        try:
            dropped.close()
        finally:
            self._release()

    def each(self, events: Generator[StreamEvent, None, None]) -> Generator[StreamEvent, None, None]:
        """The events of a text, for each of which the lock is taken, and at the end."""
        try:
            while True:
                with self:
                    event = next(events, None)
                if event is None:
                    return
                yield event
        finally:
            self._close(events)

    def _close(self, events: Generator[StreamEvent, None, None]) -> None:
        """Close a text now, or before the lock is free again where another thread holds it.

        Python may collect a dropped stream in any thread: also in one that the holder waits for.
        """
        with self._changed:
            if self._holder not in (0, threading.get_ident()):
                self._dropped.append(events)
                return
            self._holder = threading.get_ident()
            self._depth += 1
        try:
            events.close()
        finally:
            self._release()


@dataclasses.dataclass(eq=False)
class Job:
    """One request between its caller and the decoding thread."""

    events: Stream  # of `LLM.stream`; nothing has run yet
    emit: Callable[[Outcome], None]  # called in the decoding thread with every event, the last one, or the error
    deadline: float = math.inf  # on the clock of `time.monotonic`
    recorder: Watcher | None = None  # watches its rounds
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float | None = None  # when its first token came
    reading: bool = False  # whether pieces of a long prompt are left

    def cancel(self) -> None:
        """Let the request end within one round; nothing is emitted any more."""
        self.cancelled.set()


class Scheduler:
    """Decodes requests in the order of their arrival, up to `active` at the same time, in a thread of its own."""

    def __init__(self, observer: Observer, active: int, waiting: int):
        """`waiting` is the length of the queue; a request that finds it full is refused."""
        self._observer, self._most_active, self._most_waiting = observer, active, waiting
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: list[Job] = []
        self._changed = threading.Condition()
        self._closing: float | None = None  # when answers under way are aborted
        self._thread = threading.Thread(target=self._run, name="jaxspec-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check_room(self) -> None:
        """QueueError where the queue is full or closed."""
        if self._closing is not None:
            raise _shutting_down()
        # An idle place takes a request out of the queue at once.
        if len(self._waiting) >= self._most_waiting + max(0, self._most_active - len(self._active)):
            raise QueueError(f"{len(self._waiting)} requests are waiting already", "full")

    def submit(self, job: Job) -> None:
        """Queue a request; see `check_room` for what is refused."""
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._observe()
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Take no more requests, refuse those that wait, and abort what has not finished after so many seconds."""
        with self._changed:
            self._closing = time.monotonic() + seconds
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait until everything has ended after `close`."""
        self._thread.join(timeout)

    def check_alive(self) -> None:
        """QueueError where no request is taken any more."""
        if self._closing is not None:
            raise _shutting_down()
        if not self._thread.is_alive():
            raise QueueError("the decoding thread has ended", "dead")

    def _run(self) -> None:
        while self._admit():
            # A long prompt waits for the others: a piece of it takes longer than a round.
            for job in sorted(self._active, key=lambda job: job.reading):
                if not self._step(job):
                    self._active.remove(job)
                    self._observe()

    def _admit(self) -> bool:
        """Wait for work and take in what there is room for; False once the server is closed and all is done."""
        with self._changed:
            while not self._waiting and not self._active and self._closing is None:
                self._changed.wait()
            if self._closing is not None:
                for job in self._waiting:
                    job.emit(_shutting_down())
                self._waiting.clear()
            # A client that has left, or a request that is too late, must not hold a place in the queue.
            self._waiting = collections.deque(job for job in self._waiting if not self._given_up(job))
            while self._waiting and len(self._active) < self._most_active:
                job = self._waiting.popleft()
                job.admitted = time.monotonic()
                if isinstance(job.events, Stream):
                    job.events.read_in_pieces()
                self._active.append(job)
            self._observe()
            return bool(self._active) or self._closing is None

    def _given_up(self, job: Job) -> bool:
        """Whether a request ends before its answer does; its buffers are free then, and its client knows."""
        left, error = job.cancelled.is_set(), self._overdue(job)
        if not left and error is None:
            return False
        job.events.close()
        if left:
            self._observer.cancel()
        elif error is not None:
            job.emit(error)
        return True

    def _overdue(self, job: Job) -> QueueError | None:
        now = time.monotonic()
        if now >= job.deadline:
            return _timed_out()
        return _shutting_down() if self._closing is not None and now >= self._closing else None

    def _step(self, job: Job) -> bool:
        """Run one round of a request; False where it has ended. A fault ends this request and no other."""
        goes_on = False
        try:
            goes_on = not self._given_up(job) and self._round(job)
            if not goes_on and job.recorder is not None:
                job.recorder.close()
        except Exception as error:
            job.emit(error)
        return goes_on

    def _round(self, job: Job) -> bool:
        watched = contextlib.nullcontext() if job.recorder is None else trace.recording(job.recorder)
        with watched:
            event = next(job.events)
        job.reading = event is READING
        if job.reading:
            return True
        if job.first is None:
            job.first = time.monotonic()
        if event.completion is not None:
            self._count(job, event.completion)
            if job.recorder is not None:
                job.recorder.close()  # what it has to say comes before the end
        job.emit(event)
        return event.completion is None

    def _count(self, job: Job, completion: Completion) -> None:
        assert job.first is not None
        times = (job.admitted, job.first, time.monotonic())
        self._observer.finish(completion, *(moment - job.arrived for moment in times))

    def _observe(self) -> None:
        self._observer.queue(len(self._waiting), len(self._active))


def _timed_out() -> QueueError:
    return QueueError("the request took longer than the server allows", "timeout")


def _shutting_down() -> QueueError:
    return QueueError("the server is shutting down", "closed")
