"""Find the fastest block sizes of the Triton kernels on this GPU, and write them into pallas_kernels/tuned/.

    python tools/tune_kernels.py [--operations tree_attention,linear] [--minutes 45] [--folder FOLDER] [--smoke]

Every shape of tools/kernel_bench/cases.py is timed with the heuristic's block sizes and with those beside them, by the
profiler's device time: a few sizes at a time, the others as they were best so far, because each candidate is compiled.
The shapes that programs run most come first.

One table per operation holds the winners by device kind; other kinds' rows in it stay. A shape keeps the heuristic
unless something is faster by more than `MARGIN`. What cannot be compiled or run is passed over, and named at the end.
When the time is up, what was found until then is written.

`--smoke` takes tiny shapes in Pallas' interpreter and two candidates each: that the tool works. It writes nothing
unless a folder is given.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernel_bench.cases import Case, list_cases
from kernel_bench.device import name_device
from kernel_bench.kernels import bind, find_implementations
from kernel_bench.parts import describe_error
from kernel_bench.timing import time_calls
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pallas_kernels.linear import Blocks
from pallas_kernels.linear import config as linear_config
from pallas_kernels.linear.blocks import PLANES
from pallas_kernels.linear.planes import find_planes
from pallas_kernels.registry import Kernels
from pallas_kernels.tree_attention import config as attention_config

# A table should not hold what noise has won.
MARGIN = 0.03
# Calls that one timing is the mean of.
CALLS, SMOKE_CALLS = 20, 2
# T, by how much of decoding they are: a tree, a plain step, wider trees, and what drafts grow by.
ROWS = (8, 1, 16, 64, 4, 32, 2)


@dataclasses.dataclass(frozen=True)
class Operation:
    """How an operation is tuned.

    Attributes:
      table: file of the winners.
      bucket: the table's row of a case.
      default: the heuristic's block sizes for a case on a device kind with given kernels.
      steps: each gives the block sizes to try beside the best so far.
      call: a case's function with given block sizes.
    """

    table: Path
    bucket: Callable[[Case], str]
    default: Callable[[str, Kernels, Case], Any]
    steps: tuple[Callable[[Case, Any], Iterator[Any]], ...]
    call: Callable[[Case, Any], Any]


class Stop(Exception):
    """Nothing more can be tuned, and why."""


def main() -> None:
    """Tune, write the tables, say what was won."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="by comma [all]")
    parser.add_argument("--minutes", type=float, default=45.0, help="time for all of them [45]")
    parser.add_argument("--folder", type=Path, help="where the tables go [pallas_kernels/tuned]")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on any device, in seconds")
    arguments = parser.parse_args()
    chosen = arguments.operations.split(",")
    if unknown := [name for name in chosen if name not in OPERATIONS]:
        parser.error(f"unknown operation {unknown[0]!r}; known: {', '.join(OPERATIONS)}")
    console, kind = Console(stderr=True), name_device()
    deadline = time.monotonic() + 60 * arguments.minutes
    for name in chosen:
        operation = OPERATIONS[name]
        usable, missing = find_implementations(name, arguments.smoke)
        if "pallas-triton" not in usable:
            sys.exit(f"{name}: {missing['pallas-triton']}")
        found, failures = tune(name, usable["pallas-triton"], kind, deadline, arguments.smoke, console)
        if arguments.folder or not arguments.smoke:
            folder = arguments.folder or operation.table.parent
            write_table(folder / operation.table.name, kind, found)
        for line in failures:
            console.print(line, markup=False, highlight=False)
        console.print(f"{name}: {len(found)} shapes are faster with other block sizes than the heuristic's")


def tune(
    name: str, kernels: Kernels, kind: str, deadline: float, smoke: bool, console: Console
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Winners by row of the table, and what could not be timed.

    Args:
      name: of the operation.
      kernels: Pallas' Triton kernels.
      kind: the device.
      deadline: of `time.monotonic`.
      smoke: see the module.
      console: shows the progress.
    """
    operation, cases = OPERATIONS[name], {}
    for case in list_cases(name, smoke, ROWS):
        cases.setdefault(operation.bucket(case), case)
    found: dict[str, dict[str, int]] = {}
    failures: list[str] = []
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))

        def measure(case: Case, sizes: Any) -> float:
            if time.monotonic() > deadline:
                raise Stop(f"{case.name}: the time is up")
            progress.update(task, description=f"{case.name} {dataclasses.astuple(sizes)}")
            try:
                function = bind(operation.call(case, sizes), kernels)
                timing = time_calls(function, case.copies(1 if smoke else None), SMOKE_CALLS if smoke else CALLS)
            except Exception as error:
                failures.append(f"{case.name} {sizes}: {describe_error(error)}")
                return math.inf
            # A clock around a loop counts gaps between launches, which are none of the kernel's.
            if timing.method != "trace" and not smoke:
                raise Stop(f"{case.name} {sizes}: not timed by the profiler; nothing is tuned by a clock")
            return timing.seconds

        try:
            for bucket, case in cases.items():
                default = operation.default(kind, kernels, case)
                best = tune_case(operation, case, default, functools.partial(measure, case), 2 if smoke else None)
                if best != default:
                    found[bucket] = dataclasses.asdict(best)
                progress.advance(task)
        except Stop as stop:
            failures.append(str(stop))
    return found, failures


def tune_case(
    operation: Operation, case: Case, default: Any, measure: Callable[[Any], float], most: int | None = None
) -> Any:
    """The fastest block sizes for a case, or `default` unless others are faster by more than `MARGIN`.

    Args:
      operation: its steps say what is tried.
      case: see there.
      default: block sizes.
      measure: seconds with some block sizes; infinite where these fail.
      most: block sizes to try at most.
    """
    seconds = {default: measure(default)}
    for step in operation.steps:
        for sizes in step(case, min(seconds, key=seconds.__getitem__)):
            if sizes not in seconds and (most is None or len(seconds) < most):
                seconds[sizes] = measure(sizes)
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - MARGIN) * seconds[default] else default


def write_table(path: Path, kind: str, found: dict[str, dict[str, int]]) -> None:
    """Put a device kind's winners into a table; other kinds, and rows that were not won anew, stay."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    table[kind] = dict(sorted((table.get(kind, {}) | found).items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _attention_sizes(case: Case) -> tuple[int, int, int, int]:
    slots = case.state[0].shape[1]
    return case.sizes["T"], case.sizes["G"], case.sizes["H"], slots


def _attention_extra(case: Case) -> dict[str, int]:
    return {"kv_heads": case.sizes["K"], "itemsize": case.state[0].dtype.itemsize}


def _attention_bucket(case: Case) -> str:
    return attention_config.bucket(*_attention_sizes(case), **_attention_extra(case))


def _attention_default(kind: str, kernels: Kernels, case: Case) -> attention_config.Config:
    return attention_config.choose(kind, kernels.multiprocessors, *_attention_sizes(case), **_attention_extra(case))


def _attention_tiles(case: Case, best: attention_config.Config) -> Iterator[attention_config.Config]:
    for block_k, warps in itertools.product((32, 64, 128), (4, 8)):
        yield dataclasses.replace(best, block_k=block_k, warps=warps)


def _attention_parts(case: Case, best: attention_config.Config) -> Iterator[attention_config.Config]:
    slots = case.state[0].shape[1]
    for splits in (best.splits // 2, best.splits * 2, best.splits * 4):
        if splits and splits * best.block_k <= slots:
            yield dataclasses.replace(best, splits=splits)


def _attention_rows(case: Case, best: attention_config.Config) -> Iterator[attention_config.Config]:
    most = attention_config.power_of_two(case.sizes["T"] * case.sizes["G"])
    for block_q in (best.block_q // 2, best.block_q * 2):
        if 16 <= block_q <= min(most, 128):
            yield dataclasses.replace(best, block_q=block_q)


def _stages(case: Case, best: Any) -> Iterator[Any]:
    for stages in (best.stages - 1, best.stages + 1):
        if stages:
            yield dataclasses.replace(best, stages=stages)


def _attention_call(case: Case, sizes: attention_config.Config) -> Any:
    from pallas_kernels.tree_attention import triton

    def attend(operands: Any, state: Any) -> Any:
        qkv, cos, sin, length, mask, position = operands
        key, value = state
        heads, key, value = triton.tree_attention(
            qkv, cos, sin, key, value, length, mask, position,
            offset=None, sliding_window=None, active_rows=None, config=sizes,
        )  # fmt: skip
        return heads, (key, value)

    return attend


def _linear_format(case: Case) -> str:
    return next(name for name in PLANES if name.removesuffix("_planes") == case.model.rpartition(" ")[2])


def _linear_sizes(case: Case) -> tuple[str, int, int, int]:
    name, data = _linear_format(case), case.operands[1]
    layout = find_planes(name)
    assert layout is not None
    return name, case.sizes["T"], data.shape[0], data.shape[1] * layout.codes


def _linear_tiles(case: Case, best: linear_config.Config) -> Iterator[linear_config.Config]:
    for block_o, warps in itertools.product((32, 64, 128), (4, 8)):
        yield dataclasses.replace(best, block_o=block_o, warps=warps)


def _linear_parts(case: Case, best: linear_config.Config) -> Iterator[linear_config.Config]:
    _, _, _, code_bytes = _linear_sizes(case)
    for splits in (best.splits // 2, best.splits * 2):
        if splits and splits * best.step <= code_bytes:
            yield dataclasses.replace(best, splits=splits)


def _linear_steps(case: Case, best: linear_config.Config) -> Iterator[linear_config.Config]:
    for step in (best.step // 2, best.step * 2):
        yield dataclasses.replace(best, step=step)


def _linear_call(case: Case, sizes: linear_config.Config) -> Any:
    from pallas_kernels.linear import triton

    name = _linear_format(case)

    def project(operands: Any, state: Any) -> Any:
        x, data = operands
        return triton.linear(x, Blocks(data, name), sizes), state

    return project


OPERATIONS = {
    "tree_attention": Operation(
        attention_config.TABLE,
        _attention_bucket,
        _attention_default,
        (_attention_tiles, _attention_parts, _attention_rows, _stages),
        _attention_call,
    ),
    "linear": Operation(
        linear_config.TABLE,
        lambda case: linear_config.bucket(*_linear_sizes(case)),
        lambda kind, _, case: linear_config.choose(kind, *_linear_sizes(case)),
        (_linear_tiles, _linear_parts, _linear_steps, _stages),
        _linear_call,
    ),
}

if __name__ == "__main__":
    main()
