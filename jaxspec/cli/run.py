"""How every jaxspec command ends: one line per error, an exit status, and a clean terminal.

Exit status: 0 done, 1 the run failed, 2 the words are off, 130 interrupted.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from jaxspec.errors import ConfigError, JaxspecError

STDOUT, STDERR = 1, 2
INTERRUPTED = 130


def run_command(name: str, command: Callable[[], object], *, cleans_up: bool = False) -> None:
    """Run a command's body and exit with its status.

    Args:
      name: begins error lines.
      command: the body.
      cleans_up: an interrupt is raised in the body, which has something to undo; else it ends the process at once.
    """
    # An exception can get lost: Python drops one that is raised while a library calls back into it.
    signal.signal(signal.SIGINT, _raise_interrupt if cleans_up else lambda number, frame: _leave_interrupted())
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            # Closed before we began, as a shell's `>&-` does: what would go there goes nowhere.
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))
        # A terminal that cannot show a character shows a replacement; it must not stop the run.
        getattr(sys, stream).reconfigure(errors="replace")
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        _leave_interrupted()
    except BrokenPipeError:
        # Whoever read us has had enough, as `head` does. Python flushes stdout once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        sys.exit(0)
    except ConfigError as error:
        _fail(name, error, 2)
    except MemoryError:
        _fail(name, "out of memory", 1)
    except RuntimeError as error:
        # XLA's own, which cannot be named without loading it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail(name, f"out of memory: {str(error).splitlines()[0]}", 1)
    except (JaxspecError, OSError) as error:
        _fail(name, error, 1)


_was_interrupted = threading.Event()


def raise_lost_interrupt() -> None:
    """To be called now and then by a command that cleans up: an interrupt that got lost is raised again."""
    if _was_interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Within, an interrupt is raised instead of ending the process at once: there is something to finish."""
    before = signal.signal(signal.SIGINT, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise_interrupt(number: int, frame: object) -> None:
    _was_interrupted.set()
    raise KeyboardInterrupt


def _fail(name: str, error: object, status: int) -> None:
    print(f"{name}: error: {error}", file=sys.stderr)
    sys.exit(status)


def _leave_interrupted() -> None:
    # Streaming leaves an unfinished line, which the shell's prompt must not continue. Written past Python's buffers,
    # which the interrupt may have caught half-way, and left at once: a compilation in another thread would keep the
    # process alive for seconds.
    os.write(STDERR, b"\n")
    os._exit(INTERRUPTED)
