"""Every GPU kernel of the Triton dialect lowers for CUDA on a host without a GPU, to code that is valid."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib.mlir import ir
from jax._src.pallas.triton.lowering import _new_ir_context
from lowering import MODELS, abstract_attention, lowering_for

from pallas_kernels import registry
from pallas_kernels.tree_attention import tree_attention, triton
from pallas_kernels.tree_attention.config import choose

DEVICES = {(8, 0): ("NVIDIA A100-SXM4-80GB", 108), (9, 0): ("NVIDIA H100 80GB HBM3", 132)}
TARGET = "__gpu$xla.gpu.triton"


def lower(function, operands, capability):
    """The Triton modules of a function, as JAX hands them to XLA."""
    device_kind, cores = DEVICES[capability]
    kernels = registry.Kernels(
        "pallas-triton", "gpu", implementations=(("tree_attention", "triton"),), capability=capability,
        device_kind=device_kind, multiprocessors=cores,
    )  # fmt: skip
    with registry.using(kernels), lowering_for(device_kind, cores):
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    modules = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and TARGET in str(op.attributes["call_target_name"]):
            modules.append(ir.DictAttr(op.attributes["mhlo.backend_config"])["ir"])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return modules


def assert_valid(modules):
    """Parsing a module verifies it; JAX does not, and XLA only where there is a GPU."""
    with _new_ir_context():
        for module in modules:
            ir.Module.parse(module.value_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize("model, capability", [*((model, (9, 0)) for model in MODELS), ("llama-3-8b", (8, 0))], ids=str)
def test_trees(model, capability):
    for T, slots in ((1, 1024), (8, 1024), (64, 8192)):
        modules = lower(tree_attention, abstract_attention(T, *MODELS[model], slots), capability)
        # The second one merges the parts of the prefix.
        K, G, H = MODELS[model]
        splits = choose(*DEVICES[capability], T, G, H, slots, kv_heads=K).splits
        assert len(modules) == (1 if splits == 1 else 2)
        assert_valid(modules)


@pytest.mark.slow
@pytest.mark.parametrize("T", [128, 1024])
def test_wide_trees(T):
    for model in ("llama-3-8b", "smollm2"):
        assert_valid(lower(tree_attention, abstract_attention(T, *MODELS[model], 4096), (8, 0)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_everything_at_once(dtype):
    def call(*operands):
        *operands, offset, active_rows = operands
        return tree_attention(*operands, offset=offset, active_rows=active_rows, sliding_window=1000)

    numbers = [jax.ShapeDtypeStruct((), jnp.int32)] * 2
    assert_valid(lower(call, [*abstract_attention(8, 2, 3, 96, 4096, window=72, dtype=dtype), *numbers], (8, 0)))


@pytest.mark.parametrize("sliding", [None, 1000])
def test_chunks(sliding):
    chunk = abstract_attention(512, *MODELS["llama-3-8b"], 4096)[:6]
    assert_valid(lower(lambda *o: tree_attention(*o, sliding_window=sliding), chunk, (8, 0)))


def test_sequences_in_a_batch():
    batch = [jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for x in abstract_attention(8, *MODELS["llama-3-8b"], 1024)]
    assert_valid(lower(jax.vmap(lambda *o: tree_attention(*o)), batch, (9, 0)))


def test_what_is_left_to_xla():
    chunk = abstract_attention(64, *MODELS["smollm2"], 1024)[:6]
    assert lower(lambda *o: tree_attention(*o, write_only=True), chunk, (8, 0)) == []
    assert lower(tree_attention, abstract_attention(4, 1, 1, 2 * triton.MOST_WIDTH, 256), (8, 0)) == []
