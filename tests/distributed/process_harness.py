"""Start processes that share a model, and read their output."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# JAX's cache has a limit of size where there are several processes, and then writes nothing into a folder that holds
# programs which JAX kept without a limit, as it does for the other tests.
CACHE = {"JAXSPEC_COMPILE_CACHE": os.path.join(os.environ["JAXSPEC_COMPILE_CACHE"], "several")}
CHILD = Path(__file__).parent / "child.py"
COMMAND = Path(__file__).parent / "command.py"


@dataclasses.dataclass
class Ended:
    """Status and output of a process that has ended."""

    status: int
    out: str
    err: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(specs: list[dict[str, Any]], limit_s: float = 240, script: Path = CHILD) -> list[Ended]:
    """Run one process for each spec of a script; those that are left after `limit_s` seconds are ended."""
    environment = os.environ | CACHE | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    port, start = free_port(), time.monotonic()
    running = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                json.dumps(spec | {"process": number, "processes": len(specs), "port": port}),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )  # fmt: skip
        for number, spec in enumerate(specs)
    ]
    ended = []
    try:
        for process in running:
            out, err = process.communicate(timeout=max(1.0, limit_s - (time.monotonic() - start)))
            ended.append(Ended(process.returncode, out, err, time.monotonic() - start))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended


def results(ended: Ended) -> list[tuple[str, list[list[int]]]]:
    """Names of methods and their tokens, as process 0 printed them."""
    return [tuple(json.loads(line)) for line in ended.out.splitlines() if line.startswith('["')]


class Commands:
    """A command in several processes, which are ended with the block; what each of them ran is in `log`."""

    def __init__(self, folder: Path, *words: list[str]):
        """Start one process for each list of words, in `folder`."""
        count = len(words)
        variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        self._folder = folder
        where = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count)]
        self.processes = []
        for number in range(count):
            begin = [sys.executable, str(COMMAND), str(folder / f"log{number}"), *words[number]]
            with open(folder / f"err{number}", "wb") as err, open(folder / f"out{number}", "wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        [*begin, *where, "--process-id", str(number)],
                        stdout=out,
                        stderr=err,
                        stdin=subprocess.DEVNULL,
                        env=os.environ | CACHE | variables,
                    )  # fmt: skip
                )

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, number: int) -> list[str]:
        """The programs that the engine of a process has run."""
        file = self._folder / f"log{number}"
        return file.read_text().splitlines() if file.exists() else []

    def output(self, number: int) -> str:
        return (self._folder / f"out{number}").read_text()

    def error(self, number: int) -> str:
        return (self._folder / f"err{number}").read_text()

    def await_log(self, text: str, number: int = 0, after: int = 0, limit_s: float = 200) -> None:
        """Until a process has run what a text describes, after so many lines of its log."""
        self._await(lambda: self.log(number)[after:], text, limit_s)

    def await_line(self, text: str, number: int = 0, limit_s: float = 200) -> str:
        """The first line with a text that a process writes to standard error."""
        return self._await(lambda: self.error(number).splitlines(), text, limit_s)

    def await_text(self, limit_s: float = 200) -> None:
        """Until process 0 has printed a word."""
        self._await(lambda: [self.output(0)], "w", limit_s)

    def _await(self, read: Callable[[], list[str]], text: str, limit_s: float) -> str:
        end = time.monotonic() + limit_s
        while (found := next((line for line in read() if text in line), None)) is None:
            errors = "".join(self.error(number) for number in range(len(self.processes)))
            assert time.monotonic() < end, f"no {text!r} within {limit_s} s: {errors}"
            assert all(process.poll() is None for process in self.processes), errors
            time.sleep(0.05)
        return found

    def await_end(self, limit_s: float = 60) -> tuple[list[int], float]:
        """The statuses with which the processes end, and how many seconds that took."""
        start = time.monotonic()
        return [process.wait(limit_s) for process in self.processes], time.monotonic() - start
