"""Whole rounds of methods on large geometries with random weights: wall time, busy time of the GPU, and its idle share.

    python tools/kernel_bench/rounds.py NAME [--smoke]

prints a line of JSON for each measurement of one configuration, as it is made. `measure_rounds` runs each
configuration in a process of its own, since XLA's flags hold for a process.

Random models agree on no token. So the walk is told how many drafted tokens to accept: everything is computed as in a
real round, and only its decision is replaced.

The profiler sees one turn of a loop that lies in a CUDA graph. So busy time and idle share hold only where XLA's own
graphs are used, which have no loops.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# Draft tokens of SpecExec, and the most rounds of plain decoding that a round may take: written down before any ran.
SPECEXEC_RATIOS = {128: 4.0, 512: 7.0, 2048: 20.0}
TARGET, DRAFT = "llama-3-8b", "llama-3.2-1b"
PREFIX = 512
ACCEPTED = (0, 2, 4)
WARM_ROUNDS, TIMED_ROUNDS, TRACED_ROUNDS = 6, 24, 8
# A path of four tokens: a random draft finds all tokens as likely, and grows level by level.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("ar", {}),
    "specexec": ("specexec", {"num_draft_tokens": 16, "width": 4, "branch": 2, "depth": 5}),
    "swiftspec": ("swiftspec", {"num_draft_tokens": 15, "width": 8, "branch": 2, "depth": 2}),
    "chain": ("chain", {"num_draft_tokens": 4}),
} | {
    # Levels of up to 64 nodes with two children each: 7, 10 and 22 draft passes.
    f"specexec {budget}": ("specexec", {"num_draft_tokens": budget, "width": 64, "branch": 2, "depth": 32})
    for budget in SPECEXEC_RATIOS
}
# Names the option that jaxspec sets for GPUs, and so leaves it as XLA has it: no loops in CUDA graphs.
XLA_GRAPHS = "--xla_gpu_enable_command_buffer=+FUSION"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The rounds to be measured in one process.

    Attributes:
      method: a name in `METHODS`.
      kernels: as users pass it.
      flags: of XLA, beside those that jaxspec sets.
      exact: products at the highest precision, or else at XLA's default, which says which kernels XLA takes.
      accepted: drafted tokens of a round that are accepted; one measurement each.
    """

    method: str
    kernels: str = "auto"
    flags: str = ""
    exact: bool = True
    accepted: tuple[int, ...] = ACCEPTED
    draft_platform: str | None = None  # of the draft's devices, if it is not the target's


# What decides comes first.
CONFIGURATIONS = {
    "plain": Configuration("plain", accepted=(0,)),
    "specexec": Configuration("specexec"),
    "swiftspec": Configuration("swiftspec"),
    "swiftspec, draft on the CPU": Configuration("swiftspec", accepted=(2,), draft_platform="cpu"),
    **{name: Configuration(name, accepted=(4,)) for name in METHODS if name.startswith("specexec ")},
    "chain": Configuration("chain", accepted=(2,)),
    "plain, default precision": Configuration("plain", exact=False, accepted=(0,)),
    "specexec, default precision": Configuration("specexec", exact=False, accepted=(2,)),
    "plain, XLA's graphs": Configuration("plain", flags=XLA_GRAPHS, accepted=(0,)),
    "specexec, XLA's graphs": Configuration("specexec", flags=XLA_GRAPHS, accepted=(2,)),
    "swiftspec, XLA's graphs": Configuration("swiftspec", flags=XLA_GRAPHS, accepted=(2,)),
    "plain, xla": Configuration("plain", "xla", accepted=(0,)),
    "plain, mosaic": Configuration("plain", "mosaic", accepted=(0,)),
    # With the kernels that "auto" waits for a measurement of.
    "plain, pallas-triton": Configuration("plain", "pallas-triton", accepted=(0,)),
    "specexec, pallas-triton": Configuration("specexec", "pallas-triton", accepted=(2,)),
}


def measure_rounds(smoke: bool = False, names: Sequence[str] = tuple(CONFIGURATIONS)) -> Iterator[dict[str, Any]]:
    """The work to be measured, then one row per configuration and number of accepted tokens; see `run`."""
    names = names[:3] if smoke else names
    yield {"name": "rounds", "planned": [f"rounds, {name}" for name in names]}
    # Programs that configurations share are compiled once: most have the same draft.
    cache = Path(tempfile.mkdtemp())
    for name in names:
        command = [sys.executable, str(Path(__file__)), name, *(["--smoke"] if smoke else [])]
        flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), CONFIGURATIONS[name].flags)))
        paths = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))
        environment = (
            os.environ
            | {"PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(cache)}
            | ({"XLA_FLAGS": flags} if flags else {})
        )
        with tempfile.TemporaryFile("w+") as words:
            with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=words, env=environment) as child:
                for line in child.stdout or ():
                    if line.startswith("{"):
                        yield json.loads(line)
            words.seek(0)
            tail = words.read()[-1500:]
        # Its own name, so that what was planned counts as measured.
        yield {"name": f"rounds, {name}"} | (
            {"error": f"ended with status {child.returncode}: {tail}"} if child.returncode else {}
        )


def run(name: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Rows of one configuration: seconds of a round and of the GPU's work in it, launches, copies to the host, tokens.

    Args:
      name: in `CONFIGURATIONS`.
      smoke: tiny models and few rounds.
    """
    import jax
    import jax.numpy as jnp

    from jaxspec.engine import Engine
    from jaxspec.methods.core.round import ModelParams, Models
    from jaxspec.methods.registry import make_method
    from jaxspec.models.presets import load_preset
    from jaxspec.runtime.mesh import plan_mesh
    from jaxspec.runtime.placement import Placement
    from kernel_bench.device import name_device
    from kernel_bench.steps import TINY, random_params
    from pallas_kernels.linear import reference

    setting = CONFIGURATIONS[name]
    method, options = METHODS[setting.method]
    configs = (TINY, TINY) if smoke else (load_preset(TARGET), load_preset(DRAFT))
    dtype = jnp.dtype(jnp.float32 if smoke else jnp.bfloat16)
    plan = plan_mesh(kernels="xla" if smoke else setting.kernels)
    draft_plan = plan
    if setting.draft_platform is not None:
        draft_plan = plan_mesh(platform=setting.draft_platform)
    elif len(jax.devices()) > 1 and not smoke:
        draft_plan = plan_mesh(1, 1, kernels=setting.kernels)  # a second GPU is the draft's, as in use
    target, draft = Placement(configs[0], plan, dtype), Placement(configs[1], draft_plan, dtype)
    params = ModelParams(random_params(target), random_params(draft) if setting.method != "plain" else None)
    prompt = [int(token) for token in jax.random.randint(jax.random.key(0), (32 if smoke else PREFIX,), 0, 200)]
    for accepted in setting.accepted[:2] if smoke else setting.accepted:
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(accept_always(accepted))
            if not setting.exact:
                stack.enter_context(mock.patch.object(reference, "PRECISION", None))
            engine = Engine(Models(target, draft), make_method(method, options), 192 if smoke else 1024)
            engine.prepare()
            row = {"name": f"rounds, {name}, {accepted} accepted", "device": name_device(), "model": TARGET}
            row |= dataclasses.asdict(setting) | {"accepted": accepted, "compile_s": time.monotonic() - start}
            yield row | time_rounds(engine, params, prompt, smoke)
        engine = None


def time_rounds(engine: Any, params: Any, prompt: Sequence[int], smoke: bool) -> dict[str, Any]:
    """Medians of a few rounds in the middle of a text: seconds, tokens, and what the profiler saw of the GPU."""
    from jaxspec.config import SamplingParams

    warm, timed, traced = (2, 3, 2) if smoke else (WARM_ROUNDS, TIMED_ROUNDS, TRACED_ROUNDS)
    with engine.open(params, prompt, SamplingParams(max_tokens=(100 if smoke else 400), ignore_eos=True), 0) as session:
        for _ in range(warm):
            session.step()
        samples, tokens = [], 0
        for _ in range(timed):
            start = time.perf_counter()
            tokens += len(session.step().tokens)
            samples.append(time.perf_counter() - start)
        seen = trace_rounds(session, traced)
    # The mean: rounds are read late, so that a long one's time may show in the next.
    seconds = sum(samples) / len(samples)
    busy = seen["busy_s"]
    return {
        "seconds": seconds, "slowest": max(samples), "tokens": tokens / timed,
        "seconds_per_token": sum(samples) / tokens, "idle": None if not busy else max(0.0, 1 - busy / seconds), **seen,
    }  # fmt: skip


def trace_rounds(session: Any, rounds: int) -> dict[str, Any]:
    """Seconds of a round in which the first GPU did anything, things that it did, and its copies to the host."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(rounds):
                session.step()
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = [] if not files else list(jax.profiler.ProfileData.from_file(str(files[0])).planes)
        events = list_events(planes)
    busy = measure_union([(start, end) for _, start, end in events]) * 1e-9
    copies = sum("MemcpyD2H" in name for name, _, _ in events)
    return {"busy_s": busy / rounds, "launches": len(events) / rounds, "copies_to_host": copies / rounds}


def list_events(planes: Sequence[Any]) -> list[tuple[str, float, float]]:
    """Name, start and end in nanoseconds of all that the streams of the first GPU did."""
    return [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in planes
        if plane.name == "/device:GPU:0"
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def measure_union(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans: two streams that work at the same time count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextlib.contextmanager
def accept_always(count: int) -> Iterator[None]:
    """Programs that are traced meanwhile accept `count` drafted tokens in each round, or as many as a path has."""
    import jax.numpy as jnp

    from jaxspec.sampling import accept
    from jaxspec.tree.tree import ancestor_matrix

    rule = accept.match_rule

    @functools.wraps(rule)
    def decide_by_count(logits: Any, batch: Any, request: Any, position: Any, vocab: Any) -> Any:
        decide = rule(logits, batch, request, position, vocab)
        place = jnp.arange(batch.rows)
        goal = jnp.argmax(jnp.minimum(batch.depth, count))
        on_way = ancestor_matrix(batch.parent, batch.rows - 1)[goal] & (batch.parent != place)

        def decide_row(row: Any, history: Any) -> Any:
            found = decide(row, history)
            below = on_way & (batch.parent == row[..., None])
            child = jnp.argmax(below, axis=-1).astype(jnp.int32)
            goes_on = below.any(axis=-1) & (batch.depth[row] < count)
            token, child = jnp.where(goes_on, batch.token[child], found.token), jnp.where(goes_on, child, -1)
            return found._replace(token=token, child=child)

        return decide_row

    with mock.patch.object(accept, "match_rule", decide_by_count):
        yield


def main() -> None:
    """Measure one configuration."""
    from kernel_bench.bare import stand_in

    stand_in()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONFIGURATIONS)
    parser.add_argument("--smoke", action="store_true", help="tiny models on any device")
    arguments = parser.parse_args()
    for row in run(arguments.name, arguments.smoke):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
