"""Input of a hostile or unlucky user: files, templates, values, signals. Only its own errors may come.

    python tools/fuzz_hostile.py [--seconds 60] [--areas templates,gguf] [--first 0] [--cases 0]

A case is made from its number. The cases of an area run in processes of their own, some at a time. A case fails on any
exception but jaxspec's own, an error of more than one line, a warning, anything printed, a crash, or a hang. The tool
prints the failure and the command that repeats it, and ends with 1. A few seconds of each area, always the same, are
part of the tests (tests/tools/test_fuzz_hostile.py).

  seconds   how long to go on; areas take turns
  areas     templates, tokenizers, gguf, native, values, processes [all]
  first     number of the first case
  cases     so many cases of each area, whatever the time
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

AREAS = {
    "templates": "fuzz.templates",
    "tokenizers": "fuzz.tokenizers",
    "gguf": "fuzz.gguf_files",
    "native": "fuzz.native_files",
    "values": "fuzz.values",
    "processes": "fuzz.processes",
}
BATCH = {"templates": 100, "tokenizers": 200, "gguf": 300, "native": 100, "values": 300, "processes": 6}
CASE_SECONDS = 90.0  # a case that takes longer hangs: the limits of templates and tokenizers are seconds


class CaseError(Exception):
    """A case failed; the message says how."""


def main() -> None:
    """Run until the time is over, and say how many cases passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--areas", default=",".join(AREAS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the child's own flag
    arguments = parser.parse_args()
    areas = arguments.areas.split(",")
    if unknown := set(areas) - AREAS.keys():
        parser.error(f"unknown areas {', '.join(sorted(unknown))}; known: {', '.join(AREAS)}")
    if arguments.here:
        sys.exit(run_here(areas[0], arguments.first, arguments.cases))
    started, passed, refused = time.monotonic(), dict.fromkeys(areas, 0), dict.fromkeys(areas, 0)
    try:
        while True:
            for area in areas:
                count = arguments.cases or BATCH[area]
                refused[area] += run_child(area, arguments.first + passed[area], count)
                passed[area] += count
                print(f"{time.monotonic() - started:6.0f} s  {area}: {passed[area]} cases", flush=True)
                if not arguments.cases and time.monotonic() - started > arguments.seconds:
                    return
            if arguments.cases:
                return
    except CaseError as error:
        sys.exit(str(error))
    finally:
        total, seconds = sum(passed.values()), time.monotonic() - started
        found = {area: f"{passed[area]} cases, {refused[area]} refused" for area in areas}
        print(f"{total} cases without a finding in {seconds:.0f} s: {found}", flush=True)


def run_child(area: str, first: int, count: int) -> int:
    """Run cases in a process of its own; how many were refused. CaseError: one failed."""
    command = [sys.executable, __file__, "--here", "--areas", area, "--first", str(first), "--cases", str(count)]
    # Panics of Rust print a backtrace where this is set, as a user's machine may have it.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RUST_BACKTRACE": "1"})
    lines = done.stdout.splitlines()
    started = [line for line in lines if line.startswith("case ")]
    number = started[-1].split()[1] if started else first
    repeat = f"python tools/fuzz_hostile.py --areas {area} --first {number} --cases 1"
    if done.returncode:
        raise CaseError(f"{area}: ends with {done.returncode}: {done.stderr[-3000:]}\nrepeat: {repeat}")
    return json.loads(lines[-1])["refused"]


def run_here(area: str, first: int, count: int) -> int:
    """Run cases in this process, and say which; the exit status."""
    module, refused = importlib.import_module(AREAS[area]), 0
    errors = os.fdopen(os.dup(2), "w")  # a case that hangs has standard error elsewhere
    for number in range(first, first + count):
        print(f"case {number}", flush=True)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True, file=errors)
        try:
            refused += run_case(module, number)
        except CaseError as error:
            print(error, file=sys.stderr)
            return 1
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"refused": refused}), flush=True)
    return 0


def run_case(module: object, number: int) -> bool:
    """Run a case; whether jaxspec refused it. CaseError: it failed."""
    from jaxspec.errors import JaxspecError

    folder = Path(tempfile.mkdtemp(prefix="jaxspec-fuzz-"))
    try:
        with _silence(), warnings.catch_warnings():
            warnings.simplefilter("error")
            module.run(random.Random(number), folder)  # pyright: ignore[reportAttributeAccessIssue]
    except JaxspecError as error:
        if len(str(error).splitlines()) != 1 or not str(error).isprintable():
            raise CaseError(f"case {number}: a message that is not one printable line: {str(error)!r}") from error
        return True
    except CaseError as error:
        raise CaseError(f"case {number}: {error}") from error
    except BaseException as error:  # a panic of Rust is no Exception
        raise CaseError(f"case {number}: {''.join(traceback.format_exception(error))}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return False


@contextlib.contextmanager
def _silence():
    """CaseError where anything is printed, also by a library past Python's streams."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            printed = file.read().decode("utf-8", "replace")
            if printed.strip():
                raise CaseError(f"printed: {printed[-2000:]}")


if __name__ == "__main__":
    main()
