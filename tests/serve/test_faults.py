"""Limits and faults: the right code for each, no answer lost or wrong, nothing left afterwards."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import socket
import threading
import time

import httpx
import pytest
from native_models import LLAMA, write_model
from serving import Rounds, Running

from jaxspec.config import SamplingParams
from jaxspec.engine import CPU_PIECE
from jaxspec.llm import LLM, internals
from jaxspec.serve import answers
from jaxspec.serve.app import Limits

HEADERS = {"Content-Type": "application/json"}
LONG = {"ignore_eos": True, "max_tokens": 390}


def post(server, content, headers=HEADERS, path="/v1/completions"):
    return httpx.post(server.url + path, content=content, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b'{"prompt": ', HEADERS, 400, "not JSON"),
        (b"[" * 50_000, HEADERS, 400, "not JSON"),
        (b'{"prompt": ["w1", ""]}', HEADERS, 400, "not empty"),
        (b'{"prompt": "w1", "model": "other"}', HEADERS, 404, "other"),
        (b'{"prompt": "w1", "model": "\\ud800"}', HEADERS, 404, r"\ud800"),
        (b'{"prompt": "w1", "max_tokens": ' + b"9" * 4000 + b"}", HEADERS, 400, "max_tokens must be at most"),
        (b'{"prompt": {"text": "w1"}}', HEADERS, 400, "token ids"),
        (b'{"prompt": "w1", "stop": ["a", 1]}', HEADERS, 400, "stop must be"),
        (b'{"prompt": "w1", "temperature": 1e400}', HEADERS, 400, "temperature must be at most"),
        (b'{"prompt": "w1", "stream": 1}', HEADERS, 400, "stream must be true or false"),
        (b" " * 100_001, HEADERS, 413, "larger than 100000 bytes"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    ],
)
def test_bad_bodies(server, content, headers, status, message):
    answer = post(server, content, headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_a_body_of_unknown_length_has_the_same_limit(server):
    answer = post(server, iter([b" " * 60_000] * 2))
    assert answer.status_code == 413


def test_other_paths_and_verbs(server):
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["message"].startswith("GET /v1/nothing")
    refused = httpx.get(f"{server.url}/v1/completions")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_other_hosts_are_refused(server):
    for host in ("localhost", "LocalHost:80", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200
    for host in ("elsewhere.org", "localhost.elsewhere.org", "user@localhost", "[::2]:80", ""):
        answer = httpx.get(f"{server.url}/health", headers={"Host": host})
        assert answer.status_code == 400 and "Host header" in answer.json()["error"]["message"]


def test_a_key_is_asked_for(start):
    server = start(api_key="secret")
    for given in (None, "Bearer wrong", "secret", "Bearer é".encode()):
        headers = {} if given is None else {"Authorization": given}
        answer = httpx.get(f"{server.url}/v1/models/tiny", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert post(server, b"{}", {**HEADERS, **headers}).status_code == 401
        assert post(server, b"{}", {**HEADERS, **headers}, "/v1/live").status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200


def slow_down(server, seconds):
    """Let every round begin later; `seconds` is a function."""
    step = server.api.scheduler._step
    server.api.scheduler._step = lambda job: (time.sleep(seconds()), step(job))[1]


def test_a_full_queue_and_a_slow_answer(start):
    server = start(limits=Limits(active=1, waiting=1, seconds=2.0))
    slow = json.dumps({"prompt": "w1", "stream": True, **LONG}).encode()
    pause = 0.05
    slow_down(server, lambda: pause)
    with httpx.stream("POST", f"{server.url}/v1/completions", content=slow, headers=HEADERS) as first:
        lines = first.iter_lines()
        next(lines)
        waiting = threading.Thread(target=post, args=(server, b'{"prompt": "w1"}'))
        waiting.start()
        while not server.gauge("num_requests_waiting"):
            time.sleep(0.01)
        refused = post(server, b'{"prompt": "w1"}')
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["error"]["code"] == "timeout"  # after the answer had begun
    waiting.join()
    pause = 1.0  # the same answer is copied: it takes few rounds
    late = post(server, json.dumps({"prompt": "w1", **LONG}).encode())
    assert late.status_code == 504 and late.headers["x-should-retry"] == "false"
    pause = 0.0
    assert post(server, b'{"prompt": "w1"}').status_code == 200


def test_who_waits_and_leaves_keeps_no_place(start):
    """A stream whose client leaves the queue, and one that is too late before its turn came."""
    server = start(limits=Limits(active=1, waiting=1, seconds=20.0))
    slow_down(server, lambda: 0.03)
    body = {"prompt": "w1", "stream": True, **LONG}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as first:
        lines = first.iter_lines()
        next(lines)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as leaver:
            leaver.sendall(raw_request(json.dumps(body).encode()))
            while not server.gauge("num_requests_waiting"):
                time.sleep(0.01)
        while server.gauge("num_requests_waiting"):
            time.sleep(0.01)
        assert server.gauge("num_requests_running") == 1
        server.api.limits = Limits(seconds=0.1)
        late = server.post(prompt="w1")
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        assert server.gauge("num_requests_running") == 1


def test_a_fault_of_what_watches_ends_one_request(server, monkeypatch):
    monkeypatch.setattr("jaxspec.serve.live.RoundWatcher.close", lambda self: 1 / 0)
    failed = server.post("/v1/live", prompt="w1", max_tokens=3)
    assert '"type":"server_error"' in failed.text and "ZeroDivision" not in failed.text
    monkeypatch.undo()
    assert server.post(prompt="w1").status_code == 200


def test_a_fault_of_the_http_side_is_an_error_object(server, monkeypatch):
    monkeypatch.setattr(server.api.scheduler, "check_room", lambda: 1 / 0)
    failed = server.post(prompt="w1")
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"


def test_a_short_answer_does_not_wait_for_a_long_one(server, monkeypatch):
    watched = Rounds(server.api.scheduler, monkeypatch, begin=2)
    waiting = threading.Thread(target=server.post, kwargs={"prompt": "w1", **LONG})
    waiting.start()
    while not watched.queued:
        time.sleep(0.01)
    assert server.post(prompt="w2", max_tokens=3).status_code == 200
    waiting.join()
    long, short = watched.queued
    assert watched.ended == [short, long]
    assert watched.waited(short) <= 2 * watched.served(short) + 1  # the round that was under way when it came


@pytest.fixture(scope="module")
def long_llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "tiny"
    write_model(folder, dataclasses.replace(LLAMA, max_context=4096))
    return LLM(folder, method="ar", max_context=2600, session_memory=0)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_short_request_does_not_wait_for_a_long_prompt(long_llm, monkeypatch, path):
    """It comes while 2,500 tokens are read, and gets its first token after one more piece of them at most.

    The stream of the long one has begun by then: its client has the opening chunk, or a comment.
    """
    monkeypatch.setattr(answers, "OPENING_SECONDS", 0.0)
    text = "w1 w2 w3 w4 w5 " * 500
    prompt = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    steps, opened, begun = [], [], threading.Event()
    with Running(long_llm) as server:
        scheduler, short = server.api.scheduler, []
        step = scheduler._step

        def watched(job):
            if len(steps) == 2:  # two pieces are read
                assert begun.wait(60)
                short.append(threading.Thread(target=server.post, kwargs={"prompt": "w2", "max_tokens": 1}))
                short[0].start()
                while not scheduler._waiting:
                    time.sleep(0.001)
            goes_on = step(job)
            steps.append((job, job.reading))
            return goes_on

        monkeypatch.setattr(scheduler, "_step", watched)
        body = {**prompt, "stream": True, "max_tokens": 1}
        with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            opened.append(next(lines))
            begun.set()
            opened.extend(line for line in lines if line)
        short[0].join()
    long = steps[0][0]
    pieces = [reading for job, reading in steps if job is long]
    assert len(pieces) >= 2500 // CPU_PIECE and all(pieces[:-1])
    assert [job is long for job, _ in steps[:5]].index(False) <= 3
    assert ("assistant" if path.startswith("chat") else ": reading") in opened[0] and opened[-1] == "data: [DONE]"


def test_an_error_inside_ends_one_request(server, monkeypatch):
    wanted = server.post(prompt="w1 w2").json()["choices"]
    monkeypatch.setattr(internals(server.api.llm).engine, "open", lambda *_: 1 / 0)
    failed = server.post(prompt="w1 w2")
    assert failed.status_code == 500 and "ZeroDivision" not in failed.text
    monkeypatch.undo()
    assert server.post(prompt="w1 w2").json()["choices"] == wanted


@pytest.mark.parametrize("grace_s", [30, 0])
def test_closing_finishes_what_runs_or_says_so_and_refuses_the_rest(start, grace_s):
    server = start()
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "w1", "stream": True, **LONG}) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.api.scheduler.close(grace_s)
        assert server.post(prompt="w1").status_code == httpx.get(f"{server.url}/health").status_code == 503
        rest = [line for line in lines if line]
    last = json.loads(rest[-2][6:])
    assert rest[-1] == "data: [DONE]"
    assert last["choices"][0]["finish_reason"] == "length" if grace_s else last["error"]["code"] == "shutting_down"


def raw_request(body, length=None):
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join([*lines, f"Content-Length: {length or len(body)}", "", ""])
    return head.encode() + body


def load(server, cold_llm, count, seed=0):
    """Requests of all kinds, one after the other and abandoned at random; whole answers must be right."""
    host, port = server.url.removeprefix("http://").split(":")
    rng, finished = random.Random(seed), 0
    for _ in range(count):
        kind = rng.choice(["whole", "leave", "read some", "half a body", "garbage", "not UTF-8", "too large"])
        prompt, tokens = f"w{rng.randrange(40)} w{rng.randrange(40)}", rng.randrange(1, 30)
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "stream": kind == "read some"}).encode()
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            if kind == "whole":
                answer = server.post(prompt=prompt, max_tokens=tokens)
                wanted = cold_llm.generate(prompt, SamplingParams(max_tokens=tokens)) if finished % 10 == 0 else None
                assert answer.status_code == 200
                assert wanted is None or answer.json()["choices"][0]["text"] == wanted.text
                finished += 1
            elif kind == "half a body":
                connection.sendall(raw_request(body[:5], len(body)))
            elif kind in ("leave", "read some"):
                connection.sendall(raw_request(body))
                if kind == "read some":
                    connection.recv(200)
            else:
                sent = {"garbage": b"{" * 50, "not UTF-8": b'"\xff"', "too large": b" " * 150_000}[kind]
                status = {"garbage": b"400", "not UTF-8": b"400", "too large": b"413"}[kind]
                try:
                    connection.sendall(raw_request(sent))
                    assert connection.recv(100).split(b" ")[1] == status
                except ConnectionError:
                    assert kind == "too large"  # refused before all of it was sent
    server.wait_idle()
    return finished


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.thorough
def test_load_leaves_nothing(server, served_llm, cold_llm, monkeypatch):
    """A leak of each request adds up in every batch; pages that the allocator takes once do not."""
    # Caches of earlier texts are kept up to this size, on purpose; the first requests fill it.
    monkeypatch.setattr(internals(served_llm).engine, "session_memory", 2**22)
    load(server, cold_llm, 30, seed=1)
    gc.collect()
    files, memory = len(os.listdir("/proc/self/fd")), [resident()]
    for batch in range(10):
        load(server, cold_llm, 6, seed=2 + batch)
        gc.collect()
        memory.append(resident())
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > files + 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    now = len(os.listdir("/proc/self/fd"))
    growth = [after - before for before, after in itertools.pairwise(memory)]
    print(f"{files} open files before, {now} after; bytes of resident memory more by batch: {growth}")
    assert now <= files + 3
    assert sorted(growth)[4] < 16 * 2**20 // 10


def test_slow_readers_hold_nobody_up(start, cold_llm, monkeypatch):
    """A client that reads nothing is given up after a while; one that reads a byte at a time gets all of its answer."""
    monkeypatch.setattr(answers, "STALL_SECONDS", 0.5)
    server = start(limits=Limits(active=2))
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    # So much text that the buffers of both sides cannot hold it; with log-probabilities each token has a kilobyte.
    body = json.dumps({"prompt": "w1", "stream": True, "logprobs": 20, **LONG}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stalled = stack.enter_context(socket.socket())
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(address)
            stalled.sendall(raw_request(body))
        answer = server.post(prompt="w2", max_tokens=5)  # waits for neither of them for long
        assert answer.json()["choices"][0]["text"] == cold_llm.generate("w2", SamplingParams(max_tokens=5)).text
        with socket.create_connection(address, timeout=30) as slow:
            slow.sendall(raw_request(json.dumps({"prompt": "w1 w7", "max_tokens": 12, "stream": True}).encode()))
            received = b""
            while b"[DONE]" not in received:
                received += slow.recv(1)
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in received.splitlines() if b"data: {" in line
        )
        assert text == cold_llm.generate("w1 w7", SamplingParams(max_tokens=12)).text
        server.wait_idle()
