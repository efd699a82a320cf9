"""Parts of a benchmark, each in a process of its own: what crashes or hangs takes nothing else with it.

A kernel that reads where it must not leaves its whole process without a GPU, and one that waits for ever cannot be
interrupted. So each part runs in a child, which writes its result anew after every row; when a part fails or its time
is up, the rows that it has are kept beside the error. A part's first row may name those to come ("planned").
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# Seconds, at most, that a child gets beyond its own deadline, which it looks at between rows only.
GRACE = 15.0
TAIL = 2000  # characters of what a child wrote that are kept if it fails


def run_rows(name: str, rows: Callable[[], Iterable[dict[str, Any]]], path: Path, budget_s: float) -> dict[str, Any]:
    """Collect a part's rows, and write what there is after each.

    Args:
      name: of the part.
      rows: makes the rows, one after the other.
      path: of the result.
      budget_s: no row is begun after so many seconds.
    """
    start = time.monotonic()
    result: dict[str, Any] = {"part": name, "rows": [], "error": None, "stopped": None}
    try:
        for row in rows():
            result["rows"].append(row)
            _write(path, result, start)
            if time.monotonic() - start > budget_s:
                result["stopped"] = f"its {budget_s:.0f} s were over after {len(result['rows'])} rows"
                break
    except Exception as error:
        result["error"] = describe_error(error)
    _write(path, result, start)
    return result


def divide_slice(seconds: float) -> tuple[float, float]:
    """A part's budget, and the grace after it, which together are not more than its slice of the time."""
    grace = min(GRACE, seconds / 2)
    return seconds - grace, grace


def run_child(name: str, command: Sequence[str], path: Path, budget_s: float, grace_s: float = GRACE) -> dict[str, Any]:
    """Run a part in a process of its own; its result, or what there is of it.

    Args:
      name: of the part.
      command: writes the result to `path`, by `run_rows`.
      path: of the result.
      budget_s: the part's own deadline.
      grace_s: the process is ended so many seconds after it.
    """
    start = time.monotonic()
    path.unlink(missing_ok=True)
    problem = None
    # A session of its own: what the child has started ends with it, and leaves the GPU's memory.
    with subprocess.Popen(
        command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            _, words = child.communicate(timeout=budget_s + grace_s)
            if child.returncode:
                problem = f"ended with status {child.returncode}: {words[-TAIL:].strip()}"
        except subprocess.TimeoutExpired:
            problem = f"did not end within {budget_s + grace_s:.0f} s and was killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if problem is None and not path.is_file():
        problem = "wrote nothing"
    result = read_part(name, path)
    if problem is not None:
        result["error"] = problem
    result["seconds"] = time.monotonic() - start
    return result


def read_part(name: str, path: Path) -> dict[str, Any]:
    """The rows of a part until now."""
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    return {"part": name, "rows": [], "error": None, "stopped": None, "seconds": 0.0}


def describe_error(error: BaseException) -> str:
    """An error in a few lines: its type, its words, and where it came up."""
    place = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(place[-1].filename).name}:{place[-1].lineno})" if place else ""
    return f"{type(error).__name__}: {str(error).strip()[:600]}{where}"


def _write(path: Path, result: dict[str, Any], start: float) -> None:
    result["seconds"] = time.monotonic() - start
    write_whole(path, json.dumps(result, default=str))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a process that is ended leaves a whole one."""
    other = path.with_suffix(".part")
    other.write_text(text, encoding="utf-8")
    other.replace(path)


def list_unmeasured(part: dict[str, Any]) -> list[str]:
    """Names of the rows that a part planned and did not come to."""
    made = {row["name"] for row in part["rows"]}
    return [name for row in part["rows"] for name in row.get("planned", ()) if name not in made]
