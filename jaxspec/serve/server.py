"""The process of a server: its socket, its signals, its end."""

import errno
import logging
import socket
import threading
from types import FrameType

import uvicorn

from jaxspec.errors import ConfigError
from jaxspec.serve.app import ApiServer

KEEP_ALIVE_SECONDS = 5
BACKLOG = 256


def open_socket(host: str, port: int) -> socket.socket:
    """Listen at an address; ConfigError where another process does, or the address is not this machine's.

    Clients that connect before the model is loaded wait.
    """
    listening = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left is free
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use by another process; --port takes another") from error
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    return listening


def serve(api: ApiServer, listening: socket.socket, shutdown_s: float) -> None:
    """Serve until a signal comes; answers under way then have `shutdown_s` seconds to finish."""
    config = uvicorn.Config(
        api.app, log_level=logging.WARNING, access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=int(shutdown_s) + 10,
    )  # fmt: skip
    api.scheduler.start()
    try:
        _Server(config, api, shutdown_s).run(sockets=[listening])
    finally:
        api.scheduler.close(0)
        api.scheduler.join(timeout=60)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, api: ApiServer, shutdown_s: float):
        super().__init__(config)
        self._api, self._shutdown_s = api, shutdown_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers finish, the second one aborts them."""
        seconds = 0.0 if self.should_exit else self._shutdown_s
        self.should_exit = True
        # A signal handler must not wait for a lock that its own thread may hold.
        threading.Thread(target=self._api.scheduler.close, args=(seconds,), daemon=True).start()
