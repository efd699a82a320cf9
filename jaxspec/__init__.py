"""jaxspec: lossless decoding of large language models with the lowest latency for a single request."""

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in `typing`, whose import would be half of what `import jaxspec` takes

if TYPE_CHECKING:
    from jaxspec.async_llm import AsyncLLM
    from jaxspec.config import SamplingParams, StructuredOutputs
    from jaxspec.errors import CheckpointError, ConfigError, DistributedError, JaxspecError
    from jaxspec.llm import LLM
    from jaxspec.methods.auto.settings import Auto
    from jaxspec.methods.autoregressive import Autoregressive
    from jaxspec.methods.chain import Chain
    from jaxspec.methods.lookup import PromptLookup
    from jaxspec.methods.specexec import SpecExec
    from jaxspec.methods.specinfer import SpecInfer
    from jaxspec.methods.swift.settings import Swift
    from jaxspec.methods.swiftspec.settings import SwiftSpec
    from jaxspec.one_call import generate
    from jaxspec.results import Completion, DecodeStats, Stream, StreamEvent
    from jaxspec.runtime.distributed import Distributed

__all__ = [
    "LLM",
    "AsyncLLM",
    "Auto",
    "Autoregressive",
    "Chain",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DecodeStats",
    "Distributed",
    "DistributedError",
    "JaxspecError",
    "PromptLookup",
    "SamplingParams",
    "SpecExec",
    "SpecInfer",
    "Swift",
    "SwiftSpec",
    "Stream",
    "StreamEvent",
    "StructuredOutputs",
    "__version__",
    "generate",
]

# Imported when first used, so that `jaxspec-decode --help` and usage errors do not wait a second for JAX.
_HOMES = {
    "async_llm": ["AsyncLLM"],
    "config": ["SamplingParams", "StructuredOutputs"],
    "errors": ["CheckpointError", "ConfigError", "DistributedError", "JaxspecError"],
    "llm": ["LLM"],
    "methods.auto.settings": ["Auto"],
    "methods.autoregressive": ["Autoregressive"],
    "methods.chain": ["Chain"],
    "methods.lookup": ["PromptLookup"],
    "methods.specexec": ["SpecExec"],
    "methods.specinfer": ["SpecInfer"],
    "methods.swift.settings": ["Swift"],
    "methods.swiftspec.settings": ["SwiftSpec"],
    "one_call": ["generate"],
    "results": ["Completion", "DecodeStats", "Stream", "StreamEvent"],
    "runtime.distributed": ["Distributed"],
}


def __getattr__(name: str) -> object:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxspec.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
