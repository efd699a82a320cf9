"""Where a trace hooks in: one recorder for the process while a trace is taken, else none.

Programs, transfers and the engine look at `active`; without a trace that is all it costs them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from jaxspec.runtime.mesh import MeshPlan

Launch = Callable[..., Any]
Read = Callable[..., Any]


class Recorder(Protocol):
    """What watches generations run; see `bench.timeline`."""

    def generation(self, state: Any, launch: Launch, read: Read) -> tuple[Launch, Read]:
        """A generation begins with `state`; watched forms of what launches its rounds and of what reads them."""
        ...

    def program(self, name: str, plan: MeshPlan, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Dispatch a program and return its results. Those behind the first, which is state, are never donated."""
        ...

    def transfer(self, move: Callable[[], jax.Array], array: jax.Array, plan: MeshPlan) -> jax.Array:
        """Dispatch `move`, which copies `array` to another mesh."""
        ...

    def wait(self, array: jax.Array) -> None:
        """Wait for an array within a round."""
        ...


active: Recorder | None = None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let a recorder watch whatever runs within.

    Raises:
      RuntimeError: another one does already.
    """
    global active
    if active is not None:
        raise RuntimeError("a trace is being taken already, and there can be one at a time")
    active = recorder
    try:
        yield
    finally:
        active = None


def wait(array: jax.Array) -> None:
    """Wait for an array within a round; a trace tells that from the host's work."""
    if active is None:
        array.block_until_ready()
    else:
        active.wait(array)
