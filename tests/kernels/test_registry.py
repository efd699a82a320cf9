"""The choice of kernels, what happens without the native library, and the library of every instruction set."""

import ctypes
import dataclasses
import functools
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from kernel_cases import (
    ALL_FORMATS,
    assert_close,
    assert_same_bits,
    block_values,
    needs_native,
    numbers,
    product_and_bound,
    random_rows,
    random_weight,
    run_native,
)

from pallas_kernels import KERNEL_NAMES, native, registry, self_check
from pallas_kernels.linear import linear
from pallas_kernels.native import library
from pallas_kernels.registry import Kernels, choose, current, using
from pallas_kernels.rms_norm import rms_norm

WARNING = "no native CPU kernels, decoding goes through XLA: "


def test_the_library_is_there_where_it_can_be_built():
    """Elsewhere the tests of the native kernels are left out; nobody would notice that here."""
    compilers = [shutil.which(name) for name in (*os.environ.get("CXX", "").split()[:1], "g++", "c++")]
    if not any(compilers):
        pytest.skip("no C++ compiler: the native kernels are not built here")
    assert library.load().problem is None, "the native kernels are missing; run `pip install --editable .` again"
    assert library.load().level in library.LEVELS
    assert choose("auto", "cpu").native


@pytest.fixture
def anew(monkeypatch):
    """As in a new process: nothing is loaded or checked yet. The library stays registered with XLA."""
    monkeypatch.setattr(library, "load", functools.cache(library.load.__wrapped__))
    for told_once in ("_find_problem", "_warn"):
        monkeypatch.setattr(registry, told_once, functools.cache(getattr(registry, told_once).__wrapped__))
    run_once = self_check._run
    # JAX knows traced functions by identity: another function is traced again.
    monkeypatch.setattr(self_check, "_run", lambda operands: run_once(operands))


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@needs_native
def test_choice(monkeypatch):
    monkeypatch.setattr(registry, "_cores", lambda: 6)
    assert choose("auto", "cpu") == choose("cpu", "cpu") == Kernels("cpu", "cpu", 6)
    assert choose("auto", "cpu", 1).native
    # Devices share the cores, and each has one at least.
    assert [choose("cpu", "cpu", devices).threads for devices in (2, 4, 6, 8)] == [3, 1, 1, 1]


def test_choice_of_xla():
    for name in ("cpu", "gpu", "tpu"):
        assert choose("xla", name) == Kernels("xla", name, 1)
        assert not choose("xla", name).native
    assert choose("auto", "tpu", 4) == Kernels("xla", "tpu", 1)


def test_choices_that_are_refused():
    assert KERNEL_NAMES == ("auto", "xla", "cpu", "pallas-triton", "mosaic", "jax-triton")
    with pytest.raises(ValueError, match="kernels 'triton' are not known; use auto, xla, cpu, pallas-triton, mosaic"):
        choose("triton", "cpu")
    with pytest.raises(ValueError, match="kernels 'cpu' run on CPU devices, not on gpu"):
        choose("cpu", "gpu")
    for name in KERNEL_NAMES[3:]:
        with pytest.raises(ValueError, match=f"kernels '{name}' run on NVIDIA GPUs, not on cpu; use auto or xla"):
            choose(name, "cpu")


def gpu(capability, kind="NVIDIA GPU"):
    return types.SimpleNamespace(device_kind=kind, compute_capability=capability)


@pytest.fixture
def gpu_kernels(monkeypatch):
    """Fakes installed packages and checks: a set of what fails its check, and a list of what was checked."""
    failing, checked = set(), []

    def find_failure(operation, implementation, base, device):
        checked.append((operation, implementation))
        return f"{operation} by {implementation} fails" if (operation, implementation) in failing else None

    monkeypatch.setattr(registry, "find_failure", find_failure)
    monkeypatch.setattr(registry, "_warn_of_failure", functools.cache(registry._warn_of_failure.__wrapped__))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return types.SimpleNamespace(failing=failing, checked=checked)


def chosen(name, capability):
    kernels = choose(name, "gpu", 1, gpu(capability))
    return kernels.name, dict(kernels.implementations)


def test_choice_on_gpus(gpu_kernels, warnings):
    triton, mosaic = "triton", "mosaic"
    both = {"tree_attention": triton, "swiglu": "jax_triton"}
    assert chosen("auto", "9.0") == ("mosaic", both | {"tree_attention": mosaic})
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        assert chosen("auto", capability) == ("pallas-triton", both)
    # Older ones, and those of other makers.
    for capability in ("7.5", "gfx942", None):
        assert choose("auto", "gpu", 1, gpu(capability)).name == "xla"
        assert choose("auto", "gpu", 1, gpu(capability)).implementations == ()
    assert chosen("pallas-triton", "9.0") == ("pallas-triton", {"tree_attention": triton, "swiglu": triton})
    assert chosen("mosaic", "9.0") == ("mosaic", {"tree_attention": mosaic, "swiglu": "jax_triton"})
    assert chosen("jax-triton", "8.6") == ("jax-triton", both)
    kernels = choose("auto", "gpu", 4, gpu("9.0", "NVIDIA H100 80GB HBM3"))
    assert kernels.capability == (9, 0) and kernels.device_kind == "NVIDIA H100 80GB HBM3"
    assert kernels.platform == "gpu" and not kernels.native and not kernels.interpret
    assert hash(kernels) == hash(choose("auto", "gpu", 1, gpu("9.0", "NVIDIA H100 80GB HBM3")))
    assert warnings() == []


def test_gpu_kernels_that_are_not_for_this_gpu(gpu_kernels):
    with pytest.raises(ValueError, match=r"'mosaic' cannot be used: .* capability 9.0 to below 10.0, not 8.6"):
        choose("mosaic", "gpu", 1, gpu("8.6"))
    with pytest.raises(ValueError, match=r"'mosaic' .*, not 10.0"):
        choose("mosaic", "gpu", 1, gpu("10.0"))
    with pytest.raises(ValueError, match=r"'pallas-triton' cannot be used: .* capability 8.0 or newer, not 7.5"):
        choose("pallas-triton", "gpu", 1, gpu("7.5"))
    with pytest.raises(ValueError, match="'jax-triton' cannot be used: they are for NVIDIA GPUs, and this is none"):
        choose("jax-triton", "gpu", 1, gpu("gfx942"))
    assert ("tree_attention", "mosaic") not in gpu_kernels.checked


def test_without_jax_triton(gpu_kernels, warnings, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else object())
    with pytest.raises(ValueError, match=r"not installed: jax_triton; pip install 'jaxspec-decode\[jax-triton\]'"):
        choose("jax-triton", "gpu", 1, gpu("9.0"))
    for name in ("auto", "mosaic"):
        assert chosen(name, "9.0") == ("mosaic", {"tree_attention": "mosaic", "swiglu": "triton"})
    # Nobody asked for it.
    assert warnings() == []


def test_gpu_kernels_that_fail_their_check(gpu_kernels, warnings):
    gpu_kernels.failing.add(("tree_attention", "mosaic"))
    with pytest.raises(ValueError, match="kernels 'mosaic' cannot be used: tree_attention by mosaic fails"):
        choose("mosaic", "gpu", 1, gpu("9.0"))
    assert warnings() == []
    for _ in range(2):
        assert chosen("auto", "9.0") == ("pallas-triton", {"tree_attention": "triton", "swiglu": "jax_triton"})
    assert warnings() == ["a GPU kernel is not used: tree_attention by mosaic fails"]
    gpu_kernels.failing.update({("tree_attention", "triton"), ("swiglu", "jax_triton"), ("swiglu", "triton")})
    assert choose("auto", "gpu", 1, gpu("9.0")).name == "xla"
    assert len(warnings()) == 4
    for name in ("pallas-triton", "jax-triton"):
        with pytest.raises(ValueError, match=f"kernels '{name}' cannot be used: .* fails"):
            choose(name, "gpu", 1, gpu("9.0"))


INTERPRETER = Kernels("xla", "gpu", capability=(9, 0), interpret=True)


@pytest.mark.parametrize("operation", ["tree_attention", "swiglu"])
def test_the_check_of_gpu_kernels(monkeypatch, operation):
    """In the interpreter; a kernel whose result is off, that raises, or that takes no ordinary call, is found out."""
    device = jax.devices()[0]
    find_failure = registry.find_failure.__wrapped__
    assert find_failure(operation, "triton", INTERPRETER, device) is None
    broken = {"the result": np.float32([np.nan])}
    for results, problem in (
        (lambda *_: None, "does not take ordinary operands"),
        (lambda *_: broken, "the result is off by nan"),
        (lambda *_: 1 / 0, r"cannot be run \(ZeroDivisionError: division by zero\)"),
    ):
        monkeypatch.setitem(self_check.KERNEL_CHECKS, operation, (results, lambda _: {"the result": np.float32([1])}))
        assert re.search(f"{operation} by triton .*{problem}", find_failure(operation, "triton", INTERPRETER, device))


@pytest.mark.parametrize("operation", registry.SETS["auto"])
def test_every_set_names_implementations_that_exist(operation):
    folder = Path(registry.__file__).parent / operation
    for name, candidates in registry.SETS.items():
        for implementation in candidates[operation]:
            assert implementation in registry.NEEDS
            assert (folder / f"{implementation}.py").is_file(), name
    assert operation in self_check.KERNEL_CHECKS
    assert {*registry.SETS} == {*KERNEL_NAMES} - {"xla", "cpu"}


def test_threads_are_the_cores_that_this_process_may_use():
    if hasattr(os, "sched_getaffinity"):
        assert registry._cores() == len(os.sched_getaffinity(0))
    assert registry._cores() >= 1


def assert_falls_back(reason, warnings):
    """One warning however often XLA takes its place, and a refusal without any where it was asked for by name."""
    with pytest.raises(ValueError, match=f"^kernels 'cpu' cannot be used: .*{reason}"):
        choose("cpu", "cpu")
    assert warnings() == []
    for devices in (1, 2):
        assert choose("auto", "cpu", devices) == Kernels("xla", "cpu")
    (message,) = warnings()
    assert message.startswith(WARNING) and re.search(reason, message)


def test_without_a_library(monkeypatch, anew, warnings):
    monkeypatch.setattr(library, "find", dict)
    assert_falls_back("were not built when jaxspec was installed; install a C", warnings)
    assert library.load().level is None
    # XLA and other platforms do not ask for it.
    assert choose("xla", "cpu") == Kernels("xla", "cpu")


def test_a_file_that_is_no_library(monkeypatch, anew, warnings, tmp_path):
    path = tmp_path / "cpu_portable.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(library, "find", lambda: {"portable": path})
    assert_falls_back("cannot be loaded", warnings)
    # A compiler is not what is missing.
    assert library.load().problem.endswith("); reinstall jaxspec")


@needs_native
def test_a_library_without_an_operation(monkeypatch, anew, warnings):
    """One that was built from older sources."""
    monkeypatch.setattr(library, "TARGETS", (*library.TARGETS, "newest"))
    assert_falls_back("cannot be loaded", warnings)


@needs_native
@pytest.mark.parametrize("changed", [{"newest": np.int64(1)}, {"threads": np.float32(1)}])
def test_a_library_whose_operations_take_other_attributes(monkeypatch, anew, warnings, changed):
    """Operations of the right names, built from older sources."""

    def call(target, out, *operands, aliases=None, **attributes):
        return library.call(target, out, *operands, aliases=aliases, **attributes | changed)

    monkeypatch.setattr(native, "call", call)
    assert_falls_back("library cannot be run .*; reinstall jaxspec", warnings)
    assert "\n" not in registry._find_problem()


@needs_native
def test_the_check_does_not_depend_on_what_the_caller_set(anew):
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.disable_jit(True),
        jax.transfer_guard("disallow"),
    ):
        assert registry._find_problem() is None


@needs_native
def test_libraries_for_better_machines_only(monkeypatch, anew, warnings):
    path = next(iter(library.find().values()))
    monkeypatch.setattr(library, "_supported_level", lambda paths: "portable")
    monkeypatch.setattr(library, "find", lambda: {"avx512": path})
    assert_falls_back("none was built for this machine", warnings)


@needs_native
@pytest.mark.parametrize("name", ["linear", "linear of q6_k", "tree_attention", "the cache's values", "rope_tables"])
def test_a_library_that_fails_its_check(monkeypatch, anew, warnings, name):
    expect = self_check._expect

    def wrong(operands):
        expected = expect(operands)
        expected[name] = expected[name].copy()
        expected[name].flat[-1] += np.float32(0.01) * np.abs(expected[name]).max()
        return expected

    monkeypatch.setattr(self_check, "_expect", wrong)
    assert_falls_back(f"library fails its check: {name} is off by", warnings)


@needs_native
def test_a_check_that_finds_what_is_not_finite(monkeypatch, anew):
    expect = self_check._expect
    monkeypatch.setattr(self_check, "_expect", lambda operands: expect(operands) | {"rms_norm": np.float32(np.nan)})
    assert self_check.find_difference() == "rms_norm is off by nan"


@needs_native
def test_the_check_covers_every_operation_and_format():
    text = " ".join(self_check._expect(self_check._make_operands()))
    for name in library.TARGETS:
        assert name in text
    for name in ALL_FORMATS[3:]:
        assert f"linear of {name}" in text and f"take_rows of {name}" in text


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
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer.threads = 3


OWN_PREFIX = library.TARGET_PREFIX
LEVELS = ()
if library.load().problem is None:
    LEVELS = library.LEVELS[library.LEVELS.index(library._supported_level(library.find())) :]
    LEVELS = tuple(level for level in LEVELS if level in library.find())


@functools.cache
def register(level):
    """A level's operations under names of their own; the prefix of those names."""
    prefix = f"level_{level}_"
    handlers = ctypes.CDLL(str(library.find()[level]))
    for target in library.TARGETS:
        handler = getattr(handlers, OWN_PREFIX + target)
        jax.ffi.register_ffi_target(prefix + target, jax.ffi.pycapsule(handler), platform="cpu")
    return prefix


@pytest.fixture
def use_level(monkeypatch):
    """Sends calls that are traced from now on to the library of a level."""

    def use(level):
        prefix = register(level)
        monkeypatch.setattr(library, "TARGET_PREFIX", prefix)
        with using(Kernels("cpu", "cpu")):
            lowered = jax.jit(lambda x: rms_norm(x, x[0], 1e-5)).lower(np.ones((2, 3), np.float32))
        assert f"{prefix}rms_norm" in lowered.as_text()

    yield use
    # Programs that were traced with another level must not serve other tests.
    traced_products.cache_clear()


@functools.cache
def traced_products(level):
    def products(x, norm_scale, xs, weights):
        return rms_norm(x, norm_scale, 1e-5), [linear(x, weight) for x, weight in zip(xs, weights, strict=True)]

    return products


@functools.cache
def level_operands():
    rng = np.random.default_rng(0)
    xs, weights = [], []
    for name in ALL_FORMATS:
        inputs = 3 * block_values(name) if block_values(name) > 1 else 101
        for rows, outputs in ((1, 23), (2, 5), (9, 97), (64, 97)):
            xs.append(random_rows(rng, rows, inputs))
            weights.append(random_weight(rng, name, outputs, inputs, extreme=True))
    return random_rows(rng, 9, 333), rng.normal(size=333).astype(np.float32), xs, weights


@needs_native
@pytest.mark.parametrize("level", library.LEVELS)
def test_the_library_of_each_level(level, use_level, anew):
    if level not in LEVELS:
        pytest.skip(f"this machine does not run {level}, or it was not built")
    use_level(level)
    assert self_check.find_difference() is None
    x, norm_scale, xs, weights = level_operands()
    _, results = run_native(traced_products(level), x, norm_scale, xs, weights, threads=2)
    plain = [numbers(weight) for weight in weights]
    _, alone = run_native(traced_products(level), x, norm_scale, [x[-1:] for x in xs], plain)
    for x, weight, got, last in zip(xs, weights, results, alone, strict=True):
        assert_close(got, *product_and_bound(x, weight), f"{x.shape} and {weight.shape}")
        assert_same_bits(got[-1:], last, f"{x.shape} and {weight.shape}")


@needs_native
def test_vector_levels_agree_in_every_bit(use_level):
    """Sequences that are decoded on another machine come out the same."""
    if not {"avx2", "avx512"} <= {*LEVELS}:
        pytest.skip("this machine does not run both, or they were not built")
    results = []
    # A library that differs may also have been linked from objects of another level.
    for level in ("avx2", "avx512"):
        use_level(level)
        results.append(jax.tree.leaves(run_native(traced_products(level), *level_operands())))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@needs_native
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.parametrize(("level", "registers"), [("portable", "%[yz]mm"), ("avx2", "%zmm")])
def test_no_library_holds_instructions_of_a_better_level(level, registers):
    """All are built from the same sources: one that got another's objects would crash on older machines."""
    path = library.find().get(level)
    if path is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"there is no {level} library for x86")
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    assert "%xmm" in code.stdout
    assert not re.search(registers, code.stdout)
