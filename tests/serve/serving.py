"""A server of `ApiServer` in a thread of the tests, on a real socket; and its rounds, counted."""

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


class Rounds:
    """Counts the rounds of a scheduler by request, from now on; no clock is read."""

    def __init__(self, scheduler, monkeypatch, begin=0):
        """Nothing is decoded until `begin` requests have come, so that none ends before the next comes."""
        self.queued, self.begun, self.ended = [], [], []
        self._turns = []  # of each round: the request that had it, and all that were decoded then
        self._arrivals, self._ends = {}, {}  # by request, in rounds
        submit, step, gathered = scheduler.submit, scheduler._step, threading.Event()

        def watch_submit(job):
            with scheduler._changed:
                self.queued.append(job)
                self._arrivals[job] = len(self._turns)
                submit(job)
            if len(self.queued) >= begin:
                gathered.set()

        def watch_step(job):
            assert gathered.wait(60)
            self._turns.append((job, tuple(scheduler._active)))
            goes_on = step(job)
            if job not in self.begun:
                self.begun.append(job)
            if not goes_on:
                self.ended.append(job)
                self._ends[job] = len(self._turns)
            return goes_on

        monkeypatch.setattr(scheduler, "submit", watch_submit)
        monkeypatch.setattr(scheduler, "_step", watch_step)

    def served(self, job):
        """Rounds that a request had."""
        return sum(turn is job for turn, _ in self._turns)

    def due(self, job):
        """Rounds that it would have had if every round were divided among the requests of its time."""
        return sum(1 / len(active) for _, active in self._turns if job in active)

    def waited(self, job):
        """Rounds of all requests between its arrival and its end."""
        return self._ends[job] - self._arrivals[job]
