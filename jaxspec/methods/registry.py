"""Methods by name."""

from jaxspec.errors import ConfigError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Method
from jaxspec.suggest import suggest

METHODS: dict[str, type[Autoregressive]] = {Autoregressive.name: Autoregressive}

# Names that DESIGN promises and this version does not have: refused by name, never taken for a typing error.
PLANNED = ("chain", "lookup", "specexec", "specinfer", "swiftspec", "swift")


def resolve_method(method: str | Method, has_draft: bool) -> Method:
    """A method object from a name or an object; "auto" picks what fits.

    Raises:
      ConfigError: an unknown or not yet available name, or a draft that the method would not use.
    """
    if isinstance(method, str):
        name = Autoregressive.name if method == "auto" else method
        if name in PLANNED:
            raise ConfigError(
                f"method {name!r} is not available in this version; available: auto, {', '.join(METHODS)}"
            )
        if name not in METHODS:
            raise ConfigError(f"unknown method {name!r}; {suggest(name, ['auto', *METHODS, *PLANNED])}")
        method = METHODS[name]()
    if isinstance(method, type) or not isinstance(method, Method):
        raise ConfigError(f"method must be a name or a method object such as Autoregressive(), got {method!r:.80}")
    if has_draft:
        raise ConfigError(f"method {method.name!r} uses no draft model: leave the draft out")
    return method
