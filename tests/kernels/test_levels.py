"""The native library of every instruction set."""

import ctypes
import functools
import os
import platform
import re
import shutil
import subprocess

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

from pallas_kernels import self_check
from pallas_kernels.linear import linear
from pallas_kernels.native import library
from pallas_kernels.registry import Kernels, using
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.selection import choose

OWN_PREFIX = library.TARGET_PREFIX

LEVELS = ()

if library.load().problem is None:
    LEVELS = tuple(library.supported_levels(library.find()))


def test_the_library_is_there_where_it_can_be_built():
    """Without the library the tests of native kernels are skipped. With a compiler that must not happen unnoticed."""
    compilers = [shutil.which(name) for name in (*os.environ.get("CXX", "").split()[:1], "g++", "c++")]
    if not any(compilers):
        pytest.skip("no C++ compiler: the native kernels are not built here")
    assert library.load().problem is None, "the native kernels are missing; run `pip install --editable .` again"
    assert library.load().level in library.LEVELS
    assert choose("auto", "cpu").native


@functools.cache
def register(level):
    """A level's operations under names of their own: the prefix of those names, and the library."""
    prefix = f"level_{level}_"
    handlers = ctypes.CDLL(str(library.find()[level]))
    for target in library.TARGETS:
        handler = getattr(handlers, OWN_PREFIX + target)
        jax.ffi.register_ffi_target(prefix + target, jax.ffi.pycapsule(handler), platform="cpu")
    return prefix, handlers


@pytest.fixture
def use_level(monkeypatch):
    """Sends calls that are traced from now on, and packing, to the library of a level."""

    def use(level):
        prefix, handlers = register(level)
        monkeypatch.setattr(library, "TARGET_PREFIX", prefix)
        monkeypatch.setattr(library, "load", lambda: library.Library(level, None, handlers))
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
