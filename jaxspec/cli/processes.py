"""Options of a command that runs as several processes, and the worker loop of those other than process 0."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import PROCESSES
from jaxspec.cli.run import leave_after_interrupt
from jaxspec.cli.start import STDERR, STDOUT, leave_interrupted
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.llm import LLM


def processes_from(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of `LLM(distributed=...)` among merged options; None where none is given."""
    given = {name: options[name] for name in PROCESSES if options.get(name) is not None}
    if asks_for_several(options):
        _keep_output()
    return given or None


def asks_for_several(options: Mapping[str, Any]) -> bool:
    """Whether merged options or the environment name other processes."""
    return any(options.get(name) is not None for name in PROCESSES) or bool(os.environ.get("JAXSPEC_COORDINATOR"))


def _keep_output() -> None:
    """Let what libraries write to standard output, as Gloo does, go to standard error."""
    sys.stdout.flush()
    own = open(os.dup(STDOUT), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(STDERR, STDOUT)
    sys.stdout = own


def is_worker(options: Mapping[str, Any]) -> bool:
    """Whether this process is known to be another than process 0; one that JAX detects is not known yet."""
    number = options.get("process_id")
    text = os.environ.get("JAXSPEC_PROCESS_ID", "0")
    return bool(number) if number is not None else text.isdecimal() and int(text) > 0


def refuse_several(name: str) -> None:
    """ConfigError where the environment asks for several processes, for a command that runs in one."""
    if os.environ.get("JAXSPEC_COORDINATOR"):
        raise ConfigError(f"{name} runs in one process: unset JAXSPEC_COORDINATOR")


@contextlib.contextmanager
def _signals_noted(name: str) -> Iterator[list[int]]:
    """Within, the first interrupt or SIGTERM of a worker is noted; a second one ends the process.

    A terminal or a scheduler sends signals to all processes. Process 0 decides what is still finished.
    """
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if noted:
            leave_interrupted()
        noted.append(number)
        os.write(STDERR, f"{name}: process 0 says when to end; a second signal ends this process now\n".encode())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ran_as_worker(llm: "LLM", name: str) -> bool:
    """Run the worker loop if this is another process than 0, and return True; process 0 prints the plan."""
    from jaxspec.llm import internals
    from jaxspec.runtime import distributed, hosts

    if not hosts.several():
        return False
    if not distributed.is_leader():
        with _signals_noted(name) as noted:
            llm.follow()
        if signal.SIGINT in noted:
            leave_after_interrupt()
        return True
    print(f"{name}: {internals(llm).device_plan}", file=sys.stderr, flush=True)
    return False
