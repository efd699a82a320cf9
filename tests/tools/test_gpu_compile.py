"""Compiling for a GPU without one: how compiled text is read, and, with the extra, what the programs are like."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_compile
import pytest

from jaxspec.runtime import program

MODULE = """HloModule jit_draft

%body.1 (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  ROOT %t = (s32[]) tuple(%p)
}

ENTRY %main.2 (a: bf16[8,1088,128]) -> bf16[8,1088,128] {
  %a = bf16[8,1088,128]{2,1,0} parameter(0)
  %copy.1 = bf16[8,1088,128]{2,1,0} copy(%a)
  %fusion.1 = f32[8]{0} fusion(%copy.1), kind=kLoop, metadata={op_name="jit(draft)/add"}
  %call.1 = (f32[8]{0}, f32[8]{0}) custom-call(%fusion.1), custom_call_target="__gpu$xla.gpu.triton"
  %call.2 = (s32[], s32[], s32[], s32[], s32[], /*index=5*/s32[]) custom-call(%a), custom_call_target="__gpu$x"
  %while.1 = (s32[]) while(%t.0), body=%body.1, backend_config={"known_trip_count":{"n":"17"}}
  %while.2 = (s32[]) while(%t.1), body=%body.1, metadata={op_name="jit(draft)/draft/grow/while"}
  ROOT %bitcast.1 = bf16[8,1088,128]{2,1,0} bitcast(%copy.1)
}
"""
THUNKS = """000: kCommandBuffer [source | next=047 (1)]
    001: kCustomKernel [source | sink] fusion
    002: kWhile [prev=001]
047: kWhile [prev=000 (1)]
condition:
    000: kCommandBuffer [source | sink]
    003: kConditional [source]
048: kGemm [sink]
"""
# Launches of one more layer. The commit is one more for all layers.
MOST_KERNELS = {"decode": 9, "verify": 10, "draft": 10}
# The same with weights in blocks, by the format.
MOST_PACKED_KERNELS = {"decode": 9, "verify": 9, "draft": 10}
# Bytes that a program of packed weights computes on the way; a layer's gate and up projections alone are 66 MB in
# q4_0, and 235 MB in bfloat16. Most are the logits of a tree.
MOST_MEMORY = 18 << 20
# Bytes, in the growth of SwiftSpec's tree for an H100; none elsewhere.
MOST_SPILLS = 16


def test_what_a_program_holds():
    counts = gpu_compile.count_text(MODULE)
    assert counts["on_data"] == ["draft/grow/while"] and len(counts["loops"]) == 1
    assert counts["kinds"] == {"copy": 1, "fusion": 1, "__gpu$xla.gpu.triton": 1, "__gpu$x": 1}
    assert counts["kernels"] == 4
    assert counts["copies"] == 1
    assert gpu_compile.read_thunks(THUNKS) == (["CommandBuffer", "While", "Gemm"], 2)


def test_the_kernels_of_a_layer():
    """From one attention to the next, without what launches nothing; a merge begins no layer."""
    layer = [
        '%call.{0} = f32[2]{{0}} custom-call(%a), metadata={{op_name="jit(f)/tree_attention/pallas_call"}}',
        '%merge.{0} = f32[2]{{0}} custom-call(%a), metadata={{op_name="jit(f)/tree_attention_merge/pallas_call"}}',
        "%tuple.{0} = (f32[2]{{0}}) tuple(%merge.{0})",
        '%fusion.{0} = f32[2]{{0}} fusion(%call.{0}), kind=kLoop, metadata={{op_name="jit(f)/mlp/add"}}',
    ]
    entry = [line.format(index) for index in range(3) for line in layer]
    assert gpu_compile.list_layer(entry) == [
        "call.1 f32[2]{0}: tree_attention/pallas_call",
        "merge.1 f32[2]{0}: tree_attention_merge/pallas_call",
        "fusion.1 f32[2]{0}: mlp/add",
    ]
    assert gpu_compile.list_layer(entry[:4]) == []


def compile_programs(folder, *arguments, **environment):
    """Rows by method and program, of a process of its own: the tool changes what JAX looks for."""
    file, tool = folder / "found.json", Path(gpu_compile.__file__)
    paths = os.pathsep.join(filter(None, (str(tool.parents[1]), *sys.path)))
    command = [sys.executable, str(tool), *arguments, "--json", str(file)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True)
    return {(row["method"], row["program"]): row for row in json.loads(file.read_text())["rows"]}


def compiles(test):
    """A test that compiles for a GPU."""
    problem = gpu_compile.find_problem()
    skip = pytest.mark.skipif(problem is not None, reason="needs the extra gpu-compile")
    return pytest.mark.gpu_compile(pytest.mark.slow(skip(test)))


@compiles
@pytest.mark.parametrize("gpu", gpu_compile.GPUS)
def test_programs_of_rounds(gpu, tmp_path):
    """No wait, no copied cache, hardly a spilled register; kernels must not become more unnoticed."""
    rows = compile_programs(tmp_path, "--gpu", gpu, "--methods", "ar,chain,specexec,swiftspec")
    assert len(rows) == 8 and ("swiftspec", "advance and expand") in rows
    for name, row in rows.items():
        assert row["waits"] == [] and row["copies"] == 0, name
        assert row["spills"] <= MOST_SPILLS and row["shared"] <= gpu_compile.GPUS[gpu].shared, name
    assert rows["specexec", "draft"]["on_data"] == ["draft/grow/while"]
    assert rows["ar", "decode 1"]["kernels_a_layer"] <= MOST_KERNELS["decode"]
    assert rows["specexec", "verify"]["kernels_a_layer"] <= MOST_KERNELS["verify"]
    assert rows["specexec", "draft"]["kernels_a_layer"] <= MOST_KERNELS["draft"]


@compiles
@pytest.mark.parametrize(("weights", "devices"), [("q4_0", 1), ("q4_0", 2), ("int4_g128", 1), ("q6_k", 1)])
def test_packed_weights_stay_packed(weights, devices, tmp_path):
    """Nothing as large as a weight's numbers is written: one row, a tree, and the growth of a tree."""
    rows = compile_programs(tmp_path, "--weights", weights, "--devices", str(devices), "--methods", "ar,specexec")
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["spills"] == 0 and row["copies"] == 0, name
        assert row["memory"] <= MOST_MEMORY and row["shared"] <= gpu_compile.GPUS["h100"].shared, name
        assert "jaxspec_linear" in row["assembled"], name
    if devices == 1:
        # Of several devices, collectives lie between graphs, and the draft's search outside of them.
        assert all(row["waits"] == [] for row in rows.values())
        assert rows["ar", "decode 1"]["kernels_a_layer"] <= MOST_PACKED_KERNELS["decode"]
        assert rows["specexec", "verify"]["kernels_a_layer"] <= MOST_PACKED_KERNELS["verify"]
        assert rows["specexec", "draft"]["kernels_a_layer"] <= MOST_PACKED_KERNELS["draft"]


@compiles
def test_collectives_in_graphs(tmp_path):
    """The loop that waits for the host on several devices: its collectives, by an option that users may set."""
    both = "--devices", "2", "--methods", "specexec"
    assert compile_programs(tmp_path, *both)["specexec", "draft"]["waits"] == ["shard_map/draft/grow/while"]
    option = f"{program.GPU_OPTIONS['xla_gpu_enable_command_buffer']},COLLECTIVES"
    rows = compile_programs(tmp_path, *both, XLA_FLAGS=f"--xla_gpu_enable_command_buffer={option}")
    assert rows["specexec", "draft"]["waits"] == [] and rows["specexec", "draft"]["launched"] == ["CommandBuffer"]
