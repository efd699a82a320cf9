"""Several processes on one model: how they meet, and which of them this is (docs/several-hosts.md).

One process runs per host, on JAX's own runtime (`jax.distributed`). All processes start the same command and dispatch
the same programs in the same order. Process 0 leads: it has the prompt and the output, and makes every decision that
does not follow from device arrays (`jaxspec/runtime/hosts.py`). The others are workers (`jaxspec/worker.py`). When a
process is lost, JAX's heartbeat ends all others.
"""

import atexit
import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax._src import distributed as jax_distributed

from jaxspec.config import check_int
from jaxspec.errors import ConfigError, DistributedError, one_line, shown
from jaxspec.runtime import hosts

# Instead of an address: what JAX detects (Slurm, Open MPI, Kubernetes, TPU).
DETECT = "auto"
ENVIRONMENT = {
    "coordinator": "JAXSPEC_COORDINATOR", "num_processes": "JAXSPEC_NUM_PROCESSES", "process_id": "JAXSPEC_PROCESS_ID",
}  # fmt: skip
SHUTDOWN_S = 15  # that JAX lets a process that has ended wait for the others
LAST_WORDS_S = 2.0  # that process 0 stays after a failure: the coordinator in it holds messages to the others


@dataclasses.dataclass(frozen=True)
class Distributed:
    """The address at which the processes of one model meet, and limits of their waits.

    Attributes:
      coordinator: HOST:PORT at which process 0 listens and which all others reach, or "auto": what JAX detects itself
        (Slurm, Open MPI, Kubernetes, TPU). None takes `JAXSPEC_COORDINATOR`; without that there is one process.
      num_processes: how many there are; None takes `JAXSPEC_NUM_PROCESSES`.
      process_id: which one this is, from 0; None takes `JAXSPEC_PROCESS_ID`.
      draft_process: the process whose devices the draft of method "swiftspec" has; None is the last one.
      start_timeout: seconds until all processes must have started, and that one waits for another that loads models.
      fault_timeout: seconds without a heartbeat after which a process counts as lost, and JAX ends all others.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    draft_process: int | None = None
    start_timeout: int = 300
    fault_timeout: int = 30

    def __post_init__(self):
        if self.coordinator is not None and (not isinstance(self.coordinator, str) or not self.coordinator):
            raise ConfigError(f"coordinator must be HOST:PORT or {DETECT!r}, got {shown(self.coordinator)}")
        for name, low in (("num_processes", 1), ("process_id", 0), ("draft_process", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_int(name, getattr(self, name), low, 2**16))
        check_int("start_timeout", self.start_timeout, 5, 86400)
        check_int("fault_timeout", self.fault_timeout, 5, 3600)


_settings: Distributed | None = None  # of this process, once it is one of several


def num_processes() -> int:
    """Processes that share the models; 1 without `initialize`."""
    return 1 if _settings is None else jax_distributed.global_state.num_processes


def process_id() -> int:
    """The number of this process, from 0."""
    return 0 if _settings is None else jax_distributed.global_state.process_id


def is_leader() -> bool:
    """Whether this process has the prompt and the output."""
    return process_id() == 0


def settings() -> Distributed:
    """The settings that `initialize` was called with."""
    return _settings or Distributed()


def resolve(given: "Distributed | Mapping[str, Any] | str | None") -> Distributed | None:
    """Settings from what `LLM(distributed=...)` takes, and from the environment; None for one process.

    ConfigError: a value that cannot be, or some of coordinator, number and id without the others.
    """
    if given is None:
        found = Distributed()
    elif isinstance(given, Distributed):
        found = given
    elif isinstance(given, str):
        found = Distributed(given)
    elif isinstance(given, Mapping):
        names = {field.name for field in dataclasses.fields(Distributed)}
        if unknown := sorted(set(map(str, given)) - names):
            raise ConfigError(f"distributed has no setting {unknown[0]!r}; known: {', '.join(sorted(names))}")
        found = Distributed(**given)
    else:
        raise ConfigError(f"distributed must be settings, {DETECT!r} or HOST:PORT, got {shown(given)}")
    for name, variable in ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text and getattr(found, name) is None:
            found = dataclasses.replace(found, **{name: text if name == "coordinator" else _number(variable, text)})
    asked = {name: getattr(found, name) for name in ENVIRONMENT}
    if asked["coordinator"] is None:
        if _settings is not None and found.draft_process is None and all(value is None for value in asked.values()):
            return _settings
        for name in ("num_processes", "process_id", "draft_process"):
            if (value := getattr(found, name)) is not None:
                raise ConfigError(f"{name} {value} needs a coordinator: HOST:PORT of process 0, or {DETECT!r}")
        return None
    if asked["coordinator"] != DETECT:
        _check_address(found)
    return found


def _check_address(found: Distributed) -> None:
    address = found.coordinator or ""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(f"coordinator {address!r} is not HOST:PORT (nor {DETECT!r}, for what JAX detects)")
    if found.num_processes is None or found.process_id is None:
        missing = "num_processes" if found.num_processes is None else "process_id"
        raise ConfigError(f"coordinator {address} needs num_processes and process_id: {missing} is missing")
    if found.process_id >= found.num_processes:
        raise ConfigError(f"process_id {found.process_id} must be below num_processes {found.num_processes}")
    if found.draft_process is not None and found.draft_process >= found.num_processes:
        raise ConfigError(f"draft_process {found.draft_process} must be below num_processes {found.num_processes}")


def _number(variable: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{variable} must be a number, got {text!r}")
    return int(text)


def initialize(given: "Distributed | Mapping[str, Any] | str | None" = None) -> bool:
    """Join the other processes, before JAX is used; returns whether there are several. A second call does nothing.

    Raises:
      ConfigError: settings that cannot be, or others than those of an earlier call; JAX was used before.
      DistributedError: the other processes did not come in time.
    """
    global _settings
    wanted = resolve(given)
    if wanted is None:
        return False
    if _settings is not None:
        if dataclasses.replace(wanted, coordinator=_settings.coordinator) != _settings:
            raise ConfigError(f"this process joined others already, as {_settings}; it cannot join again as {wanted}")
        return num_processes() > 1
    if wanted.num_processes == 1:
        return False
    where = wanted.coordinator if wanted.coordinator != DETECT else "the coordinator that JAX detected"
    _configure(wanted)
    try:
        _meet(wanted)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"process {wanted.process_id} could not join the others at {where} within {wanted.start_timeout} s: "
            f"is every process started, and the address of process 0 right and reachable? ({one_line(error)[:300]})"
        ) from error
    _settings = wanted
    state = jax_distributed.global_state
    if state.num_processes > 1:
        hosts.join(state.client, state.process_id, state.num_processes, wanted.start_timeout)
        atexit.register(_end_commands)  # runs before JAX's own end, which waits for the others
    return num_processes() > 1


def _end_commands() -> None:
    if not hasattr(sys, "last_type"):  # after an uncaught error the others must not end as if all was done
        hosts.end_commands()


def shut_down() -> None:
    """Wait until all processes have ended their work, before one that leaves without Python's own end."""
    if hosts.several():
        hosts.end_commands()
        jax.distributed.shutdown()


def end_failed(status: int) -> None:
    """End this process at once if it is one of several: JAX's end would wait for the others, and then abort."""
    if hosts.several():
        if is_leader():
            time.sleep(LAST_WORDS_S)
        os._exit(status)


def _meet(wanted: Distributed) -> None:
    """Wait for the other processes at JAX's coordinator; raises what JAX raises."""
    detect, failed = wanted.coordinator == DETECT, []

    def meet() -> None:
        try:
            jax.distributed.initialize(
                None if detect else wanted.coordinator, wanted.num_processes, wanted.process_id,
                cluster_detection_method=None if detect else "deactivate",
                initialization_timeout=wanted.start_timeout, heartbeat_timeout_seconds=wanted.fault_timeout,
                shutdown_timeout_seconds=SHUTDOWN_S,
            )  # fmt: skip
        except BaseException as error:
            failed.append(error)

    # JAX waits outside of Python, where no handler of interrupts runs. In this thread they do.
    thread = threading.Thread(target=meet, name="jaxspec-meet", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]


def _configure(wanted: Distributed) -> None:
    """Set up JAX, before its backend starts."""
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise ConfigError("several processes must be joined before JAX is used: call LLM, or initialize, first")
    # Otherwise SIGTERM only makes a note of a preemption, and does not end the process.
    jax.config.update("jax_enable_preemption_service", False)
    host = _own_address(wanted)
    # Transfers between processes on backends without their own, such as the CPU; set by hand, it stays.
    if not jax.config.values.get("jax_cross_host_transfer_socket_address"):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        named = f"[{host}]" if ":" in host else host
        jax.config.update("jax_cross_host_transfer_socket_address", f"{named}:{port}")
        jax.config.update("jax_cross_host_transport_addresses", f"{named}:0")


def _own_address(wanted: Distributed) -> str:
    """The address of this host towards the coordinator."""
    if wanted.coordinator in (None, DETECT):
        return socket.gethostbyname(socket.gethostname())
    host, _, port = wanted.coordinator.rpartition(":")
    with contextlib.suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only chooses the way
            return probe.getsockname()[0]
    raise DistributedError(f"the coordinator's host {host!r} is not known here")
