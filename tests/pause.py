"""A step of a program that takes its time on its own device and uses no core meanwhile.

A Python callback would not do: XLA runs a program that has one on the dispatching thread, so that nothing overlaps.
"""

import ctypes
import dataclasses
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest

from jaxspec.methods.core import executor
from jaxspec.methods.swiftspec import draft_tree

TARGET = "jaxspec_test_pause"

SOURCE = """
#include <chrono>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

// The result is the argument's own buffer.
static ffi::Error Pause(int64_t microseconds, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxspec_test_pause, Pause,
    ffi::Ffi::Bind().Attr<int64_t>("microseconds").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


@functools.cache
def _register():
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile a pause with")
    folder = Path(tempfile.mkdtemp())
    (folder / "pause.cc").write_text(SOURCE)
    subprocess.run(
        [compiler, "-std=c++17", "-w", "-shared", "-fPIC", "-I", jax.ffi.include_dir(), "pause.cc", "-o", "pause.so"],
        cwd=folder, check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(folder / "pause.so"))
    shutil.rmtree(folder)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.jaxspec_test_pause), platform="cpu")


def pause(value, seconds):
    """`value`, an array, after `seconds`; for programs that are traced."""
    _register()
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(value.shape, value.dtype), input_output_aliases={0: 0})
    return call(value, microseconds=int(seconds * 1e6))


def slow_models(put, verify_s, grow_s):
    """Programs that are traced from now on verify in `verify_s` and grow in `grow_s`; `put` is `setattr` or such."""
    verify, grow = executor.verify, draft_tree.expand_tree

    def slow_verify(*args, **settings):
        state, outcome, round_ = verify(*args, **settings)
        count = pause(outcome.count, verify_s)
        round_ = dataclasses.replace(round_, packed=round_.packed.at[0].set(count))
        return state, dataclasses.replace(outcome, count=count), round_

    def slow_grow(*args):
        state = grow(*args)
        return dataclasses.replace(state, tree=dataclasses.replace(state.tree, size=pause(state.tree.size, grow_s)))

    put(executor, "verify", slow_verify)
    put(draft_tree, "expand_tree", slow_grow)
