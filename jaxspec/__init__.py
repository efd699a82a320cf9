"""jaxspec: lossless decoding of large language models with the lowest latency for a single request."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxspec.config import SamplingParams
    from jaxspec.errors import CheckpointError, ConfigError, JaxspecError
    from jaxspec.llm import LLM, generate
    from jaxspec.methods.auto import Auto
    from jaxspec.methods.autoregressive import Autoregressive
    from jaxspec.methods.chain import Chain
    from jaxspec.methods.lookup import PromptLookup
    from jaxspec.methods.specexec import SpecExec
    from jaxspec.methods.specinfer import SpecInfer
    from jaxspec.methods.swift.settings import Swift
    from jaxspec.methods.swiftspec.settings import SwiftSpec
    from jaxspec.results import Completion, DecodeStats, StreamEvent

__all__ = [
    "LLM",
    "Auto",
    "Autoregressive",
    "Chain",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DecodeStats",
    "JaxspecError",
    "PromptLookup",
    "SamplingParams",
    "SpecExec",
    "SpecInfer",
    "Swift",
    "SwiftSpec",
    "StreamEvent",
    "generate",
]

# Imported when first used, so that `jaxspec-decode --help` and usage errors do not wait a second for JAX.
_HOMES = {
    "LLM": "llm",
    "Auto": "methods.auto",
    "Autoregressive": "methods.autoregressive",
    "Chain": "methods.chain",
    "CheckpointError": "errors",
    "Completion": "results",
    "ConfigError": "errors",
    "DecodeStats": "results",
    "JaxspecError": "errors",
    "PromptLookup": "methods.lookup",
    "SamplingParams": "config",
    "SpecExec": "methods.specexec",
    "SpecInfer": "methods.specinfer",
    "Swift": "methods.swift.settings",
    "SwiftSpec": "methods.swiftspec.settings",
    "StreamEvent": "results",
    "generate": "llm",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxspec.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
