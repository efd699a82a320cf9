"""The hook of traces: while a trace is taken, programs, transfers and the engine report to one recorder, `active`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from jaxspec.runtime.mesh import MeshPlan

Launch = Callable[..., Any]
Read = Callable[..., Any]


class Recorder(Protocol):
    """Watches generations run; `trace.timeline.Timeline` is one."""

    # Begin a generation with `state`; returns watched forms of its launching and reading functions.
    def generation(self, state: Any, launch: Launch, read: Read) -> tuple[Launch, Read]: ...

    # Dispatch a program and return its results. The first is state; the others are never donated.
    def program(self, name: str, plan: MeshPlan, run: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...

    # Dispatch `move`, which copies `array` to another mesh.
    def transfer(self, move: Callable[[], jax.Array], array: jax.Array, plan: MeshPlan) -> jax.Array: ...

    # Wait for an array within a round.
    def wait(self, array: jax.Array) -> None: ...


active: Recorder | None = None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let a recorder watch all generations within; raises `RuntimeError` where another recorder is active."""
    global active
    if active is not None:
        raise RuntimeError("another trace is being taken; a process takes one at a time")
    active = recorder
    try:
        yield
    finally:
        active = None


def wait(array: jax.Array) -> None:
    """Wait for an array within a round; a trace counts this apart from the host's work."""
    if active is None:
        array.block_until_ready()
    else:
        active.wait(array)
