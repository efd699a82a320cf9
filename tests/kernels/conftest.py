"""Shared by the tests of kernels: a quick interpreter, and selection as in a new process."""

import functools
import logging
import threading

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map

from pallas_kernels import selection, self_check
from pallas_kernels.native import library


@pytest.fixture
def mosaic_compiled_once(monkeypatch):
    """JAX 0.10 compiles an interpreted Mosaic kernel again for each warpgroup of each CTA, a second each."""
    programs, lock = {}, threading.Lock()

    def run(jaxpr, consts, *operands):
        # Warpgroups begin at the same time: all but one wait for the program.
        with lock:
            if id(jaxpr) not in programs:
                # With the jaxpr, so that no other one is put where it was.
                lowered = jax.jit(lambda *operands: jax.core.eval_jaxpr(jaxpr, *operands)).lower(consts, *operands)
                programs[id(jaxpr)] = lowered.compile(), jaxpr
        programs[id(jaxpr)][0](consts, *operands)

    if hasattr(thread_map, "_run_jaxpr"):
        monkeypatch.setattr(thread_map, "_run_jaxpr", run)


@pytest.fixture
def anew(monkeypatch):
    """As in a new process: nothing is loaded or checked yet. The library stays registered with XLA."""
    monkeypatch.setattr(library, "load", functools.cache(library.load.__wrapped__))
    for once in ("find_native_problem", "warn_once"):
        monkeypatch.setattr(selection, once, functools.cache(getattr(selection, once).__wrapped__))
    run_once = self_check._run
    # JAX knows traced functions by identity: another function is traced again.
    monkeypatch.setattr(self_check, "_run", lambda operands: run_once(operands))


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]
