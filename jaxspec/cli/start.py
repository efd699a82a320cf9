"""The first code of every command, before any import that takes time.

An interrupt ends the process at once, with status 130 and without a traceback. Standard streams that were closed, as by
a shell's `>&-`, are replaced by the null device, and input by one that is empty: a file that is opened later must not
get the number of such a stream, or a library that prints would write into it.
"""

import atexit
import functools
import importlib
import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

STDIN, STDOUT, STDERR = 0, 1, 2
INTERRUPTED = 130


def begin() -> None:
    """Take over interrupts and the standard streams."""
    # Runs last of all. Python ends with the system's own handlers: an interrupt would kill what has ended well.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, lambda number, frame: leave_interrupted())
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BytesIO())  # it ends at once, even where a container's null device is a file
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def leave_interrupted() -> "NoReturn":
    """End the process now, with the status of an interrupt."""
    # Streaming leaves an unfinished line, and a status line hides the cursor. The interrupt may have caught Python's
    # buffers half-way. A compilation in another thread would keep the process alive for seconds.
    try:
        os.write(STDERR, b"\r\x1b[2K\x1b[?25h\n" if os.isatty(STDERR) else b"\n")
    finally:
        os._exit(INTERRUPTED)


def run(command: str) -> None:
    """Run a command by name."""
    begin()
    app = importlib.import_module(f"jaxspec.cli.{command}").app
    importlib.import_module("jaxspec.cli.run").run_app(app, f"jaxspec-{command}")


# The entry points of the scripts `jaxspec-bench` and so on.
bench, check, convert, decode, serve, tune = (
    functools.partial(run, command) for command in ("bench", "check", "convert", "decode", "serve", "tune")
)
