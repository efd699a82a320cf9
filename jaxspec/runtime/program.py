"""Programs: functions of one shard, compiled ahead of time for the shapes they will meet."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import MeshPlan
from pallas_kernels import registry


class Program:
    """One compiled entry point.

    The function is written for a shard and runs under `jax.shard_map`; each argument is described by a pytree of
    `jax.ShapeDtypeStruct` with shardings, from which the partition specs follow.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], plan: MeshPlan, args: Sequence[Any], out: Any,
        donate: Sequence[int] = (),
    ):  # fmt: skip
        """`out` describes the result as `args` do the arguments; `donate` lists argument numbers."""
        self.name = name
        self._args = tuple(args)
        self._plan = plan
        sharded = jax.shard_map(
            function, mesh=plan.mesh, in_specs=tuple(_specs(a) for a in args), out_specs=_specs(out), check_vma=False
        )
        self._jit = jax.jit(sharded, donate_argnums=tuple(donate), out_shardings=_shardings(out))
        self._compiled: Any = None

    @property
    def ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled is not None

    def lower(self) -> Any:
        """Trace and lower; Python work, to be done in the main thread.

        What the caller set for code of their own (64-bit types, strict promotion, no jit) does not reach ours.
        """
        with (
            registry.using(self._plan.kernels),
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.disable_jit(False),
        ):
            return self._jit.lower(*self._args)

    def finish(self, lowered: Any) -> None:
        """Compile what `lower` returned; runs outside the interpreter lock."""
        self._compiled = lowered.compile()

    def __call__(self, *args: Any) -> Any:
        """Dispatch; compiles first if needed."""
        if not self.ready:
            self.finish(self.lower())
        compiled = self._compiled
        with jax.disable_jit(False):
            if recording.active is not None:
                return recording.active.program(self.name, self._plan, compiled, args)
            return compiled(*args)


def compile_programs(programs: Sequence[Program]) -> float:
    """Compile what is not compiled yet, in parallel; returns the wall time in seconds, 0.0 if nothing was to do."""
    waiting = [p for p in programs if not p.ready]
    if not waiting:
        return 0.0
    start = time.perf_counter()
    # Each compilation takes hundreds of megabytes while it runs: no more at once than there are cores.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for job in [pool.submit(p.finish, p.lower()) for p in waiting]:
            job.result()
    _release_free_memory()
    return time.perf_counter() - start


def _release_free_memory() -> None:
    """Give the pages that the compiler freed back to the system: a quarter of all memory at hand with a small model."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    # glibc alone keeps them, and has the function.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # pyright: ignore[reportOptionalMemberAccess]


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda s: s.sharding.spec, tree)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(s.sharding.mesh, s.sharding.spec), tree)
