"""Requests in one thread: a queue, and up to N answers that are decoded in turn, a round each."""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Generator

from jaxspec.errors import ConfigError
from jaxspec.results import Completion, StreamEvent
from jaxspec.runtime import trace
from jaxspec.serve.live import RoundWatcher
from jaxspec.serve.metrics import Metrics
from jaxspec.serve.protocol import ApiError

LOG = logging.getLogger(__name__)

Outcome = StreamEvent | ApiError


@dataclasses.dataclass(eq=False)
class Job:
    """One request between the server and the decoding thread."""

    events: Generator[StreamEvent, bool | None, None]  # of `LLM.stream`; nothing has run yet
    emit: Callable[[Outcome], None]  # called in the decoding thread with every event, the last one, or the error
    deadline: float  # on the clock of `time.monotonic`
    recorder: RoundWatcher | None = None  # watches its rounds
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float | None = None  # when its first token came

    def cancel(self) -> None:
        """Let the request end within one round; nothing is emitted any more."""
        self.cancelled.set()


class Scheduler:
    """Decodes requests in the order of their arrival, up to `active` at the same time, in a thread of its own."""

    def __init__(self, metrics: Metrics, active: int, waiting: int):
        """`waiting` is the length of the queue; a request that finds it full is refused."""
        self._metrics, self._most_active, self._most_waiting = metrics, active, waiting
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: list[Job] = []
        self._changed = threading.Condition()
        self._closing: float | None = None  # when answers under way are aborted
        self._thread = threading.Thread(target=self._run, name="jaxspec-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check_room(self) -> None:
        """ApiError 429 where the queue is full, 503 where the server is shutting down."""
        if self._closing is not None:
            raise _shutting_down()
        # An idle place takes a request out of the queue at once.
        if len(self._waiting) >= self._most_waiting + max(0, self._most_active - len(self._active)):
            raise ApiError(
                429, f"{len(self._waiting)} requests are waiting already", kind="rate_limit_error",
                code="queue_full", retry_after=1,
            )  # fmt: skip

    def submit(self, job: Job) -> None:
        """Queue a request; see `check_room` for what is refused."""
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._metrics.waiting.set(len(self._waiting))
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
        """ApiError 503 where no request is taken any more."""
        if self._closing is not None:
            raise _shutting_down()
        if not self._thread.is_alive():
            raise ApiError(503, "the server does not decode any more; its log says why", kind="server_error")

    def _run(self) -> None:
        while self._admit():
            for job in list(self._active):
                if not self._step(job):
                    self._active.remove(job)
                    self._metrics.running.set(len(self._active))

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
                self._active.append(job)
            self._metrics.waiting.set(len(self._waiting))
            self._metrics.running.set(len(self._active))
            return bool(self._active) or self._closing is None

    def _given_up(self, job: Job) -> bool:
        """Whether a request ends before its answer does; its buffers are free then, and its client knows."""
        left, error = job.cancelled.is_set(), self._overdue(job)
        if not left and error is None:
            return False
        job.events.close()
        if left:
            self._metrics.cancel()
        elif error is not None:
            job.emit(error)
        return True

    def _overdue(self, job: Job) -> ApiError | None:
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
            job.emit(describe_error(error))
        return goes_on

    def _round(self, job: Job) -> bool:
        watched = contextlib.nullcontext() if job.recorder is None else trace.recording(job.recorder)
        with watched:
            event = next(job.events)
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
        self._metrics.finish(completion, *(moment - job.arrived for moment in times))


def describe_error(error: BaseException) -> ApiError:
    """The error message for a client; an exception that is not its fault is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    LOG.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return ApiError(503, "the server is out of memory", kind="server_error", code="out_of_memory")
    return ApiError(500, "the request failed inside the server; its log says why", kind="server_error")


def _timed_out() -> ApiError:
    return ApiError(504, "the request took longer than the server allows", kind="server_error", code="timeout")


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
