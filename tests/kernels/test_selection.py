"""The choice of kernels by name and device, and of an implementation by the operands of a call."""

import dataclasses
import functools
import importlib.util
import os
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from kernel_cases import needs_native
from lowering import H100, abstract_attention, lowering_for

from pallas_kernels import KERNEL_NAMES, kernel_check, registry, selection
from pallas_kernels.registry import Kernels, current, using
from pallas_kernels.selection import choose
from pallas_kernels.swiglu import swiglu
from pallas_kernels.tree_attention import tree_attention


@needs_native
def test_choice(monkeypatch):
    assert 1 <= selection.count_cores() <= os.cpu_count()
    for name in ("cpu", "gpu", "tpu"):
        assert choose("xla", name) == Kernels("xla", name, 1)
    monkeypatch.setattr(selection, "count_cores", lambda: 6)
    assert choose("auto", "cpu") == choose("cpu", "cpu") == Kernels("cpu", "cpu", 6)
    assert choose("auto", "cpu", 1).native
    # Devices share the cores, and each has one at least.
    assert [choose("cpu", "cpu", devices).threads for devices in (2, 4, 6, 8)] == [3, 1, 1, 1]


def test_choices_that_are_refused():
    assert KERNEL_NAMES == ("auto", "xla", "cpu", "pallas-triton", "mosaic", "jax-triton", "mosaic-tpu")
    with pytest.raises(ValueError, match="kernels 'triton' are not known; use auto, xla, cpu, pallas-triton, mosaic"):
        choose("triton", "cpu")
    with pytest.raises(ValueError, match="kernels 'cpu' run on CPU devices, not on gpu"):
        choose("cpu", "gpu")
    for name in KERNEL_NAMES[3:]:
        kind = "TPUs" if name == "mosaic-tpu" else "NVIDIA GPUs"
        with pytest.raises(ValueError, match=f"kernels '{name}' run on {kind}, not on cpu; use auto or xla"):
            choose(name, "cpu")


def gpu(capability, kind="NVIDIA GPU", **known):
    return types.SimpleNamespace(device_kind=kind, compute_capability=capability, **known)


@pytest.fixture
def gpu_kernels(monkeypatch):
    """Fakes installed packages and checks: a set of what fails its check, and a list of what was checked."""
    failing, checked = set(), []

    def find_failure(operation, implementation, base, device):
        checked.append((operation, implementation))
        return f"{operation} by {implementation} fails" if (operation, implementation) in failing else None

    monkeypatch.setattr(selection, "find_failure", find_failure)
    monkeypatch.setattr(selection, "warn_once", functools.cache(selection.warn_once.__wrapped__))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return types.SimpleNamespace(failing=failing, checked=checked)


def chosen(name, capability):
    kernels = choose(name, "gpu", 1, gpu(capability))
    operations = dict.fromkeys(operation for operation, _ in kernels.implementations)
    return kernels.name, {operation: kernels.candidates(operation) for operation in operations}


def test_choice_on_gpus(gpu_kernels, warnings):
    attention = {"tree_attention": ("triton",)}
    assert chosen("auto", "9.0") == ("pallas-triton", {"tree_attention": ("triton", "mosaic")})
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        assert chosen("auto", capability) == ("pallas-triton", attention)
    # Older ones, and those of other makers.
    for capability in ("7.5", "gfx942", None):
        assert choose("auto", "gpu", 1, gpu(capability)).name == "xla"
        assert choose("auto", "gpu", 1, gpu(capability)).implementations == ()
    # Kernels that no device has run come where they are asked for, and nowhere else.
    unmeasured = {"linear": ("triton",), "move_rows": ("triton",), "add_norm": ("triton",)}
    assert chosen("pallas-triton", "9.0") == ("pallas-triton", attention | unmeasured)
    packed = {name: choose(name, "gpu", 1, gpu("9.0")).reads_planes for name in ("xla", *selection.SETS)}
    assert [name for name, reads in packed.items() if reads] == ["pallas-triton"]
    assert chosen("mosaic", "9.0") == ("mosaic", {"tree_attention": ("mosaic",)})
    assert chosen("jax-triton", "8.6") == ("jax-triton", attention | {"swiglu": ("jax_triton",)})
    for place, devices, sums in ((0, 2, ("mosaic",)), (0, 1, ()), (2, 2, ())):
        assert choose("mosaic", "gpu", devices, gpu("9.0", id=place)).candidates("linear_sum") == sums
    assert [choose(name, "gpu", 1, gpu("9.0")).own for name in ("auto", "mosaic")] == [None, "mosaic"]
    kernels = choose("auto", "gpu", 4, gpu("9.0", "NVIDIA H100 80GB HBM3"))
    assert kernels.capability == (9, 0) and kernels.device_kind == "NVIDIA H100 80GB HBM3"
    assert kernels.platform == "gpu" and not kernels.native and not kernels.interpret
    assert kernels.multiprocessors == 64
    assert choose("auto", "gpu", 1, gpu("9.0", core_count=78)).multiprocessors == 78
    assert hash(kernels) == hash(choose("auto", "gpu", 1, gpu("9.0", "NVIDIA H100 80GB HBM3")))
    assert warnings() == []


def test_gpu_kernels_that_are_not_for_this_gpu(gpu_kernels, warnings, monkeypatch):
    with pytest.raises(ValueError, match=r"'mosaic' cannot be used: .* capability 9.0 to below 10.0, not 8.6"):
        choose("mosaic", "gpu", 1, gpu("8.6"))
    with pytest.raises(ValueError, match=r"'mosaic' .*, not 10.0"):
        choose("mosaic", "gpu", 1, gpu("10.0"))
    with pytest.raises(ValueError, match=r"'pallas-triton' cannot be used: .* capability 8.0 or newer, not 7.5"):
        choose("pallas-triton", "gpu", 1, gpu("7.5"))
    with pytest.raises(ValueError, match="'jax-triton' cannot be used: they are for NVIDIA GPUs, and this is none"):
        choose("jax-triton", "gpu", 1, gpu("gfx942"))
    assert ("tree_attention", "mosaic") not in gpu_kernels.checked
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else object())
    with pytest.raises(ValueError, match=r"not installed: jax_triton; pip install 'jaxspec-decode\[jax-triton\]'"):
        choose("jax-triton", "gpu", 1, gpu("9.0"))
    # Nobody asked for it by name.
    for name, implementations in (("auto", ("triton", "mosaic")), ("mosaic", ("mosaic",))):
        assert chosen(name, "9.0")[1] == {"tree_attention": implementations}
    assert warnings() == []


def test_gpu_kernels_that_fail_their_check(gpu_kernels, warnings):
    def refused(name, operation, implementation):
        with pytest.raises(ValueError, match=f"kernels '{name}' cannot be used: {operation} by {implementation} fails"):
            choose(name, "gpu", 1, gpu("9.0"))

    gpu_kernels.failing.add(("linear", "triton"))
    refused("pallas-triton", "linear", "triton")
    assert chosen("auto", "8.0") == ("pallas-triton", {"tree_attention": ("triton",)})
    gpu_kernels.failing.update({("tree_attention", "triton"), ("swiglu", "jax_triton")})
    refused("pallas-triton", "tree_attention", "triton")
    assert warnings() == []
    for _ in range(2):
        assert chosen("auto", "9.0") == ("mosaic", {"tree_attention": ("mosaic",)})
    failed = "a GPU kernel is not used: tree_attention by triton fails"
    assert warnings() == [failed]
    refused("jax-triton", "swiglu", "jax_triton")
    assert choose("auto", "gpu", 1, gpu("8.0")).name == "xla"
    gpu_kernels.failing.add(("tree_attention", "mosaic"))
    assert choose("auto", "gpu", 1, gpu("9.0")).name == "xla"
    assert warnings()[1:] == ["a GPU kernel is not used: tree_attention by mosaic fails"]
    refused("mosaic", "tree_attention", "mosaic")


OPTIONS = {"offset": None, "sliding_window": None, "active_rows": None, "write_only": False}


def eight_rows(width, dtype):
    return abstract_attention(8, 2, 2, width, 512, dtype=dtype)


def test_what_an_implementation_does_not_take_goes_to_xla(gpu_kernels, warnings, monkeypatch):
    """Also where it comes to a program; who asked for one by name is told once."""
    monkeypatch.setattr(registry, "_own_calls", {})
    bfloat16 = jax.numpy.bfloat16

    def found(kernels, *call):
        module = kernels.find("tree_attention", *eight_rows(*call), **OPTIONS)
        return module and module.__name__.rpartition(".")[2]

    calls = ((64, bfloat16), (128, bfloat16), (64, np.float32), (96, bfloat16), (256, bfloat16), (512, bfloat16))
    auto = choose("auto", "gpu", 1, gpu("9.0"))
    assert [found(auto, *call) for call in calls] == ["triton", "triton", None, "triton", "triton", None]
    assert warnings() == []
    asked = choose("mosaic", "gpu", 1, gpu("9.0"))
    assert [found(asked, *call) for call in calls[:3]] == ["mosaic", "mosaic", None]
    (message,) = warnings()
    assert "kernels 'mosaic' were asked for, but do not take tree_attention of float32[8, 2, 4, 64]" in message
    assert found(asked, *calls[3]) is None and len(warnings()) == 1
    (calls_of_attention,) = asked.own_calls().values()
    assert calls_of_attention.taken and calls_of_attention.refused.startswith("tree_attention of float32[8, 2, 4, 64]")
    assert auto.own_calls() == {}
    assert found(choose("pallas-triton", "gpu", 1, gpu("9.0")), *calls[2]) == "triton"
    operands = eight_rows(*calls[2])
    with using(choose("pallas-triton", "gpu", 1, gpu("9.0"))), lowering_for(*H100):
        text = jax.jit(tree_attention).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text


@pytest.mark.parametrize(
    ("rows", "heads", "group", "dtype", "found"),
    [
        (1, 8, 4, "bfloat16", "triton"),
        (63, 8, 4, "bfloat16", "triton"),
        (64, 8, 4, "bfloat16", "mosaic"),
        (64, 1, 8, "bfloat16", "triton"),
        (256, 1, 8, "bfloat16", "mosaic"),
        (512, 8, 4, "float32", None),
    ],
)
def test_auto_takes_what_was_measured_to_be_fastest(gpu_kernels, rows, heads, group, dtype, found):
    operands = abstract_attention(rows, heads, group, 128, 1024, dtype=dtype)
    module = choose("auto", "gpu", 1, gpu("9.0")).find("tree_attention", *operands, **OPTIONS)
    assert (module and module.__name__.rpartition(".")[2]) == found
    if found == "mosaic":
        older = choose("auto", "gpu", 1, gpu("8.0")).find("tree_attention", *operands, **OPTIONS)
        assert older is not None and older.__name__.endswith("triton")


def test_no_word_of_what_is_left_to_xla_by_design(gpu_kernels, warnings, monkeypatch):
    monkeypatch.setattr(registry, "_own_calls", {})
    operands = eight_rows(64, np.float32)
    rows, weight = jax.ShapeDtypeStruct((65, 64), np.float32), jax.ShapeDtypeStruct((96, 64), np.float32)
    with using(choose("mosaic", "gpu", 1, gpu("9.0"))):
        jax.eval_shape(lambda *operands: tree_attention(*operands, write_only=True), *operands)
    with using(choose("jax-triton", "gpu", 1, gpu("9.0"))):
        jax.eval_shape(swiglu, rows, weight)
    assert warnings() == []


def test_every_set_names_implementations_that_exist():
    for name, operations in selection.SETS.items():
        for operation, implementations in operations.items():
            for implementation in implementations:
                assert implementation in selection.NEEDS
                assert (Path(registry.__file__).parent / operation / f"{implementation}.py").is_file(), name
    assert {operation for operations in selection.SETS.values() for operation in operations} == {*kernel_check.CHECKS}
    assert {*selection.SETS} == {*KERNEL_NAMES} - {"xla", "cpu", "mosaic-tpu"}


def test_choice_on_tpus(gpu_kernels, warnings):
    """XLA and the product of packed weights; no TPU has run a kernel, so attention must be asked for by name."""
    tpu, linear = types.SimpleNamespace(device_kind="TPU v5 lite"), ("linear", "mosaic_tpu")
    assert choose("xla", "tpu", 1, tpu) == Kernels("xla", "tpu") and gpu_kernels.checked == []
    chosen = choose("auto", "tpu", 4, tpu)
    assert chosen == Kernels("xla", "tpu", implementations=(linear,), device_kind="TPU v5 lite") and chosen.reads_planes
    kernels = choose("mosaic-tpu", "tpu", 1, tpu)
    assert kernels.implementations == (linear, ("tree_attention", "mosaic_tpu")) and kernels.own == "mosaic_tpu"
    gpu_kernels.failing.add(("tree_attention", "mosaic_tpu"))
    with pytest.raises(ValueError, match="'mosaic-tpu' cannot be used: tree_attention by mosaic_tpu fails"):
        choose("mosaic-tpu", "tpu", 1, tpu)
    gpu_kernels.failing.add(linear)
    assert not choose("auto", "tpu", 1, tpu).reads_planes
    assert warnings() == ["packed weights cannot be used: linear by mosaic_tpu fails"]


def test_current():
    default = current()
    assert default == Kernels("xla", jax.default_backend())
    outer, inner = Kernels("cpu", "cpu", 2), Kernels("xla", "gpu")
    with using(outer):
        assert current() == outer and current().native
        with using(inner):
            assert current() == inner and not current().native
        assert current() == outer
        with pytest.raises(KeyError), using(inner):
            raise KeyError
        assert current() == outer
    assert current() == default


def test_a_platform_without_kernels_is_told_of_once(warnings, monkeypatch):
    monkeypatch.setattr(selection, "warn_once", functools.cache(selection.warn_once.__wrapped__))
    assert {choose("auto", platform).name for platform in ("metal", "metal")} == {"xla"}
    assert warnings() == ["there are no kernels for platform 'metal': XLA runs all operations"]


def test_exact_numerics_take_kernels_that_pass_their_check(gpu_kernels, warnings, monkeypatch):
    monkeypatch.setattr(selection, "find_exact_failure", lambda one, *_: "broken" if one[0] == "linear" else None)
    exact = selection.make_exact(choose("auto", "gpu", 1, gpu("9.0")), gpu("9.0"))
    assert exact.exact and exact.invariant and not exact.native
    assert exact.candidates("linear") == () and exact.candidates("add_norm") == ("triton",)
    assert exact.candidates("tree_attention") == ("mosaic", "triton")
    assert warnings() == ["exact numerics are left to XLA: broken"]
    other = selection.make_exact(choose("xla", "tpu"), None)
    assert other.exact and other.implementations == ()
    native = choose("cpu", "cpu") if selection.find_native_problem() is None else None
    assert native is None or selection.make_exact(native, None) is native


@pytest.mark.thorough
def test_exact_kernels_are_compared_with_xla():
    kernels = dataclasses.replace(choose("xla", "gpu"), interpret=True)
    for operation in ("linear", "tree_attention"):
        assert selection.find_exact_failure((operation, "triton"), kernels, jax.devices()[0]) is None
