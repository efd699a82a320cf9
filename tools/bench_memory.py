"""Peak memory of a start, and memory afterwards: a process of its own loads a model, answers once, and is watched.

    python tools/bench_memory.py [--model FILE] [--draft none] [--method auto] [--context 256] [--json FILE]

Linux only. Each start runs in a new process. `RssAnon` is memory that the process wrote; mapped files (libraries, and
weights that are kept beside the compiled programs) can be dropped by the system, and are shown apart. A first start
compiles; the second one finds programs and weights ready. The compile cache is a temporary folder.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# Of /proc/self/status, in kB.
FIELDS = {"VmHWM": "peak", "VmRSS": "now", "RssAnon": "written", "RssFile": "mapped files"}
EVERY_S = 0.01


def main() -> None:
    """Measure a first and a second start, and print both."""
    if "--child" in sys.argv:
        model, draft, method, context = json.loads(sys.argv[-1])
        print(json.dumps(watch_start(model, draft, method, context)))
        return
    # Only here: a child's memory must not hold what the benchmarks import.
    from harness import environment_line, make_parser, make_table, write_report

    parser = make_parser(__doc__)
    parser.add_argument("--model", help="checkpoint; the default model if not given")
    parser.add_argument("--draft", help="checkpoint of a draft model, or none")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    options = parser.parse_args()
    asked = json.dumps([options.model, options.draft, options.method, options.context])
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAXSPEC_COMPILE_CACHE": folder}
        starts = {name: run_child(asked, environment) for name in ("first start", "second start")}
    print(environment_line())
    for name, start in starts.items():
        sizes = {part: start[part] for part in ("file", "weights", "caches") if start[part] is not None}
        print(f"\n{name}: " + ", ".join(f"{part} {size:.0f} MB" for part, size in sizes.items()) + "\n")
        phases = start["phases"].items()
        rows = [[phase, *(f"{found.get(field, 0.0):.0f}" for field in FIELDS.values())] for phase, found in phases]
        print(make_table(["MB", *FIELDS.values()], rows))
    write_report(options.json, starts=starts)


def run_child(asked: str, environment: dict[str, str]) -> dict[str, Any]:
    """The numbers of one start in a process of its own."""
    command = [sys.executable, __file__, "--child", asked]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def watch_start(model: str | None, draft: str | None, method: str, context: int) -> dict[str, Any]:
    """Load, answer, and note memory in MB before, at the most, after loading and after an answer."""
    import numpy as np

    import jaxspec
    from jaxspec.llm import internals

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
    llm = jaxspec.LLM(model, draft=draft, method=method)
    phases["loaded"], phases["most while loading"] = read_memory(), dict(most)
    most.clear()
    vocab = internals(llm).target.cfg.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, context).tolist()
    llm.generate(prompt, jaxspec.SamplingParams(max_tokens=64, ignore_eos=True))
    phases["after an answer"], phases["most while answering"] = read_memory(), dict(most)
    ended.set()
    watcher.join()
    return {
        "file": llm.model_path.stat().st_size / 1e6 if llm.model_path.is_file() else None,
        "weights": sum(map(count_bytes, filter(None, internals(llm).params))) / 1e6,
        "caches": sum(idle.num_bytes for idle in internals(llm).engine._idle) / 1e6,
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


if __name__ == "__main__":
    main()
