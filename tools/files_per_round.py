"""The files of jaxspec whose functions a round enters, for each method: Python's profiler watches tiny random models.

With `--table` it prints the table of docs/architecture.md, with the words that the page has. A mark is "x"; "p" where
only a plain draft enters the file, "f" where only one does that takes in the target's hidden states.

A function counts from 8 lines on. Rounds are traced, dispatched and read while they are watched, so that functions
inside compiled programs count, too. Kernels, the store of programs and checkpoints do not.

    python tools/files_per_round.py [METHOD ...] [--files | --table]
"""

import argparse
import ast
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import ModelParams, Models, read_rounds
from jaxspec.methods.registry import METHODS, make_method
from jaxspec.models.config import ModelConfig
from jaxspec.models.features import NORMED, FeatureConfig
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, SharedEmbedding

FOLDER = Path(jaxspec.__file__).parent
LEFT_OUT = ("checkpoint/", "runtime/store/")
LONG = 8  # lines
ROUNDS = 12  # `auto` and `lookup` decode plainly at first
# SwiftSpec would measure its depth, and compile while nothing is watched. SWIFT would not draft for so small a model.
SETTINGS = {"swiftspec": {"depth": 4, "refill": 0}, "swift": {"adaptive": False, "length": 4}}
# The order of packages in the table.
ORDER = ("methods/", "methods/core/", "tree/", "sampling/", "models/", "runtime/")
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
TARGET = ModelConfig("llama", 3, 48, 96, 6, 3, 8, 101, max_context=256)
DRAFT = ModelConfig("llama", 1, 48, 96, 6, 3, 8, 101, max_context=256)
FED = ModelConfig(
    "llama", 1, 48, 96, 6, 3, 8, 101, max_context=256, shares_embedding=True,
    features=FeatureConfig(48, (1, NORMED), "added", own_head=False),
)  # fmt: skip


def is_long(code: CodeType) -> bool:
    """Whether a function has so many lines that a reader has to read it."""
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return bool(lines) and max(lines) - code.co_firstlineno + 1 >= LONG


@contextmanager
def watched() -> Iterator[set[str]]:
    """The files of `jaxspec` whose functions are entered meanwhile."""
    seen: set[CodeType] = set()
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)  # a method may compile in a thread
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(before)  # pyright: ignore[reportArgumentType]
        for code in seen:
            path = Path(code.co_filename)
            if path.is_relative_to(FOLDER) and is_long(code):
                name = path.relative_to(FOLDER).as_posix()
                found |= set() if name.startswith(LEFT_OUT) else {name}


def random_params(placement: Placement) -> Any:
    """Random weights of a model."""
    rng = np.random.default_rng(0)

    def make(shape: Any) -> jax.Array:
        return jax.device_put(rng.normal(size=shape.shape).astype(shape.dtype) / 8, shape.sharding)

    return jax.tree.map(make, placement.params())


def files_of(name: str, draft: ModelConfig = DRAFT) -> set[str]:
    """Files that a round of a method enters, relative to `jaxspec/`."""
    plan, method = plan_mesh(1), make_method(name, SETTINGS.get(name))
    target = Placement(TARGET, plan, np.dtype("float32"))
    shared = SharedEmbedding(target.cfg, target.weights) if draft.shares_embedding else None
    models = Models(target)
    if method.drafts:
        models = Models(target, Placement(draft, plan, np.dtype("float32"), shared_embedding=shared))
    params = ModelParams(random_params(models.target), models.draft and random_params(models.draft))
    jax.clear_caches()
    runner = method.bind(models, 128)
    state = None if runner.calibrated else runner.calibrate(params, None)
    prompt = np.array([3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5], np.int32)
    state = runner.resume(params, runner.start(0, state), prompt, 0)
    request = runner.place_request(SamplingParams(max_tokens=100), 0, len(prompt))
    with watched() as found:
        for _ in range(ROUNDS):
            state, round_, _ = runner.round(params, state, request, 1)
            runner.observe(state, read_rounds(round_))
    return found


def marks_of(name: str) -> dict[str, str]:
    """The mark of each file that a round of a method enters: "x", "p" or "f"."""
    plain, fed = files_of(name), files_of(name, FED)
    return {file: "x" if file in plain & fed else "p" if file in plain else "f" for file in sorted(plain | fed)}


def num_files(marks: Mapping[str, str]) -> int:
    """Files that a round with either kind of draft enters at most."""
    return max(sum(mark in kinds for mark in marks.values()) for kinds in ("xp", "xf"))


def table(found: Mapping[str, Mapping[str, str]], words: Mapping[str, str]) -> str:
    """A Markdown table of files by method, from the marks of each method.

    What to read in a file is said by `words`, or else by its docstring up to the first full stop or colon.
    """

    def place(file: str) -> tuple[int, str]:
        return max(at for at, folder in enumerate(ORDER) if file.startswith(folder)), file

    def begin(file: str) -> str:
        text = ast.get_docstring(ast.parse((FOLDER / file).read_text())) or ""
        return text.partition(".")[0].partition(":")[0]

    files = sorted({file for marks in found.values() for file in marks}, key=place)
    rows = [["file", "what to read there", *(f"`{name}`" for name in found)], ["---"] * (2 + len(found))]
    for file in files:
        own = (marks.get(file, "") for marks in found.values())
        rows.append([f"`jaxspec/{file}`", words.get(file) or begin(file), *own])
    rows.append(["", "files of a round", *(str(num_files(marks)) for marks in found.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows).replace("|  |", "| |").replace("|  |", "| |")


def read_table(page: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The marks of each method, and what to read in each file, from the table of a page."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    start = next(at for at, row in enumerate(rows) if row[:2] == ["file", "what to read there"])
    found: dict[str, dict[str, str]] = {name.strip("`"): {} for name in rows[start][2:]}
    words = {}
    for file, what, *marks in rows[start + 2 :]:
        if not file:  # the last row has the sums
            break
        name = file.strip("`").removeprefix("jaxspec/")
        words[name] = what
        for method, mark in zip(found, marks, strict=True):
            if mark:
                found[method][name] = mark
    return found, words


def main() -> None:
    """Print the number of files of each method, and their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], metavar="METHOD", help="all of them by default")
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--table", action="store_true", help="print a Markdown table")
    args = parser.parse_args()
    found = {}
    for name in args.methods or METHODS:
        marks = found[name] = marks_of(name)
        if not args.table:
            print(f"{name:10} {num_files(marks):3} files", flush=True)
        if args.files:
            print("".join(f"  {mark} {file}\n" for file, mark in marks.items()), end="")
    if args.table:
        print(table(found, read_table(PAGE.read_text())[1]))


if __name__ == "__main__":
    main()
