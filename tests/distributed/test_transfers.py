"""Arrays between meshes in more than two processes, of which some have neither end."""

from pathlib import Path

from process_harness import run_processes

SCRIPT = Path(__file__).parent / "moving.py"


def test_three_processes_send_to_each_other():
    ended = run_processes([{}] * 3, limit_s=90, script=SCRIPT)
    assert [process.status for process in ended] == [0] * 3, "\n".join(p.err[-2000:] for p in ended)
    # Of 12 ways each process is at the end of 5, and all of them read every array.
    assert [int(process.out.split()[-1]) for process in ended] == [5 + 12] * 3
