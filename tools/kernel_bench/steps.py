"""Step times of a large geometry with random weights: how a pass's time grows with rows and context."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.microbench import time_target_pass, weight_bytes
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import ArrayInfo, Params, declare_params, is_info
from jaxspec.models.presets import load_preset
from jaxspec.models.quantization import Storage, fit_storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from kernel_bench.device import name_device
from kernel_bench.parts import describe_error
from kernel_bench.timing import median_step
from pallas_kernels import selection

PRESET = "llama-3-8b"
PASSES = 8
# Form, rows, prefix: what the targets are about first, since time may run out.
STEPS = (
    *(("auto", T, 512) for T in (1, 16)),
    *((form, 1, 512) for form in ("pallas-triton int4_g128", "pallas-triton q4_k", "pallas-triton")),
    *(("auto exact", T, 512) for T in (1, 8)),
    *(("xla", T, 512) for T in (1, 16)),
    *(("auto", T, 512) for T in (8, 64, 256)),
    *(("auto", T, 8192) for T in (1, 16, 8, 64, 256)),
    *(("xla", T, 8192) for T in (1, 8, 16)),
)
TINY = ModelConfig("llama", 2, 64, 96, 4, 2, 32, 64, 256)
TINY_STEPS = (("xla", 1, 40), ("xla", 2, 40), ("xla exact", 1, 40))


def place_form(form: str, cfg: ModelConfig, dtype: Any, devices: int = 1) -> Placement:
    """A model's placement by words: kernels, and then "exact" or the type of its weights."""
    kernels, *more = form.split()
    plan = plan_mesh(devices, kernels=kernels)
    if "exact" in more:
        plan = dataclasses.replace(plan, kernels=selection.make_exact(plan.kernels, plan.devices[0]))
    packed = [name for name in more if name != "exact"]
    storage = fit_storage(Storage(packed[0]), cfg, devices) if packed else None
    return Placement(cfg, plan, dtype, storage=storage)


def measure_steps(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """The work to be measured, then one row per kernels, rows and prefix: seconds of a pass, head included, and the
    bytes that it must read."""
    cfg, steps, name = (TINY, TINY_STEPS, "tiny") if smoke else (load_preset(PRESET), STEPS, PRESET)
    dtype = jnp.dtype(jnp.float32 if smoke else jnp.bfloat16)
    placements = {form: place_form(form, cfg, dtype) for form in {step[0] for step in steps}}
    names = [f"{name}, {form}, T={rows}, prefix {prefix}" for form, rows, prefix in steps]
    yield {"name": "steps", "device": name_device(), "planned": names}
    weights: dict[Any, Params] = {}
    for words, (form, rows, prefix) in zip(names, steps, strict=True):
        placement = placements[form]
        if placement.storage not in weights:
            weights = {placement.storage: random_params(placement)}  # those before make room
        params = weights[placement.storage]
        read = weight_bytes(params)
        row = {
            "name": words, "device": name_device(),
            "model": name, "dtype": dtype.name, "kernels": form, "rows": rows, "prefix": prefix,
            "implementations": placement.plan.kernels.implementations,
            "bytes": read + 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * prefix * dtype.itemsize,
        }  # fmt: skip
        try:
            sample = time_target_pass(placement, params, rows, prefix)
            row["seconds"] = median_step(sample, 2 if smoke else PASSES)
        except Exception as error:
            row["error"] = describe_error(error)
        sample = None
        gc.collect()  # its cache: programs and their buffers hold on to each other
        yield row


def random_params(placement: Placement) -> Params:
    """Normal weights and norms of one, made on the device leaf by leaf: the whole would not fit twice."""
    declared = declare_params(placement.cfg, placement.weights)

    def fill(info: ArrayInfo, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if "embed" in info.axes and info.format is None:
            return _normal(jax.random.key(leaf.shape[0]), leaf)
        is_norm = len(info.shape) == 1
        return jax.device_put((jnp.ones if is_norm else jnp.zeros)(leaf.shape, leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, declared, placement.params(), is_leaf=is_info)


def _normal(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(_scaled, static_argnums=(1, 2), out_shardings=leaf.sharding)(key, leaf.shape, leaf.dtype)


def _scaled(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (0.02 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)
