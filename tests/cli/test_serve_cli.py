"""`jaxspec-serve` as a process: its address, its errors, its end."""

import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest


def test_usage_errors_come_before_the_model_is_loaded(command, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command("serve", "--model", tmp_path / "none", "--port", taken.getsockname()[1])
    assert done.status == 2 and "is in use by another process" in done.err and len(done.err.splitlines()) == 1
    for words, message in (
        (("--session-memory", "2X"), "--session-memory must be a number of bytes"),
        (("--host", "192.0.2.1", "--port", "0"), "cannot listen at 192.0.2.1"),
        (("--api-key", ""), "API key is empty"),
        (("--method", "nothing"), "nothing"),
    ):
        done = command("serve", "--model", tmp_path / "none", *words)
        assert done.status == 2 and message in done.err, done.err


@pytest.fixture
def serving(tiny_model):
    """Start a server; gives the process and its address."""
    started = []

    def start(*words):
        arguments = ("-m", "jaxspec", "serve", "--model", tiny_model, "--method", "ar", "--port", "0", *words)
        process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if "live view at" in line:
                return process, line.split()[-1]
        raise AssertionError("the server did not start")

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_signal_lets_answers_finish(serving):
    process, url = serving()
    body = {"prompt": "w1 w2", "max_tokens": 60, "ignore_eos": True, "stream": True}
    assert httpx.get(f"{url}v1/models").json()["data"][0]["id"] == "model"
    with httpx.stream("POST", f"{url}v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(20) == 0
