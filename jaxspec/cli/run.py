"""How every jaxspec command ends: one line per error, an exit status, and a clean terminal.

Exit status: 0 done, 1 the run failed, 2 the words are off, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable

from jaxspec.errors import CheckpointError, ConfigError, JaxspecError

STDOUT = 1


def run_command(name: str, command: Callable[[], object]) -> None:
    """Run a command's body and exit with its status; `name` begins its error lines."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a replacement; it must not stop the run. A stream that was
        # closed before we began is None.
        if stream is not None:
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        command()
        if sys.stdout is not None:
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        sys.exit(0)
    except MemoryError:
        _fail(name, "out of memory", 1)
    except (JaxspecError, OSError) as error:
        _fail(name, error, 1)


def _fail(name: str, error: object, status: int) -> None:
    print(f"{name}: error: {error}", file=sys.stderr)
    sys.exit(status)


def _leave(status: int) -> None:
    # Not sys.exit: a compilation in another thread would keep the process alive for seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
