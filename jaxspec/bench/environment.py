"""Where something is measured: devices, machine and versions."""

import os
import platform
import sys
from typing import Any

import jax
import jaxlib
import numpy as np

import jaxspec


def describe_environment(devices: int = 1) -> dict[str, Any]:
    """Devices (of which `devices` were used), machine, versions, and peak memory in bytes."""
    device = jax.devices()[0]
    memory = device.memory_stats() if device.platform != "cpu" else None
    # By the modules themselves: a source tree that runs without being installed has no metadata.
    modules = {"jaxspec-decode": jaxspec, "jax": jax, "jaxlib": jaxlib, "numpy": np}
    versions = {name: module.__version__ for name, module in modules.items()}
    return {
        "device": f"{devices} of {len(jax.devices())} x {device.device_kind}",
        "machine": ", ".join(filter(None, (_processor(), f"{os.cpu_count()} cores", platform.machine()))),
        "versions": {"python": platform.python_version(), **versions},
        "peak_host_bytes": _peak_host_bytes(),
        "peak_device_bytes": (memory or {}).get("peak_bytes_in_use"),
    }


def _processor() -> str:
    """Name of the processor, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _peak_host_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
