"""Which methods are measured, and the errors of methods that do not fit the models."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.bench.run import BASELINE, Column
from jaxspec.errors import ConfigError
from jaxspec.methods import registry
from jaxspec.methods.registry import METHODS

# The method whose tree sizes `budgets` sweep, and its setting.
SWEPT, BUDGET = "specexec", "num_draft_tokens"


def default_methods(has_draft: bool, apart: bool = False, streamed: bool = False) -> list[str]:
    """Names of the methods that fit: with a draft all, else those that need none.
    A draft `apart` has devices of its own, which rules out methods that draft on the target's. Methods that draft with
    the target's layers are ruled out where those are `streamed`.
    """
    return [name for name in METHODS if why_unfit(name, has_draft, apart, streamed) is None]


def why_unfit(name: str, has_draft: bool, apart: bool, streamed: bool) -> str | None:
    """The reason why `default_methods` leaves a method out; None where it does not."""
    method = registry.method_class(name)
    if method.needs_draft and not has_draft:
        return "needs a draft model (--draft-model)"
    if streamed and method.own_layers:
        return "drafts with the target's own layers, which --offload streams"
    if apart and method.drafts and not method.own_devices:
        return "runs the draft on the target's devices (--draft-devices, --draft-platform)"
    return None


def make_columns(
    names: Iterable[str], settings: Mapping[str, Mapping[str, Any]] | None = None, budgets: Sequence[int] | None = None
) -> list[Column]:
    """Columns for methods by name, each once; the baseline comes first, named or not.
    `settings` holds, by method name, values of its fields that are not the default. Each of `budgets`, in draft tokens,
    becomes a column of SpecExec, in place of its default one. Raises `ConfigError` for an unknown method or field (the
    nearest name is given), and for a refused value; also for settings or budgets of a method that is not measured.
    """
    settings = settings or {}
    names = list(dict.fromkeys([BASELINE, *names]))
    for name in names:
        make_method(name)  # report an unknown name before any other error
    for name in settings:
        if name not in names:
            raise ConfigError(f"a setting is given for {name!r}, which is not measured: {', '.join(names)} are")
    if budgets and SWEPT not in names:
        raise ConfigError(f"budgets are swept for {SWEPT}, which is not measured: add it to the methods")
    columns = []
    for name in names:
        given = settings.get(name, {})
        if name == SWEPT and budgets:
            if BUDGET in given:
                raise ConfigError(
                    f"{SWEPT}.{BUDGET} is set and swept: give --set {SWEPT}.{BUDGET} or --budgets, not both"
                )
            # Made anew, so that settings derived from the budget follow it.
            swept = {f"{name}[{BUDGET}={budget}]": {**given, BUDGET: budget} for budget in budgets}
        else:
            swept = {name: given}
        columns += [Column(label, make_method(name, values)) for label, values in swept.items()]
    return columns


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """A method by name with some settings; see `make_columns` for the errors."""
    if name == "all":
        raise ConfigError(f"{name!r} is no method to compare with others; known: {', '.join(METHODS)}")
    return registry.make_method(name, settings)


def loading_method(columns: Sequence[Column], has_draft: bool, given: bool = True, apart: bool = False) -> Any:
    """The method to load models with: the first that uses the draft, if there is one, else the first.
    The user named the draft if it was `given`; it has devices of its own if `apart`. Raises `ConfigError` if a column
    needs a draft and there is none, no column uses the given one, or one cannot use it apart.
    """
    drafting = [column for column in columns if column.method.drafts]
    if has_draft and given and not drafting:
        raise ConfigError(f"none of the methods {', '.join(c.label for c in columns)} uses a draft model: leave it out")
    needing = [column for column in columns if column.method.needs_draft]
    if needing and not has_draft:
        raise ConfigError(f"{needing[0].label} needs a draft model: name one, or leave the method out")
    together = [column.label for column in drafting if not column.method.own_devices]
    if apart and (together or not drafting):
        others = ", ".join(together) or "plain decoding"
        raise ConfigError(f"draft_devices and draft_platform are for swiftspec; {others} cannot use them")
    return (drafting or columns)[0].method
