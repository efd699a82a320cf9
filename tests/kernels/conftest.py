"""Shared by the tests of kernels: a quick interpreter."""

import threading

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map
from kernel_cases import QUICK


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
                programs[id(jaxpr)] = lowered.compile(QUICK), jaxpr
        programs[id(jaxpr)][0](consts, *operands)

    if hasattr(thread_map, "_run_jaxpr"):
        monkeypatch.setattr(thread_map, "_run_jaxpr", run)
