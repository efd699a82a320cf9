"""The guarded process: programs and patterns of a checkpoint run in it, under limits of time and memory.

A chat template is a program, and a regular expression of a tokenizer may backtrack without end. Neither can be stopped
inside this process: the tokenizer library holds the interpreter lock, and one operation of a template can take all
memory. So they run in one child process (`jaxspec.text.guarded`), started when first needed. Where a limit is exceeded
or the child crashes, the caller gets an error of one line, and the next request a new child.
"""

import atexit
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.text.guarded import read_frame, write_frame

# Seconds of processor time. Ordinary templates take milliseconds; a text is split at some megabytes a second.
RENDER_SECONDS = 3.0
LOAD_SECONDS = 20.0
ENCODE_SECONDS, ENCODE_SECONDS_PER_CHARACTER = 3.0, 2e-5
CONVERT_SECONDS = 300.0

RENDER_BYTES = 1 << 30  # address space of the process
TOKENIZER_BYTES = 8 << 30

_WALL_FACTOR = 10.0  # a busy machine gives a process a part of its time

_START = "import sys; sys.path[:] = sys.argv[1:]; from jaxspec.text.guarded import serve; serve()"


class GuardError(Exception):
    """What was asked for failed in the guarded process; the message says how."""


def prestart() -> None:
    """Start the guarded process, so that it is ready when it is needed; does not wait for it."""
    _process.start()


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template; ConfigError where it fails or exceeds a limit."""
    try:
        return _process.ask("render", RENDER_SECONDS, RENDER_BYTES, source=source, variables=dict(variables))
    except GuardError as error:
        message = str(error)
        raise ConfigError(
            message if message.startswith("the model's chat template") else f"the model's chat template: {message}"
        ) from None


def check_loads(tokenizer: str, name: object, added: Sequence[Mapping[str, Any]] = ()) -> None:
    """CheckpointError, which names the file, unless the tokenizer library reads this tokenizer.json.

    `added` are tokens that are added to it then: arguments of the library's `AddedToken`.
    """
    try:
        _process.ask("load", LOAD_SECONDS, TOKENIZER_BYTES, key="", tokenizer=tokenizer, added=list(added))
    except GuardError as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None


def convert_older(folder: Path) -> dict[str, Any]:
    """`tokenizer` (JSON) and `special_tokens` of a tokenizer that transformers converts; GuardError if it cannot."""
    return _process.ask("convert", CONVERT_SECONDS, TOKENIZER_BYTES, folder=str(folder))


class GuardedTokenizer:
    """Encodes with a tokenizer of the library in the guarded process."""

    def __init__(self, tokenizer: str):
        """Take a tokenizer as JSON; it is loaded there when it first encodes."""
        self._tokenizer = tokenizer
        self._key = hashlib.sha256(tokenizer.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`; CheckpointError where the tokenizer fails or exceeds a limit."""
        seconds = ENCODE_SECONDS + len(text) * ENCODE_SECONDS_PER_CHARACTER
        words = {"key": self._key, "text": text, "add_special_tokens": add_special_tokens}
        try:
            ids = _process.ask("encode", seconds, TOKENIZER_BYTES, **words)
            if ids is None:
                _process.ask("load", LOAD_SECONDS, TOKENIZER_BYTES, key=self._key, tokenizer=self._tokenizer)
                ids = _process.ask("encode", seconds, TOKENIZER_BYTES, **words)
        except GuardError as error:
            raise CheckpointError(f"the model's tokenizer cannot encode this text: {error}") from None
        return ids


class _GuardedProcess:
    """The child process and its pipes; one request at a time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._number = 0

    def start(self) -> None:
        with self._lock:
            self._started()

    def ask(self, operation: str, seconds: float, num_bytes: int, **words: Any) -> Any:
        """The reply to a request; GuardError where it fails, exceeds a limit or crashes the process."""
        with self._lock:
            child = self._started()
            self._number += 1
            request = {"number": self._number, "operation": operation, "seconds": seconds, "bytes": num_bytes}
            watchdog = threading.Timer(seconds * _WALL_FACTOR, child.kill)
            watchdog.daemon = True
            watchdog.start()
            reply = None
            try:
                write_frame(child.stdin, request | words)  # pyright: ignore[reportArgumentType]
                reply = read_frame(child.stdout)  # pyright: ignore[reportArgumentType]
            except (BrokenPipeError, ConnectionError):
                reply = None
            finally:
                watchdog.cancel()
                # An interrupt may have come between request and reply: no later request may read this reply.
                if reply is None or reply.get("number") != self._number:
                    ended = self.stop(0.2)
                    reply = None
            if reply is None:
                raise GuardError(self._describe(ended, seconds))
            if "error" in reply:
                raise GuardError(reply["error"])
            return reply["value"]

    def stop(self, seconds: float = 0.0) -> int:
        """Give the process so many seconds to end, then end it; its exit status, negative for a signal."""
        child, self._child = self._child, None
        if child is None:
            return 0
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
        status = child.wait()
        for pipe in (child.stdin, child.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                continue  # what was not sent is of no use any more
        return status

    def forget(self) -> None:
        """In a process that was forked: leave the child to the parent, whose replies must not be read here."""
        self.__init__()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.stop()
        root = str(Path(__file__).resolve().parents[2])
        # Without `site`, which costs half of the start; a session of its own keeps Ctrl-C from reaching the child.
        command = [sys.executable, "-I", "-S", "-c", _START, *(path for path in sys.path if path), root]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        except (OSError, TypeError) as error:
            raise ConfigError(f"the process that renders chat templates cannot be started: {error}") from error
        return self._child

    @staticmethod
    def _describe(status: int, seconds: float) -> str:
        if status in (-getattr(signal, "SIGPROF", 0), -getattr(signal, "SIGKILL", 0)):
            return f"it takes more than the {seconds:.0f} s of processor time that it may take"
        return (
            f"it needs more memory than it may take, or crashes ({'signal' if status < 0 else 'status'} {abs(status)})"
        )


_process = _GuardedProcess()
atexit.register(_process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
