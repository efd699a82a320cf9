"""Shared by all tests: eight CPU devices, one load of the default model, a count of compilations."""

import functools
import gc
from pathlib import Path

import jax
import pytest

# Before any backend starts. Eight devices let every tensor-parallel degree up to 8 run on any machine.
jax.config.update("jax_num_cpu_devices", 8)

# Linux gives a process 65,530 memory mappings, and each compiled program takes several: beyond, compiling crashes.
MANY_MAPPINGS = 15_000


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
    """Let go of what a file's tests compiled, once it adds up."""
    yield
    mappings = Path("/proc/self/maps")
    if not mappings.exists() or len(mappings.read_bytes().splitlines()) < MANY_MAPPINGS:
        return
    for value in vars(request.module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def llm():
    """The default model, compiled once for the whole run."""
    import jaxspec

    return jaxspec.LLM()


@pytest.fixture
def compilations(monkeypatch):
    """Names of the events that XLA compilations (or loads of compiled programs) leave, in a list that grows."""
    events = []

    def listen(name, duration, **details):
        if name.endswith("backend_compile_duration"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
