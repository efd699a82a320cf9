"""Programs: functions of one shard, compiled ahead of time for the shapes they will meet."""

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspec.runtime import hosts
from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.store import program_files
from jaxspec.runtime.transfer import empty
from jaxspec.runtime.xla_options import choose_options, compile_lowered
from jaxspec.sampling.request import Request
from jaxspec.sampling.variant import GREEDY, Variant
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
        self._function, self._plan, self._args, self._out, self._donate = function, plan, tuple(args), out, donate
        self._request = next((place for place, arg in enumerate(args) if isinstance(arg, Request)), None)
        self._compiled: dict[Variant | None, Any] = {}
        self._coming: dict[Variant | None, tuple[str, Future[bool], threading.Event]] = {}  # see `load_later`
        # Where it runs in other processes alone: nothing is compiled, and the results have no part here.
        here = jax.process_index()
        self._elsewhere = hosts.several() and all(device.process_index != here for device in plan.devices)

    def fit(self, variant: Variant) -> Variant | None:
        """The variant of this program that serves requests of a given one; None is the program for all of them."""
        return None if self._request is None or self._plan.kernels.branches else variant

    def is_ready(self, variant: Variant = GREEDY) -> bool:
        """Whether it is compiled for requests of a variant."""
        return self._elsewhere or self.fit(variant) in self._compiled

    def is_coming(self, variant: Variant = GREEDY) -> bool:
        """Whether it is being loaded from the store in the background."""
        coming = self._coming.get(self.fit(variant))
        return coming is not None and not coming[1].done()

    def lower(self, variant: Variant | None = None) -> Any:
        """Trace and lower; Python work, to be done in the main thread. `variant` is one that `fit` gives.

        What the caller set for code of their own (64-bit types, strict promotion, no jit) does not reach ours.
        """
        args = self._shapes(variant)
        sharded = jax.shard_map(
            self._function, mesh=self._plan.mesh, in_specs=tuple(_specs(a) for a in args), out_specs=_specs(self._out),
            check_vma=False,
        )  # fmt: skip
        jitted = jax.jit(sharded, donate_argnums=tuple(self._donate), out_shardings=_shardings(self._out))
        with self._isolated():
            return jitted.lower(*args)

    def finish(self, lowered: Any, variant: Variant | None = None, digest: str | None = None) -> None:
        """Compile what `lower` returned, unless the same is stored; runs outside the interpreter lock.

        `digest` is the program's own, under which a later start finds it without lowering.
        """
        stored = self._lowered_digest(lowered)
        if stored is None or not self.load(stored, variant):
            self._compiled[variant], is_new = program_files.compile_with(lambda: compile_lowered(lowered, self._plan))
            if stored is None or not is_new:
                return
            program_files.save(stored, self._compiled[variant], *self._trees(variant))
        if digest is not None:
            program_files.link(stored, digest)

    def _lowered_digest(self, lowered: Any) -> str | None:
        if not program_files.is_used():
            return None
        from jaxspec.runtime.store.fingerprint import UnknownError, lowered_digest

        try:
            return lowered_digest(lowered, self._plan.devices, choose_options(self._plan))
        except UnknownError:
            return None

    def digest(self, variant: Variant | None = None) -> str | None:
        """What the program is stored under; None where it is not stored."""
        if not program_files.is_used():
            return None
        from jaxspec.runtime.store.fingerprint import UnknownError, program_digest

        # Structures of pytrees hold what is no array, such as the names of their classes.
        rest = (self._plan.kernels, tuple(self._donate), _leaves(self._shapes(variant)), _leaves(self._out))
        try:
            with self._isolated():
                return program_digest(self.name, self._function, self._plan.devices, rest)
        except UnknownError as error:
            logging.getLogger(__name__).info("the program %s is not stored: %s", self.name, error)
            return None

    def load(self, digest: str, variant: Variant | None = None) -> bool:
        """Take the program from the store; False where it is not there."""
        found = program_files.load(digest, *self._trees(variant), self._plan.devices)
        if found is not None:
            self._compiled[variant] = found
        return found is not None

    def load_later(self, digest: str, variant: Variant | None, pool: Executor, begin: threading.Event) -> None:
        """Take the program from the store in the background, from `begin` on, or after a second.

        A call of it waits, or loads it where none has begun to. Where the file is of no use, the first call compiles.
        """

        def load() -> bool:
            begin.wait(LONGEST_HOLD)
            # A process that ends waits for the threads of its pools.
            return threading.main_thread().is_alive() and self.load(digest, variant)

        self._coming[variant] = digest, pool.submit(load), begin

    def wait(self, variant: Variant = GREEDY) -> None:
        """Wait until it is ready, if it is being loaded."""
        self._await(self.fit(variant))

    def _await(self, variant: Variant | None) -> str | None:
        """Wait for, or do, what `load_later` began; returns the digest, None where nothing had begun."""
        coming = self._coming.get(variant)
        if coming is None:
            return None
        digest, future, begin = coming
        if future.cancel():
            self.load(digest, variant)
        else:
            begin.set()
            future.result()
        return digest

    def _shapes(self, variant: Variant | None) -> list[Any]:
        args = list(self._args)
        if self._request is not None:
            args[self._request] = args[self._request].of_variant(variant)
        return args

    def _trees(self, variant: Variant | None) -> tuple[Any, Any]:
        return jax.tree.structure((tuple(self._shapes(variant)), {})), jax.tree.structure(self._out)

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        with (
            registry.using(self._plan.kernels),
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.disable_jit(False),
        ):
            yield

    def __call__(self, *args: Any) -> Any:
        """Dispatch; compiles first if needed."""
        return self.run(self.name, *args)

    def run(self, label: str, *args: Any) -> Any:
        """Dispatch; a trace shows this call by its `label`, for a program that serves several layers."""
        variant = None if self._request is None else args[self._request].variant
        compiled = self._give_nothing if self._elsewhere else self._compiled.get(variant)
        if compiled is None:
            digest = self._await(variant)
            if variant not in self._compiled:
                self.finish(self.lower(variant), variant, digest)
            compiled = self._compiled[variant]
        if hosts.several() and not self._elsewhere:
            compiled = functools.partial(_run_in_turn, compiled, self._plan)
        with jax.disable_jit(False):
            if recording.active is not None:
                return recording.active.program(label, self._plan, compiled, args)
            return compiled(*args)

    @functools.cached_property
    def _nothing(self) -> list[jax.Array]:
        return [empty(shape) for shape in jax.tree.leaves(self._out)]

    def _give_nothing(self, *_: Any) -> Any:
        """The results in a process that has no device of the program; arrays that hold nothing may be used twice."""
        return jax.tree.unflatten(jax.tree.structure(self._out), self._nothing)


# Loads what is not needed at once. One thread: weights are read and the first token is computed beside it.
_background = ThreadPoolExecutor(1, "jaxspec-programs")
LONGEST_HOLD = 1.0  # seconds

# What the last program over several processes gives, on CPUs.
_latest: list[Any] = []


def _run_in_turn(compiled: Any, plan: MeshPlan, *args: Any) -> Any:
    """Dispatch in one of several processes; a program may run before its call returns.

    CPUs run programs that do not depend on each other at the same time, in no fixed order. The collectives of two such
    programs would meet in the wrong pairs, so that programs over several processes wait for each other there.
    """
    together = plan.devices[0].platform == "cpu" and len({device.process_index for device in plan.devices}) > 1
    if together:
        jax.block_until_ready([leaf for leaf in _latest if not leaf.is_deleted()])
    out = compiled(*args)
    if together:
        _latest[:] = jax.tree.leaves(out)
    return out


@dataclasses.dataclass(frozen=True)
class Later:
    """Programs that nothing needs before an event, by name."""

    names: frozenset[str]
    begin: threading.Event


def compile_programs(
    programs: Sequence[Program], variant: Variant = GREEDY, *, later: Later | None = None
) -> float:  # fmt: skip
    """Compile what is not compiled yet for requests of a variant, in parallel.

    With `later`, what is stored is loaded in the background, and what `later` names after its event. Large files come
    first: the calling thread takes the small ones itself by the time it needs them. None waits for everything. Returns
    the wall time in seconds, 0.0 if nothing was to do.
    """
    waiting = [
        (program, program.fit(variant))
        for program in programs
        if not program.is_ready(variant) and not program.is_coming(variant)
    ]
    if not waiting:
        return 0.0
    start = time.perf_counter()
    keys = {key: key[0].digest(key[1]) for key in waiting}
    sizes = {key: program_files.size(digest) for key, digest in keys.items() if digest is not None}
    at_once = threading.Event()
    at_once.set()
    stored = [(key, size) for key in waiting if (size := sizes.get(key)) is not None]
    is_late = {key: later is not None and key[0].name in later.names for key in waiting}
    for key, _ in sorted(stored, key=lambda item: (is_late[item[0]], -item[1])):
        begin = later.begin if later is not None and is_late[key] else at_once
        key[0].load_later(str(keys[key]), key[1], _background, begin)
    missing = [key for key in waiting if sizes.get(key) is None]
    if missing:
        # Each compilation takes hundreds of megabytes while it runs: no more at once than there are cores.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = [pool.submit(program.finish, program.lower(fitted), fitted, keys[program, fitted])
                    for program, fitted in missing]  # fmt: skip
            for job in jobs:
                job.result()
        release_free_memory()
    if later is None:
        for program in programs:
            program.wait(variant)
    return time.perf_counter() - start


def release_free_memory() -> None:
    """Give freed pages back to the system, after compiling or loading: a quarter of all memory and more."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    # glibc alone keeps them, and has the function.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # pyright: ignore[reportOptionalMemberAccess]


def _leaves(tree: Any) -> tuple[str, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), leaves


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda s: s.sharding.spec, tree)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(s.sharding.mesh, s.sharding.spec), tree)
