"""Seconds from a typed command to its first character, and their parts.

    python tools/bench_start.py [--runs 10] [--peer PYTHON] [--json FILE]

Every run is a process of its own: `jaxspec-decode` with the default model, its caches in a folder of the measurement.
Times of the parts come from further runs of the same command with stamps in it. `--peer` is a Python that has
llama-cpp-python; it answers the same question with the same file.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import environment_line, make_parser, make_table, write_report

QUESTION = "What is the capital of Japan?"
LONG = "Summarise this. " + " ".join(f"The train number {i} leaves at {i % 24}:15." for i in range(45))
PARTS = ("imports", "opening", "programs", "waiting for weights", "first token")

# The command with stamps. It imports first what the command would import; the order of all else is the command's own.
STAMPED = """
import gc, json, sys, time
gc.disable()
begun = time.perf_counter()
from jaxspec.cli import decode
import jaxspec.llm as llm
from jaxspec.engine import Engine
stamps = {"imports": time.perf_counter() - begun}
marks = {}

def wrap(owner, name, before=None, after=None):
    function = getattr(owner, name)
    def wrapped(*args, **options):
        if before: marks.setdefault(before, time.perf_counter())
        result = function(*args, **options)
        if after: marks.setdefault(after, time.perf_counter())
        return result
    setattr(owner, name, wrapped)

wrap(llm.LLM, "__init__", before="opening", after="loaded")
wrap(llm.OpenModels, "place", after="programs")
wrap(Engine, "prepare", after="waiting")
write = sys.stdout.write
def first(text):
    if text.strip() and "first" not in marks:
        marks["first"] = time.perf_counter()
        stamps.update({
            "opening": marks["programs"] - marks["opening"], "programs": marks["waiting"] - marks["programs"],
            "waiting for weights": marks["loaded"] - marks["waiting"], "first token": marks["first"] - marks["loaded"],
        })
        print(json.dumps(stamps), file=sys.stderr)
    return write(text)
sys.stdout.write = first
decode.main()
"""

PEER = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, verbose=False)
messages = [{"role": "user", "content": sys.argv[2]}]
for chunk in model.create_chat_completion(messages, max_tokens=8, temperature=0.0, stream=True):
    print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
"""


def main() -> None:
    """Measure, and print or write the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="warm runs of each row")
    parser.add_argument("--peer", help="a Python with llama-cpp-python")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="jaxspec-start-"))
    environment = os.environ | {"JAXSPEC_COMPILE_CACHE": str(folder)}
    try:
        rows = measure(options.runs, options.peer, folder, environment)
    finally:
        shutil.rmtree(folder)
    cells = []
    for name, seconds, parts in rows:
        middle, extremes = f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}"
        cells.append([name, middle, extremes, *(f"{parts[part]:.2f}" if parts else "" for part in PARTS)])
    print(f"{environment_line()}\n\n{make_table(['start', 'median', 'range', *PARTS], cells)}")
    write_report(options.json, rows=rows)


def measure(
    runs: int, peer: str | None, folder: Path, environment: dict[str, str]
) -> list[tuple[str, list[float], dict[str, float]]]:
    """Rows of the table: a name, seconds of each run, medians of the parts."""
    command = [sys.executable, "-m", "jaxspec", "decode", "-n", "8"]
    stamped = [sys.executable, "-c", STAMPED, "-n", "8"]

    def warm(text: str, count: int) -> tuple[list[float], dict[str, float]]:
        seconds = [first_character([*command, text], environment) for _ in range(count)]
        parts = [run_stamped([*stamped, text], environment) for _ in range(max(3, count // 2))]
        return seconds, {part: statistics.median(one[part] for one in parts) for part in PARTS}

    def anew(*names: str) -> None:
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)

    rows = [("cold, nothing compiled", [first_character([*command, QUESTION], environment)], {})]
    first_character([*command, QUESTION], environment)
    rows.append(("warm", *warm(QUESTION, runs)))
    rows.append(("warm, a prompt of 600 tokens", *warm(LONG, runs)))
    anew("ready", "weights")
    rows.append(
        ("after a change of version, JAX's own cache kept", [first_character([*command, QUESTION], environment)], {})
    )
    rows.append(("the start after that", [first_character([*command, QUESTION], environment)], {}))
    if peer:
        from jaxspec.checkpoint.shipped import default_model_path

        asked = [peer, "-c", PEER, str(default_model_path()), QUESTION]
        first_character(asked, environment)
        rows.append(("llama-cpp-python, same file", [first_character(asked, environment) for _ in range(runs)], {}))
    return rows


def first_character(command: list[str], environment: dict[str, str]) -> float:
    """Seconds until a command prints a character that is no space; RuntimeError where it fails."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        while not (character := process.stdout.read(1)).strip():
            if not character:
                raise RuntimeError(f"{command[:4]} printed nothing")
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{command[:4]} ended with {process.returncode}")
    return seconds


def run_stamped(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds of the parts of one start."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(next(line for line in done.stderr.splitlines() if line.startswith("{")))


if __name__ == "__main__":
    main()
