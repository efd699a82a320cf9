"""SwiGLU through jax-triton: cleanly absent where it is not installed; else compiled for Hopper. tests/gpu runs it.

CI does not install it: Triton takes 640 MB.
"""

import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest
from lowering import lower_for_cuda

from pallas_kernels import registry, selection
from pallas_kernels.swiglu import norm_swiglu

H100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
ABSENT = importlib.util.find_spec("jax_triton") is None
absent = pytest.mark.skipif(not ABSENT, reason="jax-triton is installed")


@absent
def test_is_refused_by_name_without_its_packages(monkeypatch):
    monkeypatch.setattr(selection, "find_failure", lambda *_: None)
    with pytest.raises(ValueError, match="cannot be used: not installed: jax_triton, triton; pip install"):
        selection.choose("jax-triton", "gpu", device=H100)


@absent
def test_auto_passes_over_it_in_silence(monkeypatch, caplog):
    monkeypatch.setattr(selection, "find_failure", lambda *_: None)
    for name in ("auto", "mosaic"):
        kernels = selection.choose(name, "gpu", device=H100)
        assert "jax_triton" not in kernels.candidates("swiglu")
    assert not caplog.records


def test_is_refused_without_a_gpu():
    with pytest.raises(ValueError, match="'jax-triton' run on NVIDIA GPUs, not on cpu"):
        selection.choose("jax-triton", "cpu")


@pytest.mark.parametrize(
    ("rows", "inputs", "columns", "dtype", "normed"),
    [(1, 4096, 14336, jnp.bfloat16, True), (64, 8192, 3584, jnp.float32, False), (3, 100, 83, jnp.float32, True)],
)
def test_compiles_for_hopper(rows, inputs, columns, dtype, normed):
    """Triton's compiler needs no GPU, only JAX's CUDA plugin: it comes to PTX here."""
    pytest.importorskip("jax_triton", exc_type=ImportError)
    from pallas_kernels.swiglu import jax_triton

    kernels = registry.Kernels("jax-triton", "gpu", implementations=(("swiglu", "jax_triton"),), capability=(9, 0))

    def call(x, scale, weight):
        with registry.using(kernels):
            return norm_swiglu(x, scale, weight, 1e-5) if normed else jax_triton.swiglu(x, weight)

    shape = jax.ShapeDtypeStruct
    x, scale = shape((rows, inputs), jnp.float32), shape((inputs,), jnp.float32)
    text = lower_for_cuda(call, x, scale, shape((2 * columns, inputs), dtype))
    assert text.count("custom_call @triton_kernel_call") == 1
