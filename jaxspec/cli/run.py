"""How every jaxspec command ends: one line per error, an exit status, and a clean terminal.

Exit status: 0 done, 1 the run failed, 2 the words are off, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable

from jaxspec.errors import CheckpointError, ConfigError


def run_command(name: str, command: Callable[[], object]) -> None:
    """Run a command's body and exit with its status; `name` begins its error lines."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a replacement; it must not stop the run.
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        command()
        sys.stdout.flush()
    except ConfigError as error:
        _fail(name, error, 2)
    except CheckpointError as error:
        _fail(name, error, 1)
    except KeyboardInterrupt:
        # What streams leave behind: an unfinished line, which the shell's prompt must not continue.
        print(file=sys.stderr)
        _leave(130)
    except BrokenPipeError:
        # Whoever read us has had enough, as `head` does. Python flushes stdout once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(name: str, error: Exception, status: int) -> None:
    print(f"{name}: error: {error}", file=sys.stderr)
    sys.exit(status)


def _leave(status: int) -> None:
    # Not sys.exit: a compilation in another thread would keep the process alive for seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
