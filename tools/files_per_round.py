"""The files of jaxspec whose functions a round enters, for each method: Python's profiler watches tiny random models.

A function counts from 8 lines on. Rounds are traced, dispatched and read while they are watched, so that functions
inside compiled programs count, too. Kernels, the store of programs and checkpoints do not.

    python tools/files_per_round.py [METHOD ...] [--files]
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import ModelParams, Models, read_rounds
from jaxspec.methods.registry import METHODS, make_method
from jaxspec.models.config import ModelConfig
from jaxspec.models.features import NORMED, FeatureConfig
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, SharedEmbedding

FOLDER = Path(__file__).parents[1] / "jaxspec"
LEFT_OUT = ("checkpoint/", "runtime/store/")
LONG = 8  # lines
ROUNDS = 12  # `auto` and `lookup` decode plainly at first
# SwiftSpec would measure its depth, and compile while nothing is watched.
SETTINGS = {"swiftspec": {"depth": 4, "refill": 0}}
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
    try:
        yield found
    finally:
        sys.setprofile(before)
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
    params = ModelParams(*(model and random_params(model) for model in models))
    jax.clear_caches()
    runner = method.bind(models, 128)
    state = None if runner.calibrated else runner.calibrate(params, None)
    prompt = np.array([3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5], np.int32)
    state = runner.prefill(params, runner.start(int(prompt[-1]), state), prompt[:-1])
    request = runner.place_request(SamplingParams(max_tokens=100), 0, len(prompt))
    with watched() as found:
        for _ in range(ROUNDS):
            state, round_, _ = runner.round(params, state, request, 1)
            runner.observe(state, read_rounds(round_))
    return found


def main() -> None:
    """Print the number of files of each method, and their names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], metavar="METHOD", help="all of them by default")
    parser.add_argument("--files", action="store_true", help="list the files")
    args = parser.parse_args()
    for name in args.methods or METHODS:
        plain, fed = files_of(name), files_of(name, FED)
        print(f"{name:10} {len(plain):3} files, {len(fed)} with a draft that is fed hidden states", flush=True)
        if args.files:
            print("  " + "\n  ".join(sorted(plain | fed)))


if __name__ == "__main__":
    main()
