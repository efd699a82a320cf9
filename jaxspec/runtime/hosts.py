"""Messages between the hosts of several processes: `broadcast`, `gather`, and the commands of process 0.

Host decisions are functions of replicated data. Others (a seed, a request, an abort, a reading of a clock, a file that
was read) are made by process 0 and go through `broadcast`. Values that each process has of its own (a measured time, a
digest) go through `gather`. Messages lie in the key-value store of JAX's coordinator. With one process all of it does
nothing. Every message has a name, so that processes that took different ways fail by name.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from jaxspec.errors import DistributedError, one_line

T = TypeVar("T")

# Messages after which the old ones are removed.
EPOCH = 512
PREFIX = "jaxspec"
# Seconds of a wait in the calling thread, and then of each wait in a thread of its own.
AT_ONCE_S, LONG_S = 1.0, 600.0


class _Channel:
    """This process's end of the messages."""

    def __init__(self, client: Any, me: int, count: int, timeout_s: float):
        self.client, self.me, self.count, self.timeout_s = client, me, count, timeout_s
        self.sent = self.gathered = 0
        self.failure: BaseException | None = None
        self.received: dict[str, Any] | None = None  # the next command, which a worker has read and not yet run
        self._outgoing: queue.SimpleQueue[tuple[str, bytes] | int | threading.Event] = queue.SimpleQueue()
        if me == 0:
            threading.Thread(target=self._send, name="jaxspec-broadcast", daemon=True).start()

    def broadcast(self, name: str, value: Any) -> Any:
        """Process 0 sends, and does not wait; the others wait for its value, however long it takes."""
        number, self.sent = self.sent, self.sent + 1
        if number and number % EPOCH == 0:
            self._remove_old(number // EPOCH)
        key = f"{PREFIX}/broadcast/{number // EPOCH}/{number}"
        if self.me == 0:
            if self.failure is not None:
                raise DistributedError(f"process 0 cannot send to the others: {one_line(self.failure)}")
            self._outgoing.put((key, json.dumps([name, value]).encode()))
            return value
        sent, value = json.loads(self._wait(key))
        if sent != name:
            raise DistributedError(
                f"processes took different ways: process 0 sent {sent!r} where process {self.me} expected {name!r}"
            )
        return value

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, in order; waits for each `timeout_s` seconds at most."""
        number, self.gathered = self.gathered, self.gathered + 1
        folder = f"{PREFIX}/gather/{number}"
        if number > 1:
            # A process that has sent to the gathering before this one has read the one before that.
            self.client.key_value_delete(f"{PREFIX}/gather/{number - 2}/{self.me}")
        self.client.key_value_set_bytes(f"{folder}/{self.me}", json.dumps([name, value]).encode())
        values = []
        for process in range(self.count):
            message = self._wait(f"{folder}/{process}", self.timeout_s)
            if message is None:
                raise DistributedError(f"process {process} has not come to {name!r} within {self.timeout_s:.0f} s")
            sent, its_value = json.loads(message)
            if sent != name:
                raise DistributedError(
                    f"processes took different ways: process {process} is at {sent!r}, process {self.me} at {name!r}"
                )
            values.append(its_value)
        return values

    def end(self) -> None:
        """Process 0 sends a last command, and waits until all messages are sent."""
        if self.me == 0:
            self.broadcast("command", {"do": "end"})
            self._outgoing.put(all_sent := threading.Event())
            all_sent.wait(self.timeout_s)

    def _wait(self, key: str, limit_s: float = float("inf")) -> Any:
        """The value of a key, as bytes; None if it does not come within the limit."""
        message, left = self._ask(key, AT_ONCE_S), limit_s - AT_ONCE_S
        while message is None and left > 0:
            # Another thread waits, as no handler of an interrupt runs in one that does. Each wait that ends without a
            # value leaves a few bytes at the coordinator, so waits are long.
            answer: Future[bytes | None] = Future()
            threading.Thread(target=self._answer, args=(answer, key, min(left, LONG_S)), daemon=True).start()
            message, left = answer.result(), left - LONG_S
        return message

    def _answer(self, answer: "Future[bytes | None]", key: str, seconds: float) -> None:
        try:
            answer.set_result(self._ask(key, seconds))
        except DistributedError as error:
            answer.set_exception(error)

    def _ask(self, key: str, seconds: float) -> bytes | None:
        """The value of a key once it is there; None if it does not come."""
        try:
            return self.client.blocking_key_value_get_bytes(key, int(seconds * 1000))
        except Exception as error:  # jaxlib has no type of its own for it
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise DistributedError(f"process 0 does not answer: {one_line(error)}") from error

    def _remove_old(self, epoch: int) -> None:
        """Remove the messages of the epoch before the last, which all have read."""
        if self.me == 0:
            self._outgoing.put(epoch)
        else:
            self.client.key_value_set(f"{PREFIX}/read/{self.me}", str(epoch), allow_overwrite=True)

    def _send(self) -> None:
        while True:
            message = self._outgoing.get()
            try:
                if isinstance(message, tuple):
                    self.client.key_value_set_bytes(*message)
                elif isinstance(message, threading.Event):
                    message.set()
                elif message > 1 and self._all_have_read(message - 1):
                    self.client.key_value_delete(f"{PREFIX}/broadcast/{message - 2}/")
            except Exception as error:  # reported by the next broadcast, in the thread that uses it
                self.failure = error

    def _all_have_read(self, epoch: int) -> bool:
        """Whether no process needs messages before an epoch; those of a slow one are left."""
        read = [int(value) for _, value in self.client.key_value_dir_get(f"{PREFIX}/read/")]
        return len(read) == self.count - 1 and min(read) >= epoch


_channel: _Channel | None = None


def join(client: Any, me: int, count: int, timeout_s: float) -> None:
    """Begin to exchange messages; called once, by `distributed.initialize`."""
    global _channel
    _channel = _Channel(client, me, count, timeout_s)


def several() -> bool:
    """Whether there are other processes."""
    return _channel is not None


def broadcast(name: str, value: T | Callable[[], T]) -> T:
    """The value of process 0, which JSON must be able to hold; a function is called in process 0 only.

    DistributedError: process 0 is at another message, `name` says which.
    """
    mine: Any = None
    if _channel is None or _channel.me == 0:
        mine = value() if callable(value) else value
    return mine if _channel is None else _channel.broadcast(name, mine)


def gather(name: str, value: T) -> list[T]:
    """The values of all processes, in order; JSON must be able to hold them.

    DistributedError: a process is at another message, or does not come (`Distributed.start_timeout`).
    """
    return [value] if _channel is None else _channel.gather(name, value)


def command(do: str, **values: Any) -> dict[str, Any]:
    """The next operation on an engine: the same `do` in every process, and process 0's values.

    In a worker, returns the command that `next_command` has read. DistributedError: this process does something else.
    """
    own = {"do": do, **values}
    if _channel is None:
        return own
    received, _channel.received = _channel.received, None
    if received is None:
        received = broadcast("command", own)
    for name in ("do", "engine", "session"):
        if received.get(name) != own.get(name):
            raise DistributedError(
                f"processes took different ways: process 0 does {_describe(received)} and process {_channel.me} "
                f"{_describe(own)}"
            )
    return received


def next_command() -> dict[str, Any]:
    """Process 0's next command, for a worker; the next call of `command` returns the same one."""
    assert _channel is not None
    received = broadcast("command", {})
    _channel.received = None if received["do"] == "end" else received
    return received


def end_commands() -> None:
    """Process 0 has no more commands: the worker loops of the others end."""
    if _channel is not None:
        _channel.end()


def _describe(given: Mapping[str, Any]) -> str:
    return " ".join(str(given[name]) for name in ("do", "engine", "session") if name in given)


def make_clock() -> Callable[[], float]:
    """A clock that tells the time of process 0 in seconds; to be made once processes are connected."""
    return (lambda: broadcast("clock", time.perf_counter)) if several() else time.perf_counter


def check_equal(what: str, values: Mapping[str, Any]) -> None:
    """DistributedError in every process where the values differ between processes: it names the first that does."""
    if _channel is None:
        return
    all_values = gather(f"check {what}", {name: str(value) for name, value in values.items()})
    for process, others in enumerate(all_values):
        for name in sorted({*all_values[0], *others}):
            first, other = all_values[0].get(name, "absent"), others.get(name, "absent")
            if first != other:
                raise DistributedError(
                    f"processes differ in {what}: {name} is {first} in process 0 and {other} in process {process}; "
                    "start all of them with the same settings and files"
                )


@contextlib.contextmanager
def naming_losses() -> Iterator[None]:
    """Within, a device error in one of several processes says that another process may be lost."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _channel is None:
            raise
        raise DistributedError(
            f"a device failed in process {_channel.me}, or another process is lost: {one_line(error)[:300]}"
        ) from error
