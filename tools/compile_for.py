"""Compile the programs of methods for a GPU or TPU that is not there, and count what makes a round slow.

    pip install 'jaxspec-decode[gpu-compile]'        # or [tpu-compile]
    python tools/compile_for.py h100 [--devices 1] [--methods ar,specexec] [--weights q4_0] [--list]
    python tools/compile_for.py v5e:2x2 --methods swiftspec --draft-devices 2

XLA's compilers need no device: they are told what it is like. Each program is compiled for the Llama-3-8B geometry and
a 1B draft in bfloat16 or in blocks, with two and with three layers, so that the difference is what a layer takes.
Nothing is tuned, since nothing can be timed: a product may take other kernels on a device. A TPU runs a program as one
module, with its loops and branches, whose bodies count once.

  waits        loops and branches on data outside of CUDA graphs, for each of which the host waits in every turn; on a
               TPU, transfers to or from the host
  on data      all loops and branches on data
  launches     CUDA graphs and what else the host launches, in order
  kernels      launches outside of loops; "a layer" is what one more layer of target and draft adds
  copies       copies of a whole layer of a cache
  collectives  operations between devices outside of loops, and their bytes; "a layer" as for kernels
  spills       bytes of registers that a kernel keeps in memory, the most of any; by ptxas
  shared       bytes of shared memory of a kernel, the most of any
  memory       bytes for what a program computes on the way: with packed weights, far less than their numbers
  largest      bytes and shape of the largest array that is written, outside of a TPU's core; no cache (`--json`)
  arguments    bytes on a device of what a program is given, weights and caches, by the compiler's account (`--json`)
"""

import argparse
import collections
import dataclasses
import glob
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from compiled_text import assemble, count_text, read_memory, read_thunks

TARGET, DRAFT, TOKENS = "llama-3-8b", "llama-3.2-1b", 1024
LAYERS = (2, 3)
PACKAGES = ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")
# Programs of a round. The others run once a text.
ONCE = ("create", "begin", "rewind", "restart", "prefill", "skip")
# A given depth: else SwiftSpec times passes before it declares the programs of a round.
METHODS: dict[str, dict[str, Any]] = {
    "ar": {}, "lookup": {}, "chain": {}, "specexec": {}, "specinfer": {}, "swiftspec": {"depth": 3}, "swift": {},
    "auto": {},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GPU:
    """Description of a GPU for the compiler: JAX's name of it, and the fields of XLA's target configuration.

    Attributes:
      kind: JAX's name.
      capability: compute capability.
      multiprocessors: number of them.
      shared: bytes of shared memory that a block may ask for.
      shared_in_all: bytes of a multiprocessor.
      cache: bytes of the second-level cache.
      bandwidth: bytes per second.
      memory: bytes.
    """

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    shared_in_all: int
    cache: int
    bandwidth: int
    memory: int

    def describe(self) -> str:
        """XLA's target configuration. Without versions of driver and runtime, calls and branches fall out of graphs."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_in_all} threads_per_core_limit: 2048
              core_count: {self.multiprocessors} fpus_per_core: 128
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache} clock_rate_ghz: 1.98
              device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 9 patch: 0 }} device_description_str: "{self.kind}"
        """


# By the kind of TPU that JAX names before the colon: extents of the chips that make its smallest description.
TPU_KINDS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 233472, 50 << 20, 3_350_000_000_000, 80_000_000_000),
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 167936, 40 << 20, 2_039_000_000_000, 80_000_000_000),
}


def is_tpu(device: str) -> bool:
    """Whether a device's name is that of TPUs, such as v5e:2x2."""
    return device.partition(":")[0] in TPU_KINDS


def find_problem(device: str) -> str | None:
    """The package that compiling for a device lacks, or None."""

    def is_missing(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            return True

    packages, extra = (("libtpu",), "tpu-compile") if is_tpu(device) else (PACKAGES, "gpu-compile")
    missing = [name for name in packages if is_missing(name)]
    return f"not installed: {', '.join(missing)}; pip install 'jaxspec-decode[{extra}]'" if missing else None


def main() -> None:
    """Compile, print a table, and write the numbers if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help=f"{', '.join(GPUS)}, or chips of a TPU: {', '.join(TPU_KINDS)}, as in v5e:2x2")
    parser.add_argument("--devices", type=int, default=1, help="that share the target's weights, and the draft's [1]")
    parser.add_argument("--draft-devices", type=int, default=0, help="of the draft alone, after the target's [none]")
    parser.add_argument("--target", default=TARGET, help=f"geometry, of configs/models [{TARGET}]")
    parser.add_argument("--draft", default=DRAFT, help=f"the same of the draft [{DRAFT}]")
    parser.add_argument(
        "--block", type=int, default=0, help="rows of a draft that fills a block, as wide as the target"
    )
    parser.add_argument("--markov", type=int, default=0, help="rank of its correction by the token before, as DSpark's")
    parser.add_argument("--eagle", action="store_true", help="a draft that is an EAGLE-3 head as wide as the target")
    parser.add_argument("--experts", type=int, default=0, help="of a mixture in the target's place, two for each token")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"capacity of the caches [{TOKENS}]")
    parser.add_argument("--set", action="append", default=[], help="NAME=NUMBER, a setting of the methods")
    parser.add_argument("--kernels", default="auto", choices=("auto", "mosaic-tpu"), help="of a TPU [auto]")
    parser.add_argument("--exact", action="store_true", help="with exact numerics")
    parser.add_argument("--sum", action="store_true", help="products and their sums over devices in one kernel")
    parser.add_argument("--sampled", action="store_true", help="for sampled requests instead of greedy ones")
    parser.add_argument("--methods", default=",".join(METHODS), help="by comma [all]")
    parser.add_argument("--weights", default="bfloat16", help="a dtype or a block format, such as q4_0 [bfloat16]")
    parser.add_argument("--list", action="store_true", help="below each row the kernels of a layer, by name")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    chosen = arguments.methods.split(",")
    if unknown := [name for name in chosen if name not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    if arguments.device not in GPUS and not is_tpu(arguments.device):
        parser.error(f"unknown device {arguments.device!r}; known: {', '.join((*GPUS, *TPU_KINDS))}, as in v5e:2x2")
    if problem := find_problem(arguments.device):
        sys.exit(problem)
    count = arguments.devices + arguments.draft_devices
    devices = make_devices(arguments.device, count)
    if len(devices) < count:
        parser.error(f"{arguments.device} has {len(devices)} devices, {count} are asked for")
    from jaxspec.models.quantization import WEIGHT_TYPES

    if arguments.weights not in WEIGHT_TYPES:
        parser.error(f"unknown weights {arguments.weights!r}; known: {', '.join(WEIGHT_TYPES)}")
    rows = []
    print(HEAD)
    for name in chosen:
        for row in count_method(name, devices, arguments):
            rows.append(row)
            print(render_row(row), flush=True)
            for line in row["layer"] if arguments.list else ():
                print(f"    {line}", flush=True)
    if arguments.json:
        result = {
            "device": devices[0].device_kind, "devices": arguments.devices, "draft_devices": arguments.draft_devices,
            "weights": arguments.weights, "rows": rows,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def make_devices(device: str, count: int) -> Sequence[Any]:
    """Devices to compile for, which cannot run anything; a TPU's chips may be more."""
    if is_tpu(device):
        return make_tpu_devices(device)
    gpu = GPUS[device]
    # Before JAX starts: it would look for a GPU, and XLA would time its choices on one.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), "--xla_gpu_autotune_level=0")))
    compiler = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert compiler is not None and compiler.submodule_search_locations is not None
    os.environ["PATH"] = os.pathsep.join((f"{compiler.submodule_search_locations[0]}/bin", os.environ["PATH"]))
    import jax
    from jax._src import xla_bridge
    from jax.experimental import topologies

    jax.devices()
    canonicalize = xla_bridge.canonicalize_platform
    # JAX knows a platform only if it has a device of it.
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else canonicalize(name)
    topology = topologies.get_topology_desc(platform="cuda", target_config=gpu.describe(), topology=f"1x1x{count}")
    return topology.devices


def make_tpu_devices(topology: str) -> Sequence[Any]:
    """The chips of a TPU by XLA's name of them, such as v5e:2x2."""
    # libtpu looks for a TPU's host and locks the machine otherwise.
    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    for name, value in {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def count_method(name: str, devices: Sequence[Any], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each program of a method's round."""
    from jaxspec.methods.registry import make_method

    settings = METHODS[name] | {key: int(value) for key, _, value in (each.partition("=") for each in arguments.set)}
    found = [
        {
            program.name: count_program(program, arguments.sampled)
            for program in list_programs(make_method(name, settings), devices, layers, arguments)
        }
        for layers in LAYERS
    ]
    for program, fewer in found[0].items():
        more = found[1][program]
        yield fewer | {
            "method": name, "program": program, "kernels_a_layer": more["kernels"] - fewer["kernels"],
            "collectives_a_layer": more["collectives"] - fewer["collectives"],
            "crossing_a_layer": more["crossing"] - fewer["crossing"],
            "arguments_a_layer": more["arguments"] - fewer["arguments"],
            "products_a_layer": more["products"] - fewer["products"],
            "by_kind_a_layer": dict(collections.Counter(more["kinds"]) - collections.Counter(fewer["kinds"])),
        }  # fmt: skip


def list_programs(method: Any, devices: Sequence[Any], layers: int, arguments: argparse.Namespace) -> list[Any]:
    """Programs of a round, for models of so many layers whose weights are all of one type."""
    import jax.numpy as jnp

    from jaxspec.methods.core.round import Models
    from jaxspec.models.experts import ExpertsConfig
    from jaxspec.models.features import FeatureConfig
    from jaxspec.models.presets import load_preset
    from jaxspec.models.quantization import Storage, fit_storage, number_tables
    from jaxspec.runtime.mesh import MeshPlan
    from jaxspec.runtime.placement import Placement, SharedEmbedding

    kernels = dataclasses.replace(choose_kernels(arguments, devices[0]), exact=arguments.exact)
    others_kernels = kernels
    if arguments.sum:
        kernels = dataclasses.replace(kernels, implementations=(*kernels.implementations, ("linear_sum", "mosaic")))
    plan = MeshPlan(tuple(devices[: arguments.devices]), kernels)
    others = devices[arguments.devices :][: arguments.draft_devices]

    def place(preset: str, layers: int, plan: MeshPlan) -> Placement:
        cfg = dataclasses.replace(load_preset(preset), num_layers=layers)
        return Placement(cfg, plan, jnp.dtype(jnp.bfloat16), storage=choose_storage(cfg))

    def choose_storage(cfg: Any) -> Storage:
        storage = fit_storage(Storage(arguments.weights), cfg, plan.tensor)
        return number_tables(storage, cfg, "bfloat16") if is_tpu(arguments.device) else storage

    def place_fed(target: Placement, layers: int) -> Placement:
        # Five states of the target, as published heads of Qwen3 take; three for EAGLE.
        features = FeatureConfig(
            target.cfg.embed_dim, (0, 0, 1, 1, 2), "block", own_head=False, block=arguments.block,
            first_row=0 if arguments.markov else 1, markov_rank=arguments.markov,
        ) if arguments.block else FeatureConfig(target.cfg.embed_dim, (0, 1, 2))  # fmt: skip
        shared = SharedEmbedding(target.cfg, target.weights)
        cfg = dataclasses.replace(target.cfg, num_layers=layers, tied=False, shares_embedding=True, features=features)
        return Placement(cfg, plan, jnp.dtype(jnp.bfloat16), storage=choose_storage(cfg), shared_embedding=shared)

    target, draft = place(arguments.target, layers, plan), None
    if arguments.experts:
        experts = ExpertsConfig(arguments.experts, 2, target.cfg.mlp_dim)
        target = dataclasses.replace(target, cfg=dataclasses.replace(target.cfg, experts=experts))
    if method.drafts and (arguments.block or arguments.eagle):
        draft = place_fed(target, layers - 1)
    elif method.drafts:
        draft = place(arguments.draft, layers - 1, MeshPlan(tuple(others), others_kernels) if others else plan)
    models = Models(target, draft)
    # Some methods put data on their devices when they are bound, which devices that are not there cannot take.
    with mock.patch("jax.device_put", describe_arrays):
        programs = method.bind(models, arguments.tokens).programs
    return [program for program in programs if not any(word in program.name for word in ONCE)]


def choose_kernels(arguments: argparse.Namespace, device: Any) -> Any:
    """The kernels that are chosen for a device by name where all of them pass their check."""
    from pallas_kernels import selection
    from pallas_kernels.registry import Kernels

    if is_tpu(arguments.device):
        with mock.patch.object(selection, "find_failure", lambda *_: None):
            return selection.choose(arguments.kernels, "tpu", 1, device)
    gpu = GPUS[arguments.device]
    # What `auto` chooses where all kernels pass their check, and those that are for "pallas-triton" alone.
    usable = tuple(
        (operation, candidate)
        for operation, candidates in (selection.SETS["pallas-triton"] | selection.SETS["auto"]).items()
        for candidate in candidates
        if selection.find_obstacle(candidate, gpu.capability) is None
    )
    return Kernels(
        "pallas-triton", "gpu", implementations=usable, automatic=True, capability=gpu.capability,
        device_kind=gpu.kind, multiprocessors=gpu.multiprocessors,
    )  # fmt: skip


def describe_arrays(values: Any, sharding: Any) -> Any:
    """Shapes and dtypes in the place of arrays on a device."""
    import jax
    import numpy as np

    def describe(value: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(value)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(describe, values)


def count_program(program: Any, sampled: bool = False) -> dict[str, Any]:
    """Compile a program for greedy or for sampled requests, and count."""
    from jaxspec.config import SamplingParams
    from jaxspec.runtime.program import choose_options
    from jaxspec.sampling.processors import GREEDY, find_variant

    start, variant = time.monotonic(), GREEDY
    if sampled:
        variant = find_variant(SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1))
    lowered = program.lower(program.fit(variant))
    if program.plan.kernels.platform == "tpu":
        compiled = lowered.compile(compiler_options=choose_options(program.plan))
        counts = count_text(compiled.as_text(), nested=True)
        return counts | {
            "waits": counts["transfers"], "launched": ["module"], "compile_s": time.monotonic() - start, "spills": 0,
            "shared": 0, "assembled": [], "spilling": {}, **read_memory(compiled),
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = choose_options(program.plan) or {}
        compiled = lowered.compile(compiler_options=options | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        kernels = [kernel for file in glob.glob(f"{folder}/*.ptx") for kernel in assemble(Path(file))]
        (thunks,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        host = thunks.read_text(encoding="utf-8")
    launched, free = read_thunks(host)
    # What a kernel declares, and what it is launched with.
    shared = [kernel["shared"] for kernel in kernels] + [
        int(size) for size in re.findall(r"shared_memory: (\d+)", host)
    ]
    exact = {
        (kernel["name"].rstrip("_0123456789"), kernel["registers"], kernel["shared"])
        for kernel in kernels
        if "exact" in kernel["name"]
    }
    names = {kernel["name"] for kernel in kernels if "attention" in kernel["name"] or "jaxspec" in kernel["name"]}
    counts = {"compile_s": time.monotonic() - start, **count_text(compiled.as_text()), **read_memory(compiled)}
    return counts | {
        "waits": counts["on_data"] if free else [], "launched": launched, "shared": max(shared, default=0),
        "spills": max((kernel["spills"] for kernel in kernels), default=0),
        "assembled": sorted(names), "exact": sorted(exact),
        "spilling": {kernel["name"]: kernel["spills"] for kernel in kernels if kernel["spills"]},
    }  # fmt: skip


HEAD = (
    "| method | program | waits | on data | launches | kernels a layer | copies | collectives a layer | spills "
    "| shared | memory |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def render_row(row: dict[str, Any]) -> str:
    """A row as a line of Markdown."""
    waits, kinds = ", ".join(row["waits"]) or "none", collections.Counter(row["launched"])
    launched = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    cells = (
        row["method"], row["program"], waits, len(row["on_data"]), launched, row["kernels_a_layer"], row["copies"],
        row["collectives_a_layer"], row["spills"], row["shared"], row["memory"],
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
