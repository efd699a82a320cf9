"""How every jaxspec command starts and ends: `--version`, one line per error, an exit status, a clean terminal.

Exit status: 0 done, 1 the run failed, 2 usage error, 130 interrupted.
"""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, NoReturn

import typer

from jaxspec import __version__
from jaxspec.cli.options import foreign_option_hint
from jaxspec.errors import ConfigError, JaxspecError

STDOUT, STDERR = 1, 2
INTERRUPTED = 130


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.info_name} {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line; an option that other projects use is refused with the name of the right one."""
    known = {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
    for word in sys.argv[1:]:
        if word == "--":
            break
        option = word.partition("=")[0]
        if option not in known and (hint := foreign_option_hint(option, known)):
            _fail(name, f"no such option: {option}; {hint}", 2)
    app(prog_name=name)


def run_command(name: str, command: Callable[[], object], *, cleans_up: bool = False) -> None:
    """Run a command's body and exit with its status; `name` begins error lines.

    An interrupt is raised in a body that `cleans_up`, which has something to undo; else it ends the process at once.
    """
    warnings.showwarning = lambda message, *_: print(f"{name}: warning: {message}", file=sys.stderr)
    signal.signal(signal.SIGINT, _raise_interrupt if cleans_up else lambda number, frame: _leave_interrupted())
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # closed before, as by a shell's `>&-`
        getattr(sys, stream).reconfigure(errors="replace")  # a character that a terminal lacks must not stop the run
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        _leave_interrupted()
    except BrokenPipeError:
        # The reader of the pipe has left, as `head` does. Python flushes stdout once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        sys.exit(0)
    except ConfigError as error:
        _fail(name, error, 2)
    except MemoryError:
        _fail(name, "out of memory", 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # XLA's own, which cannot be named without loading it
            raise
        _fail(name, f"out of memory: {str(error).splitlines()[0]}", 1)
    except (JaxspecError, OSError) as error:
        _fail(name, error, 1)


_was_interrupted = threading.Event()  # Python drops an exception that is raised while a library calls back into it


def raise_lost_interrupt() -> None:
    """Raise an interrupt again that got lost; a command that cleans up calls this now and then."""
    if _was_interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_noted() -> Iterator[threading.Event]:
    """Within, the first interrupt only sets the event that is yielded; a second one ends the process at once."""
    noted = threading.Event()

    def note(number: int, frame: object) -> None:
        if noted.is_set():
            _leave_interrupted()
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _raise_interrupt(number: int, frame: object) -> None:
    _was_interrupted.set()
    raise KeyboardInterrupt


def leave_after_interrupt() -> NoReturn:
    """End the process of a command that was interrupted and has finished its work, with the status of an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(INTERRUPTED)


def _fail(name: str, error: object, status: int) -> NoReturn:
    print(f"{name}: error: {error}", file=sys.stderr)
    sys.exit(status)


def _leave_interrupted() -> NoReturn:
    # Streaming leaves an unfinished line, and a status line hides the cursor. The interrupt may have caught Python's
    # buffers half-way. A compilation in another thread would keep the process alive for seconds.
    os.write(STDERR, b"\r\x1b[2K\x1b[?25h\n" if os.isatty(STDERR) else b"\n")
    os._exit(INTERRUPTED)
