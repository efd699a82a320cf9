"""Memory bandwidth: published bandwidths by device kind, and what a copy reaches."""

import jax
import jax.numpy as jnp

from kernel_bench.timing import time_calls

# Bytes per second, from NVIDIA's data sheets, by a part of JAX's name of the device.
BANDWIDTH = {
    "H100 80GB HBM3": 3.35e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H200": 4.8e12, "GH200": 4.0e12, "H20": 4.0e12,
    "B100": 8.0e12, "B200": 8.0e12, "A100-SXM4-80GB": 2.039e12, "A100-SXM4-40GB": 1.555e12, "A100 80GB PCIe": 1.935e12,
    "A100-PCIE-40GB": 1.555e12, "A30": 0.933e12, "A10G": 0.6e12, "A40": 0.696e12, "L4": 0.3e12, "L40": 0.864e12,
    "L40S": 0.864e12, "RTX A6000": 0.768e12, "RTX 3090": 0.936e12, "RTX 4090": 1.008e12, "RTX 5090": 1.792e12,
}  # fmt: skip


def published_bandwidth(device_kind: str) -> float | None:
    """Bytes per second of a device kind, or None where it is not known."""
    # The longest name first: GH200 holds H20.
    for name in sorted(BANDWIDTH, key=len, reverse=True):
        if name in device_kind:
            return BANDWIDTH[name]
    return None


def measure_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes per second of adding to an array of `nbytes`: each is read and written once."""
    values = jnp.ones(nbytes // 4, jnp.float32)

    def add(operands, state):
        return state[0][:1], (state[0] + 1,)

    timing = time_calls(add, [((jnp.zeros(1),), (values,))], calls=10)
    return 2 * nbytes / timing.seconds


def name_device() -> str:
    """JAX's name of the device that is measured."""
    return jax.devices()[0].device_kind
