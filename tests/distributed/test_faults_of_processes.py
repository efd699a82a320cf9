"""A process that fails, dies, hangs, is interrupted or is another ends all of them, with one clear message in each."""

import shutil
import signal
from pathlib import Path

import pytest
from distributed_pair import write_pair
from harness import Commands, on_request, run_processes

SPEC = {"devices": 1, "prompt": [3, 4, 5], "samplings": [{"max_tokens": 200, "ignore_eos": True}]}
LIMIT_S = 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return [str(path) for path in write_pair(tmp_path_factory.mktemp("pair"))]


@pytest.fixture
def decode(pair, tmp_path):
    """Start decoding in several processes; `models` are those of each."""

    def start(count=2, models=None):
        words = ["decode", "-n", "240", "--ignore-eos", "--raw", "--method", "ar", "--model"]
        return Commands(tmp_path, *([*words, (models or pair[:1] * count)[number], "w3 w4"] for number in range(count)))

    return start


def test_another_checkpoint_ends_all_processes(pair, decode, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(pair[0], other)
    change(max(other.rglob("*"), key=lambda file: file.stat().st_size))
    with decode(models=[pair[0], str(other)]) as commands:
        statuses, seconds = commands.await_end(200)
        for number in (0, 1):
            assert "error: processes differ in settings: the model is " in commands.error(number)
            assert "Traceback" not in commands.error(number) and commands.output(number) == ""
    assert statuses == [1, 1]


def change(file: Path) -> None:
    """Flip a bit of the file's first weight; its size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@on_request
def test_other_settings_end_all_processes(pair):
    loads = [[{"model": pair[0], "method": [name, {}], "methods": []}] for name in ("ar", "lookup")]
    ended = run_processes([SPEC | {"loads": load} for load in loads], limit_s=90)
    for process in ended:
        assert process.status != 0
        assert "processes differ in settings: method is Autoregressive" in process.err


@on_request
@pytest.mark.parametrize("fault", ["die", "hang"])
@pytest.mark.slow
def test_a_lost_process_ends_the_other(pair, fault):
    loads = [{"model": pair[0], "method": ["ar", {}], "methods": [["ar", {}]]}]
    spec = SPEC | {"loads": loads, "fault_timeout": 5}
    ended = run_processes([spec, spec | {"fault": fault}], limit_s=90)
    assert ended[0].status == 1
    assert "process 1" in ended[0].err and ("is gone" if fault == "die" else "hangs") in ended[0].err
    assert ended[1].status != 0


@on_request
def test_process_0_is_killed(decode):
    with decode(count=3) as commands:
        commands.await_log("step")
        commands.processes[0].kill()
        statuses, seconds = commands.await_end(LIMIT_S)
        errors = [commands.error(number) for number in (1, 2)]
    assert statuses == [-signal.SIGKILL, 1, 1]
    for number, error in enumerate(errors, 1):
        ours = f"jaxspec: error: process 0, which the others meet at, is gone; process {number} ends, too\n"
        assert error.endswith(ours) and "stack trace" not in error


@on_request
def test_an_interrupt_of_all_keeps_the_text(decode):
    with decode() as commands:
        commands.await_text()
        for process in commands.processes:
            process.send_signal(signal.SIGINT)
        statuses, seconds = commands.await_end(LIMIT_S)
        assert commands.output(1) == ""
        assert "Traceback" not in commands.error(0) + commands.error(1)
        assert commands.log(0) == commands.log(1)
    print(f"ended after {seconds:.1f} s")
    assert statuses == [130, 130]


@on_request
@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_while_loading_ends_the_others(decode, number):
    with decode() as commands:
        commands.await_log("prepare")
        commands.processes[number].send_signal(signal.SIGINT)
        statuses, seconds = commands.await_end(LIMIT_S)
        assert f"process {number} failed: it was interrupted" in commands.error(1 - number)
    print(f"ended after {seconds:.1f} s")
    assert statuses[number] == 130 and statuses[1 - number] == 1
