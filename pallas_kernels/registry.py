"""Which implementation of each operation a program is traced with.

A mesh owns the choice (`MeshPlan.kernels`), and `selection.choose` makes it. `using` sets it while a program for the
mesh is traced, and every operation reads it with `current`.

GPU kernels are found by name. The implementation `mosaic` of the operation `tree_attention` is the module
`pallas_kernels/tree_attention/mosaic.py`. Such a module has two functions:

* `tree_attention(...)` is the operation, with the contract that its `api.py` states.
* `supports(...) -> bool` says whether it takes a call. It looks at `current()` and at the operands' shapes and dtypes,
  so the operands may be abstract. A call that it refuses goes to the next implementation, in the end to XLA.

Both run in Pallas' interpreter where `current().interpret` is set. Tests set it on machines without a GPU.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import logging
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

Capability = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The implementations that programs of one mesh use.

    Attributes:
      name: "xla"; "cpu" for the native library; or a set of GPU kernels.
      platform: platform of the devices, "cpu" or "gpu" for instance. XLA's forms of an operation differ by it.
      threads: most threads that one native call uses.
      implementations: GPU kernels as (operation, implementation). Those of one operation are tried in this order. XLA
        runs the other operations, and the calls that no implementation takes.
      automatic: whether each call of attention goes to what is fastest there, by `preferred` of its config: in its
        order, and to XLA where nothing that it names is at hand.
      own: the implementation that users asked for by name, or None. They are told of a call that it does not take.
      capability: CUDA compute capability of the GPU, or None.
      device_kind: JAX's name of the GPU. Tuned block sizes are found by it.
      multiprocessors: streaming multiprocessors of the GPU. The default is a small GPU's, where JAX does not say.
      interpret: whether Pallas kernels run in their interpreter, which is for tests.
      exact: whether a row's bits must not depend on the number of rows, see `exact_rows.py`; native kernels give that.
    """

    name: str
    platform: str
    threads: int = 1
    implementations: tuple[tuple[str, str], ...] = ()
    automatic: bool = False
    own: str | None = None
    capability: Capability | None = None
    device_kind: str = ""
    multiprocessors: int = 64
    interpret: bool = False
    exact: bool = False

    @property
    def invariant(self) -> bool:
        """Whether a row's bits do not depend on the rows of a pass beside it."""
        return self.native or self.exact

    @property
    def native(self) -> bool:
        """Whether operations go to the native CPU library, which takes the number of active rows as data."""
        return self.name == "cpu"

    @property
    def takes_cpu_forms(self) -> bool:
        """Whether programs take the forms that are fast on a CPU: a branch or a loop on data where it spares work.

        Accelerators compute it instead. On a GPU a branch is a launch or a wait, on a TPU code for each side of it.
        """
        return self.platform == "cpu"

    @property
    def loops_are_free(self) -> bool:
        """Whether a program runs as one module with its loops on data, for which neither host nor launches cost time.

        A GPU's loop lies in a CUDA graph (`runtime/program.py`), so that no host waits for it, but each turn is a row
        of launches after each other.
        """
        return self.platform in ("cpu", "tpu")

    @property
    def reads_planes(self) -> bool:
        """Whether weights in blocks are laid out for kernels where they can be: in planes, on TPUs in columns."""
        return bool(self.candidates("linear"))

    def candidates(self, operation: str) -> tuple[str, ...]:
        """Implementations of an operation, in the order they are tried."""
        return tuple(implementation for named, implementation in self.implementations if named == operation)

    def order(self, operation: str, *operands: Any, **options: Any) -> tuple[str, ...]:
        """Implementations of an operation in the order they are tried for a call."""
        names = self.candidates(operation)
        # No set has several implementations of another operation.
        if self.automatic and operation == "tree_attention":
            config = importlib.import_module("pallas_kernels.tree_attention.config")
            return tuple(name for name in config.preferred(*operands, **options) if name in names)
        return names

    def find(self, operation: str, *operands: Any, **options: Any) -> ModuleType | None:
        """The module of the first implementation of an operation that takes a call, or None for XLA."""
        for name in self.order(operation, *operands, **options):
            module = import_implementation(operation, name)
            taken = module.supports(*operands, **options)
            if name == self.own:
                _record_call(self.name, operation, None if taken else f"{operation} of {_describe(operands)}")
            if taken:
                return module
        return None

    def own_calls(self) -> dict[str, "OwnCalls"]:
        """The calls so far to the implementation that users asked for by name, by operation."""
        return {operation: calls for (name, operation), calls in _own_calls.items() if self.own and name == self.name}


def import_implementation(operation: str, implementation: str) -> ModuleType:
    """The module of an implementation. Importing Pallas takes a second, which CPU users need not spend."""
    return importlib.import_module(f"pallas_kernels.{operation}.{implementation}")


_current: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar("kernels", default=None)


def current() -> Kernels:
    """The kernels that `using` set, or XLA on the default backend."""
    return _current.get() or Kernels("xla", jax.default_backend())


@contextlib.contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Trace with `kernels`."""
    token = _current.set(kernels)
    try:
        yield
    finally:
        _current.reset(token)


@dataclasses.dataclass
class OwnCalls:
    """Whether an implementation that was asked for by name took any call, and the first one that it did not take."""

    taken: bool = False
    refused: str | None = None


# Of this process, by set and operation.
_own_calls: dict[tuple[str, str], OwnCalls] = {}


def _record_call(name: str, operation: str, refused: str | None) -> None:
    """Remember a call. The first one that is refused gives one warning per process."""
    calls = _own_calls.setdefault((name, operation), OwnCalls())
    if refused is None:
        calls.taken = True
    elif calls.refused is None:
        calls.refused = refused
        logging.getLogger(__name__).warning(
            "kernels %r were asked for, but do not take %s, and maybe other calls like it", name, refused
        )


def _describe(operands: Sequence[Any]) -> str:
    """Dtypes and shapes of the operands that are arrays. A weight in blocks has a format in place of the dtype."""
    kinds = [(getattr(each, "dtype", getattr(each, "format", None)), getattr(each, "shape", None)) for each in operands]
    return ", ".join(f"{kind}{list(shape)}" for kind, shape in kinds if kind is not None and shape)
