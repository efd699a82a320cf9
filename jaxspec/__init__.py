"""jaxspec: lossless decoding of large language models with the lowest latency for a single query."""

from jaxspec.config import SamplingParams
from jaxspec.errors import CheckpointError, ConfigError, JaxspecError
from jaxspec.generate import LLM, generate
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.results import Completion, DecodeStats, StreamEvent

__all__ = [
    "LLM",
    "Autoregressive",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DecodeStats",
    "JaxspecError",
    "SamplingParams",
    "StreamEvent",
    "generate",
]
