"""Forms of operations that are made for TPUs stay out of programs for CPUs and GPUs. Nothing is compiled here."""

import contextlib
import dataclasses
from argparse import Namespace
from unittest import mock

import compile_for
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from lowering import H100

from jaxspec.methods.core.round import Models
from jaxspec.methods.registry import make_method
from jaxspec.models import transformer
from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.quantization import Storage, number_tables
from jaxspec.runtime import placement
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.processors import GREEDY
from pallas_kernels.linear import api as products
from pallas_kernels.linear import mosaic_tpu as packed_products
from pallas_kernels.move_rows import api as commit
from pallas_kernels.registry import Kernels
from pallas_kernels.tree_attention import mosaic_tpu as attention
from pallas_kernels.tree_attention import xla as xla_attention

# What makes them, as modules see it.
FORMS = (
    (commit, "move_within"), (products, "linear_on_tpu"), (xla_attention, "pad_one_row"), (transformer, "hold_layouts"),
    (placement, "columns_name"), (placement, "matrix_shape"), (packed_products, "linear"),
    (attention, "tree_attention"), (xla_attention, "attend_in_blocks"),
)  # fmt: skip


def choose(device, kernels="auto"):
    """Kernels of a device that is not there, all of which pass their check."""
    return compile_for.choose_kernels(Namespace(device=device, kernels=kernels), Namespace(device_kind=device))


KERNELS = {
    "cpu": Kernels("cpu", "cpu"), "gpu": choose("h100"), "gpu by XLA": Kernels("xla", "gpu"), "tpu": choose("v5e"),
    "tpu by kernels": choose("v5e", "mosaic-tpu"),
}  # fmt: skip
JAX_NAMES = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
METHODS = {"ar": {}, "specexec": {"num_draft_tokens": 4}, "swiftspec": {"depth": 2, "num_draft_tokens": 4, "width": 2}}
# One query head for each of keys, since attention of one row has a form of its own there.
CONFIG = ModelConfig("llama", 1, 128, 256, 1, 1, 128, 160, max_context=64)
# No program depends on the longest context, but JAX traces a layer of another model anew.
ALIKE = dataclasses.replace(CONFIG, max_context=65)


def lower(name, method, weights, config=CONFIG, stacks=False):
    """StableHLO of the programs of a round and of a text, by name, with locations if asked; the model has one layer."""
    platform = JAX_NAMES[name.partition(" ")[0]]
    plan = MeshPlan(tuple(jax.devices("cpu")[:1]), KERNELS[name])
    if platform == "cuda":
        # Newer versions of JAX lower Triton kernels only for a device that they know.
        device = AbstractDevice(device_kind=H100[0], num_cores=H100[1], platform="gpu")
        axis = {"axis_types": (AxisType.Auto,), "abstract_device": device}
        plan.__dict__["mesh"] = AbstractMesh((1,), (TENSOR_AXIS,), **axis)
    storage = number_tables(Storage(weights), config, "bfloat16")
    model = Placement(config, plan, jnp.dtype(jnp.bfloat16), storage=storage)
    drawn = make_method(method, METHODS[method])
    with mock.patch("jax.device_put", compile_for.describe_arrays):
        programs = drawn.bind(Models(model, model if drawn.drafts else None), 64).programs
    lowered = {program.name: program.lower(program.fit(GREEDY), (platform,)) for program in programs}
    return {program: one.as_text(debug_info=stacks) for program, one in lowered.items()}


def refuse(*_, **__):
    raise AssertionError("a form for TPUs")


@pytest.mark.parametrize(
    ("name", "method", "weights"),
    [
        ("cpu", "specexec", "int4_g32"),
        pytest.param("gpu", "ar", "int4_g32", marks=pytest.mark.thorough),
        pytest.param("gpu", "specexec", "bfloat16", marks=pytest.mark.thorough),
        ("gpu by XLA", "ar", "bfloat16"),
        pytest.param("gpu by XLA", "specexec", "bfloat16", marks=pytest.mark.thorough),
        pytest.param("cpu", "swiftspec", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpu", "swiftspec", "int4_g32", marks=pytest.mark.slow),
    ],
)
def test_programs_of_cpus_and_gpus_do_not_depend_on_them(name, method, weights, monkeypatch):
    """Equal StableHLO with and without the forms, which cannot be called in the second case."""
    programs = lower(name, method, weights)
    for module, form in FORMS:
        monkeypatch.setattr(module, form, refuse)
    monkeypatch.setattr(Kernels, "loops_are_free", property(lambda kernels: kernels.platform == "cpu"))
    assert lower(name, method, weights, ALIKE) == programs


@pytest.mark.parametrize(
    ("name", "method", "weights", "forms"),
    [
        ("tpu", "ar", "bfloat16", {"linear_on_tpu", "pad_one_row", "hold_layouts", "matrix_shape", "attend_in_blocks"}),
        ("tpu by kernels", "specexec", "int4_g32", {"move_within", "columns_name", "linear", "tree_attention"}),
    ],
)
def test_programs_of_tpus_have_them(name, method, weights, forms):
    """Each form is in some program: else the test above would compare nothing."""
    with contextlib.ExitStack() as stack:
        called = {form: stack.enter_context(mock.patch.object(module, form, wraps=getattr(module, form)))
                  for module, form in FORMS}  # fmt: skip
        lower(name, method, weights)
    assert forms <= {form for form, mocked in called.items() if mocked.called}


def test_programs_for_tpus_have_no_stacks():
    """XLA's compiler for TPUs compares them: that of a draft of `auto` for four chips of v6e did not end."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 20)
    try:
        texts = {one: "".join(lower(one, "ar", "bfloat16", stacks=True).values()) for one in ("cpu", "tpu")}
        assert getattr(jax.config, name) == 20
    finally:
        jax.config.update(name, before)
    assert "transformer.py" in texts["cpu"] and "transformer.py" not in texts["tpu"]
