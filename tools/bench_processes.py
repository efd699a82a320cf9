"""Host time of SwiftSpec's rounds in one process and with draft and target in different processes, on CPUs.

    python tools/bench_processes.py MODEL DRAFT [--tokens 200] [--repeats 3]

Each setting decodes the same prompt of token ids greedily; tokens must agree. Columns: the time of a round from read to
read, the host's time to dispatch one, and the time that the host waits for its result; medians, in milliseconds. Then,
of one more text under a timeline: the time of a round's transfers between target and draft, from dispatch or the end of
what made them to their arrival, and the share of tree growth that lies within verification.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import jaxspec
from jaxspec.engine import Session
from jaxspec.llm import internals
from jaxspec.methods.core.round import Models
from jaxspec.runtime import hosts
from jaxspec.trace.events import DRAFT, TARGET, TRANSFERS
from jaxspec.trace.timeline import Timeline

PROMPT = [3, 4, 5, 6, 7, 8] * 3
SETTINGS = {
    "one process": (1, None),
    "two processes, target in process 0": (2, 1),
    "two processes, draft in process 0": (2, 0),
}


def main() -> None:
    """Measure every setting, or be one of its processes."""
    parser = argparse.ArgumentParser(description="Host time of rounds in one and in two processes")
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        measure(given, json.loads(given.child))
        return
    print("| where | round | dispatch | wait | transfers | overlap | tokens per pass |\n" + "|---" * 7 + "|")
    texts = []
    for name, (count, draft_process) in SETTINGS.items():
        found = start(count, draft_process)
        texts.append(found["tokens"])
        times = " | ".join(f"{found[column]:.2f}" for column in ("round", "dispatch", "wait", "transfers"))
        print(f"| {name} | {times} | {found['overlap']:.2f} | {found['length']:.2f} |", flush=True)
    if any(text != texts[0] for text in texts):
        sys.exit("the tokens differ")


def start(count: int, draft_process: int | None) -> dict:
    """Run one setting; returns what process 0 measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2" if count == 1 else "1"}
    running = []
    for process in range(count):
        where = None
        if count > 1:
            where = {"coordinator": f"127.0.0.1:{port}", "num_processes": count, "process_id": process}
            where["draft_process"] = draft_process
        command = [sys.executable, *sys.argv, "--child", json.dumps(where)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    outs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"a process ended with status {[process.returncode for process in running]}")
    return json.loads(outs[0].splitlines()[-1])


def measure(given: argparse.Namespace, where: dict | None) -> None:
    """Decode in one of the processes, and print what process 0 measured."""
    method = jaxspec.SwiftSpec(depth=4, refill=1)
    llm = jaxspec.LLM(given.model, draft=given.draft, method=method, distributed=where, session_memory=0)
    if where is not None and where["process_id"]:
        llm.follow()  # the texts that are timed
        with Timeline(internals(llm).models) as timeline:
            llm.follow()
        merge(timeline, internals(llm).models)
        return
    rounds: list[float] = []
    dispatch: list[float] = []
    wait: list[float] = []
    timed = {"round": rounds, "dispatch": dispatch, "wait": wait}
    step, launch = Session.step, Session._launch_round

    def timed_launch(self, *args):
        begin = time.perf_counter()
        result = launch(self, *args)
        dispatch.append(time.perf_counter() - begin)
        return result

    def timed_step(self):
        begin, launched = time.perf_counter(), len(dispatch)
        output = step(self)
        rounds.append(time.perf_counter() - begin)
        wait.append(rounds[-1] - sum(dispatch[launched:]))
        return output

    Session.step, Session._launch_round = timed_step, timed_launch  # pyright: ignore[reportAttributeAccessIssue]
    sampling = jaxspec.SamplingParams(max_tokens=given.tokens, ignore_eos=True)
    tokens = None
    for repeat in range(given.repeats + 1):
        tokens = llm.generate(PROMPT, sampling).token_ids
        if repeat == 0:
            for samples in timed.values():
                samples.clear()
    medians = {name: 1e3 * statistics.median(samples) for name, samples in timed.items()}
    length = given.repeats * given.tokens / len(rounds)
    hosts.end_commands()
    with Timeline(internals(llm).models) as timeline:
        llm.generate(PROMPT, sampling)
        hosts.end_commands()
    merge(timeline, internals(llm).models)
    summary = timeline.summary()
    assert summary.transfer_s is not None
    medians |= {"transfers": 1e3 * summary.transfer_s, "overlap": summary.overlap}
    print(json.dumps(medians | {"length": length, "tokens": tokens}))


def merge(timeline: Timeline, models: Models) -> None:
    """Give process 0's timeline the times of what ran in other processes of this machine, which share its clock."""
    assert models.draft is not None
    plans = {TARGET: models.target.plan, DRAFT: models.draft.plan}
    holders = {row: plan.devices[0].process_index for row, plan in plans.items()}
    told = hosts.gather("timeline", [(mark.row, mark.name, mark.dispatched, mark.end) for mark in timeline._marks])
    for number, mark in enumerate(timeline._marks):
        # A transfer has ended where it arrives.
        holder = holders[mark.name.rpartition(">")[2] if mark.row == TRANSFERS else mark.row]
        row, name, mark.dispatched, mark.end = told[holder if len(told) > 1 else 0][number]
        assert (row, name) == (mark.row, mark.name)


if __name__ == "__main__":
    main()
