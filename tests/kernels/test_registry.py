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
from tiny_models import quick_compilation

from pallas_kernels import KERNEL_NAMES, _compat, kernel_check, native, registry, self_check
from pallas_kernels.linear import linear
from pallas_kernels.native import library
from pallas_kernels.registry import Kernels, choose, current, using
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import swiglu
from pallas_kernels.tree_attention import config, tree_attention, triton

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


def gpu(capability, kind="NVIDIA GPU", **known):
    return types.SimpleNamespace(device_kind=kind, compute_capability=capability, **known)


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
    operations = dict.fromkeys(operation for operation, _ in kernels.implementations)
    return kernels.name, {operation: kernels.candidates(operation) for operation in operations}


def test_choice_on_gpus(gpu_kernels, warnings):
    triton, mosaic = ("triton",), ("mosaic",)
    both = {"tree_attention": triton, "swiglu": ("triton", "jax_triton")}
    assert chosen("auto", "9.0") == ("mosaic", both | {"tree_attention": mosaic + triton})
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        assert chosen("auto", capability) == ("pallas-triton", both)
    # Older ones, and those of other makers.
    for capability in ("7.5", "gfx942", None):
        assert choose("auto", "gpu", 1, gpu(capability)).name == "xla"
        assert choose("auto", "gpu", 1, gpu(capability)).implementations == ()
    assert chosen("pallas-triton", "9.0") == ("pallas-triton", {"tree_attention": triton, "swiglu": triton})
    assert chosen("mosaic", "9.0") == ("mosaic", both | {"tree_attention": mosaic})
    assert chosen("jax-triton", "8.6") == ("jax-triton", both | {"swiglu": ("jax_triton",)})
    assert [choose(name, "gpu", 1, gpu("9.0")).own for name in ("auto", "mosaic")] == [None, "mosaic"]
    kernels = choose("auto", "gpu", 4, gpu("9.0", "NVIDIA H100 80GB HBM3"))
    assert kernels.capability == (9, 0) and kernels.device_kind == "NVIDIA H100 80GB HBM3"
    assert kernels.platform == "gpu" and not kernels.native and not kernels.interpret
    assert kernels.multiprocessors == 64
    assert choose("auto", "gpu", 1, gpu("9.0", core_count=78)).multiprocessors == 78
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
    attention = {"auto": ("mosaic", "triton"), "mosaic": ("mosaic",)}
    for name in ("auto", "mosaic"):
        assert chosen(name, "9.0") == ("mosaic", {"tree_attention": attention[name], "swiglu": ("triton",)})
    # Nobody asked for it.
    assert warnings() == []


def test_gpu_kernels_that_fail_their_check(gpu_kernels, warnings):
    gpu_kernels.failing.add(("tree_attention", "mosaic"))
    with pytest.raises(ValueError, match="kernels 'mosaic' cannot be used: tree_attention by mosaic fails"):
        choose("mosaic", "gpu", 1, gpu("9.0"))
    assert warnings() == []
    for _ in range(2):
        assert chosen("auto", "9.0") == (
            "pallas-triton", {"tree_attention": ("triton",), "swiglu": ("triton", "jax_triton")}
        )  # fmt: skip
    assert warnings() == ["a GPU kernel is not used: tree_attention by mosaic fails"]
    gpu_kernels.failing.update({("tree_attention", "triton"), ("swiglu", "jax_triton"), ("swiglu", "triton")})
    assert choose("auto", "gpu", 1, gpu("9.0")).name == "xla"
    assert len(warnings()) == 4
    for name in ("pallas-triton", "jax-triton"):
        with pytest.raises(ValueError, match=f"kernels '{name}' cannot be used: .* fails"):
            choose(name, "gpu", 1, gpu("9.0"))


INTERPRETER = Kernels("xla", "gpu", capability=(9, 0), interpret=True)


def abstract_attention(H, dtype, **options):
    """Operands of eight rows, as far as implementations look at them, and options."""
    shape = jax.ShapeDtypeStruct
    cache = shape((2, 512, H), dtype)
    table = shape((8, H // 2), np.float32)
    operands = (
        shape((8, 2, 4, H), np.float32), table, table, cache, cache,
        shape((), np.int32), shape((8, 8), bool), shape((8,), np.int32),
    )  # fmt: skip
    return operands, {"offset": None, "sliding_window": None, "active_rows": None, "write_only": False} | options


def test_what_the_best_implementation_does_not_take_goes_to_the_next(gpu_kernels, warnings, monkeypatch):
    """Also where it comes to a program; who asked for one by name is told once."""
    monkeypatch.setattr(registry, "_own_calls", {})
    bfloat16 = jax.numpy.bfloat16

    def found(kernels, *call):
        operands, options = abstract_attention(*call)
        module = kernels.find("tree_attention", *operands, **options)
        return module and module.__name__.rpartition(".")[2]

    calls = ((64, bfloat16), (128, bfloat16), (64, np.float32), (96, bfloat16), (256, bfloat16), (512, bfloat16))
    auto = choose("auto", "gpu", 1, gpu("9.0"))
    assert [found(auto, *call) for call in calls] == ["mosaic", "mosaic", "triton", "triton", "triton", None]
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
    operands, _ = abstract_attention(*calls[2])
    with using(auto), _compat.lowering_for("NVIDIA H100 80GB HBM3", 132):
        text = jax.jit(tree_attention).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text


def test_no_word_of_what_is_left_to_xla_by_design(gpu_kernels, warnings, monkeypatch):
    monkeypatch.setattr(registry, "_own_calls", {})
    operands, _ = abstract_attention(64, np.float32)
    rows, weight = jax.ShapeDtypeStruct((65, 64), np.float32), jax.ShapeDtypeStruct((96, 64), np.float32)
    with using(choose("mosaic", "gpu", 1, gpu("9.0"))):
        jax.eval_shape(lambda *operands: tree_attention(*operands, write_only=True), *operands)
    with using(choose("jax-triton", "gpu", 1, gpu("9.0"))):
        jax.eval_shape(swiglu, rows, weight)
    assert warnings() == []


@pytest.fixture
def compiled_quickly():
    with quick_compilation():
        yield


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("operation", ["tree_attention", "swiglu"])
def test_the_check_of_gpu_kernels(monkeypatch, operation):
    """In the interpreter; a kernel whose result is off, that raises, or that takes no ordinary call, is found out."""
    device = jax.devices()[0]
    find_failure = registry.find_failure.__wrapped__
    assert find_failure(operation, "triton", INTERPRETER, device) is None
    check = kernel_check.CHECKS[operation]._replace(expect=lambda *_: {"the result": np.float32([1])})
    broken = {"the result": np.float32([np.nan])}
    for changed, problem in (
        ({"takes": lambda *_: False}, "does not take .* of ordinary operands"),
        ({"run": lambda *_: broken}, "of a .* the result is off by nan"),
        ({"run": lambda *_: 1 / 0}, r"cannot be run \(ZeroDivisionError: division by zero\)"),
    ):
        monkeypatch.setitem(kernel_check.CHECKS, operation, check._replace(**changed))
        assert re.search(f"{operation} by triton .*{problem}", find_failure(operation, "triton", INTERPRETER, device))


def break_marks(words, rows, word):
    """A causal mask in a tree's place."""
    return 32 * word + jax.numpy.arange(32)[None, :] <= rows.row[:, None]


def break_merge(call, numbers, largest, total, values, *, interpret):
    """The first part of the prefix in the place of all."""
    first = values[:, 0] / total[:, 0, :, None]
    return [first.reshape(call.K, call.T, call.G, call.H).swapaxes(0, 1)]


def break_prefix(call, state, *_):
    return state


def break_old_rows(*arguments):
    return arguments[-1]


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(
    ("function", "broken", "call"),
    [
        ("_marks", break_marks, "a tree"),
        ("_merge", break_merge, "a tree"),
        ("_add_old_rows", break_old_rows, "a tree"),
        ("_attend_prefix", break_prefix, "a tree"),
        ("_finite", lambda values: values, "a tree"),
    ],
)
def test_the_check_finds_broken_attention(monkeypatch, function, broken, call):
    """The check itself, of a kernel one of whose steps is wrong."""
    # That call alone, which is the quickest.
    check = kernel_check.CHECKS["tree_attention"]
    calls = tuple(each for each in check.calls if each.name == call)
    monkeypatch.setitem(kernel_check.CHECKS, "tree_attention", check._replace(calls=calls))
    monkeypatch.setattr(triton, function, broken)
    difference = kernel_check.find_kernel_difference("tree_attention", "triton", INTERPRETER, jax.devices()[0])
    assert difference is not None and f"of {call} " in difference


@pytest.mark.parametrize("multiprocessors", [132, 108, 64, 58])
def test_the_check_runs_what_decoding_runs(multiprocessors):
    """Parts of a prefix and their merge on every GPU; more rows than a block has, and than a word has marks."""
    chosen = {
        call.name: config.choose(
            "", multiprocessors, call.rows, call.group, call.width, kernel_check.SLOTS, kv_heads=kernel_check.HEADS,
            itemsize=kernel_check.DTYPES[call.dtype].itemsize,
        )
        for call in kernel_check.ATTENTION
    }  # fmt: skip
    assert all(sizes.splits > 1 for sizes in chosen.values())
    tree = kernel_check.ATTENTION[0]
    assert tree.rows > triton.WORD and tree.rows * tree.group > chosen[tree.name].block_q
    assert {call.dtype for call in kernel_check.ATTENTION} == {"bfloat16", "float32"}
    assert {call.width for call in kernel_check.ATTENTION} == {64, 128}


@pytest.mark.parametrize("operation", registry.SETS["auto"])
def test_every_set_names_implementations_that_exist(operation):
    folder = Path(registry.__file__).parent / operation
    for name, candidates in registry.SETS.items():
        for implementation in candidates[operation]:
            assert implementation in registry.NEEDS
            assert (folder / f"{implementation}.py").is_file(), name
    assert operation in kernel_check.CHECKS
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
