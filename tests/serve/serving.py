"""A server of `ApiServer` in a thread of the tests, on a real socket."""

import threading
import time

import httpx
import uvicorn

from jaxspec.serve.app import ApiServer, Limits
from jaxspec.serve.server import open_socket


class Running:
    """A server in a thread."""

    def __init__(self, llm, limits=None, **options):
        self.api = ApiServer(llm, "tiny", limits or Limits(), **options)
        self._socket = open_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self.api.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self):
        self.api.scheduler.start()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.api.scheduler.close(0)
        self.api.scheduler.join(30)
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def post(self, path="/v1/completions", **body):
        return httpx.post(self.url + path, json=body, timeout=60)

    def gauge(self, name):
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def wait_idle(self):
        """Until no request is decoded, at most ten seconds."""
        deadline = time.monotonic() + 10
        while self.gauge("num_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
