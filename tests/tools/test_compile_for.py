"""Compiling for a GPU without one: how compiled text is read, and, with the extra, what the programs are like."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import compile_for
import compiled_text
import pytest

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
    counts = compiled_text.count_text(MODULE)
    assert counts["on_data"] == ["draft/grow/while"] and len(counts["loops"]) == 1
    assert counts["kinds"] == {"copy": 1, "fusion": 1, "__gpu$xla.gpu.triton": 1, "__gpu$x": 1}
    assert counts["kernels"] == 4 and counts["collectives"] == counts["crossing"] == 0
    assert counts["copies"] == 1 and counts["largest"] == (32, "f32[8]{0}")
    assert compiled_text.read_thunks(THUNKS) == (["CommandBuffer", "While", "Gemm"], 2)


def test_the_kernels_of_a_layer():
    """From one attention to the next, without what launches nothing; a merge begins no layer."""
    layer = [
        '%call.{0} = f32[2]{{0}} custom-call(%a), metadata={{op_name="jit(f)/tree_attention/pallas_call"}}',
        '%merge.{0} = f32[2]{{0}} custom-call(%a), metadata={{op_name="jit(f)/tree_attention_merge/pallas_call"}}',
        "%tuple.{0} = (f32[2]{{0}}) tuple(%merge.{0})",
        '%fusion.{0} = f32[2]{{0}} fusion(%call.{0}), kind=kLoop, metadata={{op_name="jit(f)/mlp/add"}}',
    ]
    entry = [line.format(index) for index in range(3) for line in layer]
    assert compiled_text.list_layer(entry) == [
        "call.1 f32[2]{0}: tree_attention/pallas_call",
        "merge.1 f32[2]{0}: tree_attention_merge/pallas_call",
        "fusion.1 f32[2]{0}: mlp/add",
    ]
    assert compiled_text.list_layer(entry[:4]) == []


def compile_programs(folder, *arguments, **environment):
    """Rows by method and program, of a process of its own: the tool changes what JAX looks for."""
    file, tool = folder / "found.json", Path(compile_for.__file__)
    paths = os.pathsep.join(filter(None, (str(tool.parents[1]), *sys.path)))
    command = [sys.executable, str(tool), *arguments, "--json", str(file)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True)
    return {(row["method"], row["program"]): row for row in json.loads(file.read_text())["rows"]}


def compiles(test, device="h100"):
    """A test that compiles for a GPU, or for a TPU."""
    problem = compile_for.find_problem(device)
    skip = pytest.mark.skipif(problem is not None, reason=str(problem))
    return pytest.mark.gpu_compile(pytest.mark.slow(skip(test)))


compiles_for_tpu = functools.partial(compiles, device="v5e")


ROUNDS = "ar,chain,specexec,swiftspec,auto"


@compiles
@pytest.mark.parametrize("gpu", compile_for.GPUS)
def test_programs_of_rounds(gpu, tmp_path):
    """No wait, no copied cache, hardly a spilled register; kernels must not become more unnoticed."""
    rows = compile_programs(tmp_path, gpu, "--methods", ROUNDS)
    assert {method for method, _ in rows} == set(ROUNDS.split(",")) and ("swiftspec", "advance and expand") in rows
    for name, row in rows.items():
        assert row["waits"] == [] and row["copies"] == 0, name
        assert row["spills"] <= MOST_SPILLS and row["shared"] <= compile_for.GPUS[gpu].shared, name
    assert rows["specexec", "draft"]["on_data"] == ["draft/grow/while"]
    assert rows["ar", "decode 1"]["kernels_a_layer"] <= MOST_KERNELS["decode"]
    assert rows["specexec", "verify"]["kernels_a_layer"] <= MOST_KERNELS["verify"]
    assert rows["specexec", "draft"]["kernels_a_layer"] <= MOST_KERNELS["draft"]


@compiles
@pytest.mark.parametrize(("weights", "devices"), [("q4_0", 2), ("int4_g128", 1), ("q6_k", 1)])
def test_packed_weights_stay_packed(weights, devices, tmp_path):
    """Nothing as large as a weight's numbers is written: one row, a tree, and the growth of a tree."""
    rows = compile_programs(
        tmp_path, "h100", "--weights", weights, "--devices", str(devices), "--methods", "ar,specexec"
    )
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["spills"] == 0 and row["copies"] == 0, name
        assert row["memory"] <= MOST_MEMORY and row["shared"] <= compile_for.GPUS["h100"].shared, name
        assert "jaxspec_linear" in row["assembled"], name
    assert all(row["waits"] == [] for row in rows.values())
    if devices == 1:
        assert rows["ar", "decode 1"]["kernels_a_layer"] <= MOST_PACKED_KERNELS["decode"]
        assert rows["specexec", "verify"]["kernels_a_layer"] <= MOST_PACKED_KERNELS["verify"]
        assert rows["specexec", "draft"]["kernels_a_layer"] <= MOST_PACKED_KERNELS["draft"]


@compiles
@pytest.mark.parametrize(("devices", "other"), [(2, "swiftspec"), (4, "chain"), (8, "auto")])
def test_programs_of_several_gpus_are_a_graph_each(devices, other, tmp_path):
    """Loops and all-reduces included; partial sums cross in bfloat16."""
    rows = compile_programs(tmp_path, "h100", "--devices", str(devices), "--methods", f"ar,specexec,{other}")
    assert {method for method, _ in rows} == {"ar", "specexec", other}
    for name, row in rows.items():
        assert row["waits"] == [] and row["launched"] == ["CommandBuffer"] and row["copies"] == 0, name
    for name, batch in ((("ar", "decode 1"), 1), (("specexec", "verify"), 17)):
        assert rows[name]["collectives_a_layer"] == 2 and rows[name]["crossing_a_layer"] == 2 * batch * 4096 * 2
        assert rows[name]["kernels_a_layer"] <= (11 if batch == 1 else 14)


@compiles
@pytest.mark.parametrize("devices", [2, 8])
def test_products_and_sums_are_one_kernel(devices, tmp_path):
    """With `linear_sum` no all-reduce of a layer is left, and a program is one graph as before."""
    rows = compile_programs(tmp_path, "h100", "--devices", str(devices), "--methods", "ar,specexec", "--sum")
    for name, row in rows.items():
        assert row["waits"] == [] and row["launched"] == ["CommandBuffer"] and row["copies"] == 0, name
    for name in (("ar", "decode 1"), ("specexec", "verify")):
        assert rows[name]["collectives_a_layer"] == 0 and rows[name]["by_kind_a_layer"]["mosaic_gpu_v2"] == 2


@compiles
def test_a_large_batch_is_walked_in_its_graph(tmp_path):
    """Of more than 64 rows those that are reached decide, in a loop that the device ends."""
    large = compile_programs(tmp_path, "h100", "--methods", "specexec", "--set", "num_draft_tokens=127")
    row = large["specexec", "verify"]
    assert row["on_data"] == ["accept/walk/while"] and row["waits"] == [] and row["launched"] == ["CommandBuffer"]


@compiles
def test_exact_numerics_run_the_same_kernels_for_one_row_and_eight(tmp_path):
    """By name, registers and shared memory; a chain's rows fill one tile."""
    rows = compile_programs(tmp_path, "h100", "--exact", "--methods", "ar,chain")
    one, several = rows["ar", "decode 1"], rows["chain", "verify"]
    kernels = {"jaxspec_exact_linear", "jaxspec_exact_attention", "jaxspec_exact_attention_merge"}
    assert one["exact"] == several["exact"] and {name for name, *_ in one["exact"]} == kernels
    for row in (one, several):
        assert row["waits"] == [] and row["launched"] == ["CommandBuffer"] and row["spills"] == 0
        assert row["kernels_a_layer"] <= 18


@compiles
def test_a_large_pair_fits_on_four_gpus_each(tmp_path):
    """A target of 70B in int4 on four H100, and a draft of 3B on four others, by what the compiler reports."""
    pair = "--target", "llama-3-70b", "--draft", "llama-3.2-3b", "--weights", "int4_g128"
    split = "--devices", "4", "--draft-devices", "4", "--methods", "swiftspec"
    rows = compile_programs(tmp_path, "h100", *pair, *split)
    for name, layers in (("verify", 80), ("advance", 28), ("expand", 28)):
        row = rows["swiftspec", name]
        assert row["waits"] == [] and row["launched"] == ["CommandBuffer"], name
        # Two layers of the target were compiled, one of the draft.
        rest = layers - (2 if name == "verify" else 1)
        taken = row["arguments"] + rest * row["arguments_a_layer"] + row["memory"]
        assert (8 if layers == 80 else 0.4) * 2**30 < taken < 12 * 2**30, (name, taken)


# Bytes that a program computes on the way on a TPU, beside the logits of a tree.
MOST_TPU_MEMORY = 32 << 20
# Kinds of TPU, 1, 4 and 8 chips, a draft on chips of its own, greedy and sampled; the rest of the methods and of
# the products is in docs/results/tpu-compile.md.
TPU_ROUNDS = {
    "v5e, greedy": ("v5e:2x2", "ar,specexec"),
    "v6e, sampled": ("v6e:2x2", "chain", "--sampled"),
    "v6e, 4 chips": ("v6e:2x2", "ar", "--devices", "4"),
    "v5e, 8 chips, sampled": ("v5e:2x4", "ar", "--devices", "8", "--sampled"),
    "v5e, 2 and 2 chips": ("v5e:2x2", "swiftspec", "--devices", "2", "--draft-devices", "2"),
    "tpu7x, greedy": ("tpu7x:2x2x1", "ar"),
    "v5p, a draft's heads of 64": ("v5p:2x2x1", "chain", "--tokens", "8192"),
    "v5e, one such head a chip": ("v5e:2x4", "chain", "--tokens", "8192", "--devices", "8"),
    "v6e, EAGLE-3 head": ("v6e:2x2", "chain", "--eagle"),
    "v5e, int4": ("v5e:2x2", "ar", "--weights", "int4_g128"),
    "v6e, int8 on 4 chips": ("v6e:2x2", "ar", "--weights", "q8_0", "--devices", "4"),
}


@compiles_for_tpu
@pytest.mark.parametrize("case", TPU_ROUNDS)
def test_programs_for_a_tpu(case, tmp_path):
    """No transfer to or from the host, no copy of a cache, few temporaries; two all-reduces a layer on several chips.

    With packed weights too, of which XLA would write the numbers.
    """
    device, methods, *options = TPU_ROUNDS[case]
    rows = compile_programs(tmp_path, device, "--methods", methods, *options)
    assert {method for method, _ in rows} == {*methods.split(",")}
    for name, row in rows.items():
        assert row["waits"] == [] and row["copies"] == 0 and row["memory"] <= MOST_TPU_MEMORY, name
        if methods == "ar":
            assert row["collectives_a_layer"] == (2 if "--devices" in options else 0), name
        if "--weights" in options:
            assert row["by_kind_a_layer"]["tpu_custom_call"] == 4 and row["memory"] < 8 << 20, name
    if case == "v5e, greedy":
        # One row goes through the matrix unit as a tree does: no product is left to sums on the vector unit.
        assert rows["ar", "decode"]["products_a_layer"] == rows["specexec", "verify"]["products_a_layer"] == 6


@compiles_for_tpu
def test_attention_for_tpus_writes_no_scores(tmp_path):
    """At 8,192 slots, where XLA writes up to 20 MiB of a tree at a time."""
    tree = "--methods", "specexec", "--set", "num_draft_tokens=63", "--tokens", "8192"
    row = compile_programs(tmp_path, "v5e:2x2", "--kernels", "mosaic-tpu", *tree)["specexec", "verify"]
    assert row["kinds"]["tpu_custom_call"] == 2 and row["copies"] == 0
    # Logits of 64 rows take 33 MB.
    assert row["memory"] <= MOST_TPU_MEMORY + (33 << 20)
