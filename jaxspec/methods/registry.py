"""Methods by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError, suggest
from jaxspec.methods.auto import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Method
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.settings import check_draft
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swiftspec.settings import SwiftSpec

METHODS: dict[str, type] = {
    m.name: m for m in (Auto, Autoregressive, Chain, PromptLookup, SpecExec, SpecInfer, Swift, SwiftSpec)
}


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and settings.

    Raises:
      ConfigError: an unknown name, or a setting that the method does not have.
    """
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; {suggest(name, METHODS)}")
    settings = dict(settings or {})
    known = [field.name for field in dataclasses.fields(METHODS[name])]
    for setting in settings:
        if not known:
            raise ConfigError(f"method {name!r} has no settings, got {setting!r}")
        if setting not in known:
            raise ConfigError(f"method {name!r} has no setting {setting!r}; {suggest(setting, known)}")
    return METHODS[name](**settings)


def resolve_method(method: str | Method) -> Method:
    """A method object from a name or an object.

    Raises:
      ConfigError: as `make_method`; or neither a name nor an object.
    """
    if isinstance(method, str):
        method = make_method(method)
    if isinstance(method, type) or not isinstance(method, Method):
        raise ConfigError(f"method must be a name or a method object such as Autoregressive(), got {method!r:.80}")
    return method


def check_draft_given(method: Method, has_draft: bool) -> None:
    """A method that drafts with a model has one, and a draft model that nobody asks is a mistake.

    Raises:
      ConfigError: otherwise.
    """
    if method.needs_draft:
        check_draft(method.name, has_draft)
    if has_draft and not method.drafts:
        raise ConfigError(f"method {method.name!r} uses no draft model: leave the draft out")
