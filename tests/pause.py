"""A step of a program that takes its time on its own device and uses no core meanwhile.

A Python callback would not do: XLA runs a program that has one on the dispatching thread, so that nothing overlaps.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest

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
