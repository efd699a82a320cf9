"""What several processes tell each other on the host: one `broadcast`, one `gather`, and the commands of process 0.

Host decisions are functions of replicated data. What is not (a seed, a request, an abort, a reading of a clock, a file
that was read) is decided by process 0 and goes through `broadcast`; what each process knows for itself (a time that was
measured, a digest) goes through `gather`. Messages lie in the key-value store of JAX's coordinator. With one process
all of it does nothing. Every message has a name, so that processes that took different ways fail by name.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxspec.errors import DistributedError
from jaxspec.runtime import watch

T = TypeVar("T")

# Messages after which the old ones are removed.
EPOCH = 512
PREFIX = "jaxspec"
# Seconds that a process waits for a message by itself, and then by a thread.
AT_ONCE_S, LONG_S = 1.0, 600.0


class _Channel:
    """This process's end of the messages."""

    def __init__(self, client: Any, me: int, count: int, timeout_s: int):
        self.client, self.me, self.count, self.timeout_ms = client, me, count, timeout_s * 1000
        self.sent = self.gathered = 0
        self.failure: BaseException | None = None
        self.received: dict[str, Any] | None = None  # a command that is to be done next
        self._outgoing: queue.SimpleQueue[tuple[str, bytes] | str] = queue.SimpleQueue()
        if me == 0:
            threading.Thread(target=self._send, name="jaxspec-broadcast", daemon=True).start()

    def broadcast(self, name: str, value: Any) -> Any:
        """Process 0 sends, and does not wait; the others wait for its value."""
        number, self.sent = self.sent, self.sent + 1
        if number and number % EPOCH == 0:
            self._remove_old(number // EPOCH)
        key = f"{PREFIX}/broadcast/{number // EPOCH}/{number}"
        if self.me == 0:
            if self.failure is not None:
                raise DistributedError(f"process 0 cannot tell the others anything: {self.failure}")
            self._outgoing.put((key, json.dumps([name, value]).encode()))
            return value
        sent, value = json.loads(self._wait(key))
        if sent != name:
            raise DistributedError(
                f"processes took different ways: process 0 sent {sent!r} where process {self.me} expected {name!r}"
            )
        return value

    def gather(self, name: str, value: Any) -> list[Any]:
        """What every process gives, by process."""
        number, self.gathered = self.gathered, self.gathered + 1
        folder = f"{PREFIX}/gather/{number}"
        if number > 1:
            # Whoever has sent to the gathering before this one has read the one before that.
            self.client.key_value_delete(f"{PREFIX}/gather/{number - 2}/{self.me}")
        self.client.key_value_set_bytes(f"{folder}/{self.me}", json.dumps([name, value]).encode())
        found = [json.loads(self._wait(f"{folder}/{process}")) for process in range(self.count)]
        for process, (sent, _) in enumerate(found):
            if sent != name:
                raise DistributedError(
                    f"processes took different ways: process {process} is at {sent!r}, process {self.me} at {name!r}"
                )
        return [given for _, given in found]

    def _wait(self, key: str) -> bytes:
        """The value of a key, however long it takes: a process that is lost ends all others (`watch`)."""
        with watch.waiting_in_step():
            found = self._ask(key, AT_ONCE_S)
            while found is None:
                # A thread waits, as no handler of an interrupt runs while this one does. Each wait that ends without
                # a value leaves a few bytes at the coordinator, so that it is long.
                found = self._ask_in_thread(key)
            return found

    def _ask_in_thread(self, key: str) -> bytes | None:
        answers: queue.SimpleQueue[bytes | None | DistributedError] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._ask(key, LONG_S))
            except DistributedError as error:
                answers.put(error)

        threading.Thread(target=ask, name="jaxspec-wait", daemon=True).start()
        if isinstance(answer := answers.get(), DistributedError):
            raise answer
        return answer

    def _ask(self, key: str, seconds: float) -> bytes | None:
        """The value of a key once it is there; None if it does not come."""
        try:
            return self.client.blocking_key_value_get_bytes(key, int(seconds * 1000))
        except Exception as error:  # jaxlib has no type of its own for it
            if "DEADLINE_EXCEEDED" not in str(error):
                time.sleep(3 * watch.BEAT_S)  # a coordinator that is lost ends this process, with a line of its own
                raise DistributedError(f"process 0 does not answer: {error}") from error
        return None

    def _remove_old(self, epoch: int) -> None:
        """All have read the epoch before the last: its messages go."""
        if self.me == 0:
            self._outgoing.put(f"{PREFIX}/broadcast/{epoch - 2}/" if epoch > 1 else "")
        else:
            self.client.key_value_set(f"{PREFIX}/read/{self.me}", str(epoch), allow_overwrite=True)

    def _send(self) -> None:
        while True:
            message = self._outgoing.get()
            try:
                if isinstance(message, tuple):
                    self.client.key_value_set_bytes(*message)
                elif message and self._all_have_read(int(message.split("/")[2]) + 1):
                    self.client.key_value_delete(message)
            except Exception as error:  # reported by the next broadcast, in the thread that uses it
                self.failure = error

    def _all_have_read(self, epoch: int) -> bool:
        """Whether no process needs messages before an epoch; those of a slow one are left."""
        read = [int(value) for _, value in self.client.key_value_dir_get(f"{PREFIX}/read/")]
        return len(read) == self.count - 1 and min(read) >= epoch


_channel: _Channel | None = None


def join(client: Any, me: int, count: int, timeout_s: int) -> None:
    """Begin to talk; called once, by `distributed.initialize`."""
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
    """The values of all processes, in order; JSON must be able to hold them."""
    return [value] if _channel is None else _channel.gather(name, value)


def command(do: str, **values: Any) -> dict[str, Any]:
    """What process 0 does next with an engine: the same `do` in every process, and process 0's values.

    A process that follows gives back what it has received (`next_command`). DistributedError: this process does
    something else.
    """
    given = {"do": do, **values}
    if _channel is None:
        return given
    received, _channel.received = _channel.received, None
    if received is None:
        received = broadcast("command", given)
    for name in ("do", "engine", "session"):
        if received.get(name) != given.get(name):
            raise DistributedError(
                f"processes took different ways: process 0 does {_describe(received)} and process {_channel.me} "
                f"{_describe(given)}"
            )
    return received


def next_command() -> dict[str, Any]:
    """What process 0 does next, for a process that follows; the next call of `command` gives it back."""
    assert _channel is not None
    given = broadcast("command", {})
    _channel.received = None if given["do"] == "end" else given
    return given


def end_commands() -> None:
    """Process 0 has no more commands: the others stop to follow."""
    if _channel is not None and _channel.me == 0:
        _channel.broadcast("command", {"do": "end"})


def _describe(given: Mapping[str, Any]) -> str:
    return " ".join(str(given[name]) for name in ("do", "engine", "session") if name in given)


def clock() -> float:
    """The time of process 0 in seconds, the same in every process."""
    return broadcast("clock", time.perf_counter)


def check_equal(what: str, values: Mapping[str, Any]) -> None:
    """DistributedError in every process where the values differ between processes: it names the first that does."""
    if _channel is None:
        return
    given = gather(f"check {what}", {name: str(value) for name, value in values.items()})
    for process, others in enumerate(given):
        for name in sorted({*given[0], *others}):
            first, other = given[0].get(name, "absent"), others.get(name, "absent")
            if first != other:
                raise DistributedError(
                    f"processes differ in {what}: {name} is {first} in process 0 and {other} in process {process}; "
                    "start all of them with the same settings and files"
                )
