"""Programs: functions of one shard, compiled ahead of time for the shapes they will meet.

XLA's options are its own but for a few. `XLA_FLAGS`, on TPUs also `LIBTPU_INIT_ARGS`, has the last word: an option that
it names is not set here.
"""

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspec.runtime import hosts
from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.store import program_files
from jaxspec.runtime.transfer import empty
from pallas_kernels import registry
from pallas_kernels.native import library

# By option, its value and why. docs/kernels.md shows the same table.
GPU_OPTIONS = {
    # XLA's own list, and loops and branches: with them a draft's search is one CUDA graph, in which the device itself
    # decides whether to go on. Else the host waits for the device in every turn.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    ),
}
# Added to the kinds of work in graphs where a program has several devices: its all-reduces are nodes of the graph then.
COLLECTIVES = ",COLLECTIVES"
# Weights come in tiles of 8 rows. With tiles of 16, which tpu7x prefers, XLA copies all of them before a loop.
TPU_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
# On CPUs nothing; tests that need no fast programs compile quickly.
CPU_OPTIONS: dict[str, str | bool] = {}


class Program:
    """One compiled entry point.

    The function is written for a shard and runs under `jax.shard_map`; each argument is described by a pytree of
    `jax.ShapeDtypeStruct` with shardings, from which the partition specs follow.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], plan: MeshPlan, args: Sequence[Any], out: Any,
        donate: Sequence[int] = (),
    ):  # fmt: skip
        """`out` describes the result as `args` do the arguments; `donate` lists argument numbers.

        A request among the arguments (`jaxspec.sampling.request`) has a `variant`, and there is a program for each.
        """
        self.name = name
        self._function, self.plan, self._args, self._out, self._donate = function, plan, tuple(args), out, donate
        self._request = next((place for place, arg in enumerate(args) if hasattr(arg, "of_variant")), None)
        self._compiled: dict[Hashable, Any] = {}
        self.stored_as: str | None = None  # the latest digest
        self._coming: dict[Hashable, tuple[str, Future[bool]]] = {}  # see `load_later`
        # Where it runs in other processes alone: nothing is compiled, and the results have no part here.
        here = jax.process_index()
        self._elsewhere = hosts.several() and all(device.process_index != here for device in plan.devices)

    def fit(self, variant: Hashable) -> Hashable:
        """The variant of this program that serves requests of a given one; None is the program for all of them."""
        return None if self._request is None or self.plan.kernels.takes_cpu_forms else variant

    def is_ready(self, variant: Hashable = None) -> bool:
        """Whether it is compiled for requests of a variant."""
        return self._elsewhere or self.fit(variant) in self._compiled

    def is_coming(self) -> bool:
        """Whether it is being loaded from the store in the background."""
        return any(not future.done() for _, future in self._coming.values())

    def lower(self, variant: Hashable = None, platforms: tuple[str, ...] | None = None) -> Any:
        """Trace and lower; Python work, to be done in the main thread. `variant` is one that `fit` gives.

        `platforms` are those of JAX to lower for, None for that of the devices.
        What the caller set for code of their own (64-bit types, strict promotion, no jit) does not reach ours.
        """
        args = self._shapes(variant)
        sharded = jax.shard_map(
            self._function, mesh=self.plan.mesh, in_specs=tuple(_specs(a) for a in args), out_specs=_specs(self._out),
            check_vma=False,
        )  # fmt: skip
        jitted = jax.jit(sharded, donate_argnums=tuple(self._donate), out_shardings=_shardings(self._out))
        with self._isolated():
            return jitted.trace(*args).lower(lowering_platforms=platforms)

    def finish(self, lowered: Any, variant: Hashable = None, digest: str | None = None) -> None:
        """Compile what `lower` returned, unless the same is stored; runs outside the interpreter lock.

        `digest` is the program's own, under which a later start finds it without lowering.
        """
        stored = self._lowered_digest(lowered)
        if stored is None or not self.load(stored, variant):
            self._compiled[variant], is_new = program_files.compile_with(lambda: compile_lowered(lowered, self.plan))
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
            return lowered_digest(lowered, self.plan.devices, choose_options(self.plan))
        except UnknownError:
            return None

    def digest(self, variant: Hashable = None) -> str | None:
        """The key that the program is stored under; None where it is not stored."""
        if not program_files.is_used():
            return None
        from jaxspec.runtime.store.fingerprint import UnknownError, program_digest

        # Structures of pytrees hold what is no array, such as the names of their classes.
        rest = (self.plan.kernels, tuple(self._donate), _leaves(self._shapes(variant)), _leaves(self._out))
        try:
            with self._isolated():
                self.stored_as = program_digest(self.name, self._function, self.plan.devices, rest)
            return self.stored_as
        except UnknownError as error:
            logging.getLogger(__name__).info("the program %s is not stored: %s", self.name, error)
            return None

    def load(self, digest: str, variant: Hashable = None) -> bool:
        """Take the program from the store; False where it is not there."""
        found = program_files.load(digest, *self._trees(variant), self.plan.devices)
        if found is not None:
            self._compiled[variant] = found
        return found is not None

    def load_later(self, digest: str, variant: Hashable = None) -> None:
        """Take the program from the store in the background.

        A call of it waits, or loads it where that has not begun. Where the file is of no use, the first call compiles.
        """

        def load() -> bool:
            # A process that ends waits for the threads of its pools.
            return threading.main_thread().is_alive() and self.load(digest, variant)

        self._coming[variant] = digest, _background.submit(load)

    def wait(self) -> None:
        """Wait until all that is being loaded is there."""
        for variant in self._coming:
            self._await(variant)

    def _await(self, variant: Hashable) -> str | None:
        """Wait for, or do, what `load_later` began; returns the digest, None where nothing had begun."""
        digest, future = self._coming.get(variant, (None, None))
        if digest is None or future is None:
            return None
        if not future.cancel():
            future.result()
        elif variant not in self._compiled:  # no earlier call loaded it
            self.load(digest, variant)
        return digest

    def _shapes(self, variant: Hashable) -> list[Any]:
        args = list(self._args)
        if self._request is not None:
            args[self._request] = args[self._request].of_variant(variant)
        return args

    def _trees(self, variant: Hashable) -> tuple[Any, Any]:
        return jax.tree.structure((tuple(self._shapes(variant)), {})), jax.tree.structure(self._out)

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        with (
            _without_stacks(self.plan.kernels.platform),
            registry.using(self.plan.kernels),
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
            compiled = functools.partial(_run_in_turn, compiled, self.plan)
        with jax.disable_jit(False):
            if recording.active is not None:
                return recording.active.program(label, self.plan, compiled, args)
            return compiled(*args)

    @functools.cached_property
    def _nothing(self) -> list[jax.Array]:
        return [empty(shape) for shape in jax.tree.leaves(self._out)]

    def _give_nothing(self, *_: Any) -> Any:
        """The results in a process that has no device of the program; arrays that hold nothing may be used twice."""
        return jax.tree.unflatten(jax.tree.structure(self._out), self._nothing)


@contextlib.contextmanager
def _without_stacks(platform: str) -> Iterator[None]:
    """Lower for TPUs without the Python stacks of operations: XLA's compiler for them compares these, for minutes."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0 if platform == "tpu" else limit)
    try:
        yield
    finally:
        jax.config.update(name, limit)


# Loads what is not needed at once. One thread: weights are read and the first token is computed beside it.
_background = ThreadPoolExecutor(1, "jaxspec-programs")

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


def compile_programs(programs: Sequence[Program], variant: Hashable = None, *, background: bool = False) -> float:
    """Compile what is not compiled yet for requests of a variant, in parallel; what is stored is loaded.

    With `background`, loading goes on after the return, large files first: drafting needs the largest, and a call loads
    a small one at once. Returns the wall time in seconds, 0.0 if nothing was to do.
    """
    waiting = [(one, one.fit(variant)) for one in programs if not one.is_ready(variant) and not one.is_coming()]
    if not waiting:
        return 0.0
    start = time.perf_counter()
    keys = {key: key[0].digest(key[1]) for key in waiting}
    sizes = {key: program_files.size(digest) for key, digest in keys.items() if digest is not None}
    stored = [(size, key) for key, size in sizes.items() if size is not None]
    for _, (program, fitted) in sorted(stored, key=lambda item: item[0], reverse=True):
        program.load_later(str(keys[program, fitted]), fitted)
    missing = [key for key in waiting if sizes.get(key) is None]
    if missing:
        # Each compilation takes hundreds of megabytes while it runs: no more at once than there are cores.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = [pool.submit(program.finish, program.lower(fitted), fitted, keys[program, fitted])
                    for program, fitted in missing]  # fmt: skip
            for job in jobs:
                job.result()
        release_free_memory()
    if not background:
        for program in programs:
            program.wait()
    return time.perf_counter() - start


def expect_program(name: str) -> None:
    """Begin to load the program that an earlier process remembered under a name (`remember_program`)."""
    library.load()  # a program that is loaded finds its operations
    program_files.expect(name, _background.submit)


def remember_program(name: str, plan: MeshPlan, programs: Sequence[Program]) -> None:
    """Remember the largest of the programs on a mesh, for the next start."""
    stored = {program.stored_as for program in programs if program.plan.devices == plan.devices}
    if digests := stored - {None}:
        largest = max(map(str, digests), key=lambda digest: program_files.size(digest) or 0)
        program_files.remember(name, largest, plan.devices)


def release_free_memory() -> None:
    """Give freed pages back to the system, after compiling or loading: a quarter of all memory and more."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    # glibc alone keeps them, and has the function.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # pyright: ignore[reportOptionalMemberAccess]


def choose_options(plan: MeshPlan) -> dict[str, Any] | None:
    """Compiler options of programs on a mesh; None where there are none."""
    known: dict[str, dict[str, Any]] = {"gpu": GPU_OPTIONS, "tpu": TPU_OPTIONS, "cpu": CPU_OPTIONS}
    options = known.get(plan.kernels.platform, {})
    if options is GPU_OPTIONS and len(plan.devices) > 1:
        options = {name: f"{value}{COLLECTIVES}" for name, value in options.items()}
    given = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    return {name: value for name, value in options.items() if f"--{name}" not in given} or None


def compile_lowered(lowered: Any, plan: MeshPlan) -> Any:
    """Compile what was lowered for a mesh; where this JAX does not know the options, without them, said once."""
    options = choose_options(plan)
    if options is None:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # Options of another version; all other errors come again without them.
        warn_once(f"XLA does not take all options that jaxspec sets, programs may be slower: {str(error)[:200]}")
        return lowered.compile()


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, the same one once per process."""
    logging.getLogger(__name__).warning("%s", message)


def _leaves(tree: Any) -> tuple[str, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), leaves


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda s: s.sharding.spec, tree)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(s.sharding.mesh, s.sharding.spec), tree)
