"""Methods by name. A method is one file (or folder) and one line here."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ConfigError, shown, suggest

if TYPE_CHECKING:
    from jaxspec.methods.base import Method

# Name to module and class; imported when first used, so that `--help` and usage errors need no JAX.
METHODS: dict[str, tuple[str, str]] = {
    "auto": ("jaxspec.methods.auto.settings", "Auto"),
    "ar": ("jaxspec.methods.autoregressive", "Autoregressive"),
    "chain": ("jaxspec.methods.chain", "Chain"),
    "lookup": ("jaxspec.methods.lookup", "PromptLookup"),
    "specexec": ("jaxspec.methods.specexec", "SpecExec"),
    "specinfer": ("jaxspec.methods.specinfer", "SpecInfer"),
    "swift": ("jaxspec.methods.swift.settings", "Swift"),
    "swiftspec": ("jaxspec.methods.swiftspec.settings", "SwiftSpec"),
}


# What vLLM, SGLang and llama.cpp call these methods, and words for none at all.
FOREIGN_NAMES = {
    "ngram": "lookup", "n-gram": "lookup", "draft_model": "chain", "draft": "chain", "standalone": "chain",
    "none": "ar", "off": "ar", "plain": "ar", "tree": "specexec",
}  # fmt: skip


def method_class(name: str) -> "type[Method]":
    """The class of a method's settings; raises `ConfigError` for an unknown name, with the nearest known one."""
    if name not in METHODS:
        meant = FOREIGN_NAMES.get(str(name).lower())
        raise ConfigError(f"unknown method {name!r}; " + (f"use {meant!r}" if meant else suggest(name, METHODS)))
    module, cls = METHODS[name]
    return getattr(importlib.import_module(module), cls)


def setting_fields(name: str) -> dict[str, Any]:
    """The settings of a method, by name: its dataclass fields."""
    cls: Any = method_class(name)
    return {field.name: field for field in dataclasses.fields(cls)}


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> "Method":
    """A method from its name and settings; raises `ConfigError` for a name or a setting that does not exist."""
    known = setting_fields(name)
    for setting in settings or {}:
        if setting not in known:
            raise ConfigError(f"method {name!r} has no setting {setting!r}; {suggest(setting, known)}")
    return method_class(name)(**(settings or {}))


def resolve_method(method: "str | Method") -> "Method":
    """A method object from a name or an object; raises `ConfigError` as `make_method`, or where it is neither."""
    from jaxspec.methods.base import Method

    if isinstance(method, str):
        method = make_method(method)
    if not isinstance(method, Method):
        raise ConfigError(f"method must be a name or a method object such as Autoregressive(), got {shown(method)}")
    return method


def check_draft_given(method: "Method", has_draft: bool) -> None:
    """Raise `ConfigError` where a method lacks the draft model that it needs, or is given one that it does not use."""
    from jaxspec.methods.core.settings import check_draft

    if method.needs_draft:
        check_draft(method.name, has_draft)
    if has_draft and not method.drafts:
        raise ConfigError(f"method {method.name!r} uses no draft model: leave the draft out")
