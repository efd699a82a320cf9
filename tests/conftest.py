"""Shared by all tests: eight CPU devices, one load of the default model, a count of compilations."""

import jax
import pytest

# Before any backend starts. Eight devices let every tensor-parallel degree up to 8 run on any machine.
jax.config.update("jax_num_cpu_devices", 8)


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
