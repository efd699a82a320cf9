"""The worker loop of several processes: each but process 0 runs its commands (docs/several-hosts.md)."""

from typing import Any

import jax
import numpy as np

from jaxspec import __version__
from jaxspec.engine import Engine, Session, read_sampling
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.registry import make_method
from jaxspec.runtime import hosts
from jaxspec.runtime.mesh import MeshPlan
from pallas_kernels.native import library


def run_worker(engine: Engine, params: ModelParams) -> None:
    """Run an engine, and others of its models, as process 0 runs its own, until process 0 has no more commands.

    DistributedError: process 0 names an engine or a session that is not there.
    """
    engines, sessions = {engine.number: engine}, dict[int, Session]()
    while (given := hosts.next_command())["do"] != "end":
        match given["do"]:
            case "method":
                method = make_method(given["name"], read_settings(given["settings"]))
                other = engines[given["engine"]].with_method(method)
                engines[other.number] = other
                other.prepare()
                other.calibrate(params)
            case "prepare":
                sampling = given["sampling"]
                engines[given["engine"]].prepare(given["tokens"], sampling and read_sampling(sampling))
            case "open":
                request = given["prompt"], read_sampling(given["sampling"]), given["seed"]
                session = engines[given["engine"]].open(params, *request, in_pieces=given["in_pieces"])
                sessions[session.number] = session
            case "read":
                sessions[given["session"]].read()
            case "step":
                sessions[given["session"]].step()
            case "close":
                sessions.pop(given["session"]).close()


def read_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of a method from JSON, whose lists are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def describe_programs(plan: MeshPlan) -> dict[str, str]:
    """Versions, kernels and kinds of devices, which decide the programs of a process and how they round."""
    kernels = plan.kernels
    found = {"jaxspec": __version__, "jax": jax.__version__, "numpy": np.__version__, "kernels": kernels.name}
    found["implementations"] = str(kernels.implementations)
    found["kind of devices"] = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    if kernels.native:
        found["instruction set of the native kernels"] = library.load().level or "unknown"
    return found
