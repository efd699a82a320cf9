"""Peak memory of a start, and memory afterwards: a process of its own loads a model, answers once, and is watched.

    python tools/bench_memory.py [--model FILE] [--draft none] [--method auto] [--context 256] [--json FILE]

Linux only. Each start runs in a new process. `RssAnon` is memory that the process wrote; mapped files (libraries, and
weights that are kept beside the compiled programs) can be dropped by the system, and are shown apart. A first start
compiles; the second one finds programs and weights ready. The compile cache is a temporary folder.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Of /proc/self/status, in kB.
FIELDS = {"VmHWM": "peak", "VmRSS": "now", "RssAnon": "written", "RssFile": "mapped files"}
EVERY_S = 0.01


def main() -> None:
    """Measure a first and a second start, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint; the default model if not given")
    parser.add_argument("--draft", help="checkpoint of a draft model, or none")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(watch_start(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAXSPEC_COMPILE_CACHE": folder}
        starts = {name: run_child(environment) for name in ("first start", "second start")}
    print_report(starts)
    if arguments.json:
        arguments.json.write_text(json.dumps(starts, indent=1) + "\n")


def run_child(environment: Mapping[str, str]) -> dict[str, Any]:
    """The numbers of one start in a process of its own."""
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def watch_start(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load, answer, and note memory in MB before, at the most, after loading and after an answer."""
    import numpy as np

    import jaxspec

    phases = {"imported": read_memory()}
    most: dict[str, float] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for name, megabytes in read_memory().items():
                most[name] = max(most.get(name, 0.0), megabytes)
            time.sleep(EVERY_S)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    llm = jaxspec.LLM(arguments.model, draft=arguments.draft, method=arguments.method)
    phases["loaded"], phases["most while loading"] = read_memory(), dict(most)
    most.clear()
    vocab = llm.engine.target.cfg.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, arguments.context).tolist()
    llm.generate(prompt, jaxspec.SamplingParams(max_tokens=64, ignore_eos=True))
    phases["after an answer"], phases["most while answering"] = read_memory(), dict(most)
    ended.set()
    watcher.join()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "file": llm.model_path.stat().st_size / 1e6 if llm.model_path.is_file() else None,
        "weights": sum(map(count_bytes, filter(None, llm.model_params))) / 1e6,
        "caches": sum(idle.num_bytes for idle in llm.engine._idle) / 1e6,
        "phases": phases,
    }


def count_bytes(params: Any) -> int:
    """Bytes of a model's arrays, each counted once."""
    import jax

    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(params)}.values())


def read_memory() -> dict[str, float]:
    """MB of this process, by the names in `FIELDS`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    split = (line.split() for line in lines)
    return {FIELDS[words[0][:-1]]: int(words[1]) / 1e3 for words in split if words and words[0][:-1] in FIELDS}


def print_report(starts: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of each start, in MB."""
    for name, start in starts.items():
        sizes = {part: start[part] for part in ("file", "weights", "caches") if start[part] is not None}
        table = Table(title=f"{name}: " + ", ".join(f"{part} {size:.0f} MB" for part, size in sizes.items()))
        for column in ("MB", *FIELDS.values()):
            table.add_column(column, justify="left" if column == "MB" else "right")
        for phase, found in start["phases"].items():
            table.add_row(phase, *(f"{found.get(field, 0.0):.0f}" for field in FIELDS.values()))
        Console().print(table)


if __name__ == "__main__":
    main()
