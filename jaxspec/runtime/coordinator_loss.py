"""The end of a process whose coordinator, which lives in process 0, is gone: one line in place of JAX's stack trace.

JAX's client ends its process as soon as it loses the coordinator, long before a beat is missed (`watch`). It takes a
callback for that, which jaxlib 0.10 calls with a status that it cannot convert: C++ ends the process by
`std::terminate`. So both the callback and the handler of `std::terminate` say what happened.
"""

import contextlib
import ctypes
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import distributed as jax_distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

_HANDLER = ctypes.CFUNCTYPE(None)
_kept: list[Any] = []  # C++ calls the handler at any time: it must stay


@contextlib.contextmanager
def told(end: Callable[[], None]) -> Iterator[None]:
    """Clients that JAX makes within call `end`, in a thread of their own, where they lose the coordinator.

    `end` must not return.
    """
    make: Any = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: end())
    _replace_handler(end)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make


def _replace_handler(end: Callable[[], None]) -> None:
    try:
        # The one library of the process: JAX's own refers to it.
        replace: Any = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return  # another C++ library: JAX's own message stays
    replace.restype, replace.argtypes = _HANDLER, [_HANDLER]

    def handle() -> None:
        if _is_lost():
            end()
        before()

    _kept.append(handler := _HANDLER(handle))
    before = replace(handler)


def _is_lost() -> bool:
    """Whether no process accepts connections at the coordinator's address."""
    host, _, port = (jax_distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return True
    return False
