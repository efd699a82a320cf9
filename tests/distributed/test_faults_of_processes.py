"""A process that fails, is killed, is interrupted or has other files ends all of them."""

import shutil
import signal
from pathlib import Path

import pytest
from process_harness import Commands, run_processes

SPEC = {"devices": 1, "prompt": [3, 4, 5], "samplings": [{"max_tokens": 200, "ignore_eos": True}]}
LIMIT_S = 60


@pytest.fixture
def decode(pair, tmp_path):
    """Start decoding in several processes; `models` are those of each."""

    def start(count=2, models=None):
        words = ["decode", "-n", "240", "--ignore-eos", "--raw", "--method", "ar", "--model"]
        return Commands(tmp_path, *([*words, (models or pair[:1] * count)[number], "w3 w4"] for number in range(count)))

    return start


@pytest.mark.thorough
def test_another_checkpoint_ends_all_processes(pair, decode, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(pair[0], other)
    change(max(other.rglob("*"), key=lambda file: file.stat().st_size))
    with decode(models=[pair[0], str(other)]) as commands:
        statuses, _ = commands.await_end(200)
        for number in (0, 1):
            assert "error: processes differ in settings: the model is " in commands.error(number)
            assert "Traceback" not in commands.error(number) and commands.output(number) == ""
    assert statuses == [1, 1]


def change(file: Path) -> None:
    """Flip a bit of the file's first weight; its size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_killed_worker_ends_process_0(pair):
    loads = [{"model": pair[0], "method": ["ar", {}], "methods": [["ar", {}]]}]
    spec = SPEC | {"loads": loads, "fault_timeout": 5}
    ended = run_processes([spec, spec | {"dies": True}], limit_s=120)
    assert ended[0].status != 0 and ended[1].status == -signal.SIGKILL
    assert "another task died" in ended[0].err or "another process is lost" in ended[0].err


@pytest.mark.slow
def test_a_killed_process_0_ends_all_workers(decode):
    with decode(count=3) as commands:
        commands.await_log("step")
        commands.processes[0].kill()
        statuses, _ = commands.await_end(LIMIT_S)
        errors = [commands.error(number) for number in (1, 2)]
    assert statuses[0] == -signal.SIGKILL and 0 not in statuses
    assert all("another task died" in error or "another process is lost" in error for error in errors)


@pytest.mark.slow
def test_an_interrupt_of_all_keeps_the_text(decode):
    with decode() as commands:
        commands.await_text()
        for process in commands.processes:
            process.send_signal(signal.SIGINT)
        statuses, _ = commands.await_end(LIMIT_S)
        assert commands.output(1) == ""
        assert "Traceback" not in commands.error(0) + commands.error(1)
        assert commands.log(0) == commands.log(1)
    assert statuses == [130, 130]


@pytest.mark.slow
def test_an_interrupt_of_process_0_while_it_loads_ends_the_others(decode):
    with decode() as commands:
        commands.await_log("prepare")
        commands.processes[0].send_signal(signal.SIGINT)
        statuses, _ = commands.await_end(LIMIT_S)
    assert statuses[0] == 130 and statuses[1] != 0
