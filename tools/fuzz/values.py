"""Public values: sampling parameters, engine and method settings, prompts and paths, of every type, range and size."""

import dataclasses
import random
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.native_files import make_source
from fuzz.wild import FLOATS, INTEGERS, TEXTS, wild_value
from jaxspec import LLM, SamplingParams, generate
from jaxspec.cli.options import merge_options
from jaxspec.config import EngineConfig
from jaxspec.methods.registry import METHODS, make_method, method_class, resolve_method
from jaxspec.models.layer_set import parse_layers

NUMBERS = (*INTEGERS[:9], *FLOATS[:8])


@cache
def make_llm() -> LLM:
    """A tiny model; its programs are compiled once per process."""
    return LLM(make_source()[0], method="ar", compile_cache=tempfile.gettempdir() + "/jaxspec-fuzz-compiled")


def pick(rng: random.Random, default: Any) -> Any:
    """A value for a field: its default, a likely number, or anything."""
    kind = rng.random()
    return default if kind < 0.3 else rng.choice(NUMBERS) if kind < 0.6 else wild_value(rng)


def pick_fields(rng: random.Random, cls: Any) -> dict[str, Any]:
    """Some fields of a dataclass with random values."""
    fields = dataclasses.fields(cls)
    return {f.name: pick(rng, f.default) for f in rng.sample(fields, rng.randrange(1, min(5, len(fields)) + 1))}


def run(rng: random.Random, folder: Path) -> None:
    """One call."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls = (_sampling, _sampling, _generate, _method, _method, _engine, _prompt, _layers, _model, _options)
        rng.choice(calls)(rng)


def _sampling(rng: random.Random) -> None:
    SamplingParams(**pick_fields(rng, SamplingParams))


def _generate(rng: random.Random) -> None:
    fields: dict[str, Any] = {"max_tokens": 3} | pick_fields(rng, SamplingParams)
    sampling = SamplingParams(**fields)
    if sampling.n > 4 or (sampling.max_tokens or 99) > 32:
        sampling = dataclasses.replace(sampling, n=1, max_tokens=3, min_tokens=0)
    completion = make_llm().generate("ab a", sampling)
    assert isinstance(completion.text, str)


def _method(rng: random.Random) -> None:
    name = rng.choice([*METHODS])
    if rng.random() < 0.2:
        resolve_method(wild_value(rng))
    make_method(name, pick_fields(rng, method_class(name)))


def _engine(rng: random.Random) -> None:
    EngineConfig(**pick_fields(rng, EngineConfig))


def _prompt(rng: random.Random) -> None:
    llm, value = make_llm(), wild_value(rng)
    if isinstance(value, range):
        value = range(5)
    sampling = SamplingParams(max_tokens=2) if rng.random() < 0.7 else wild_value(rng)
    if rng.random() < 0.1:
        llm.with_method(wild_value(rng))
    encode: Any = llm.encode
    call: Any = rng.choice((llm.generate, llm.chat, llm.stream, lambda v, s: encode(v)))
    call(rng.choice((value, [value], [{"role": value, "content": "a"}])), sampling)


def _layers(rng: random.Random) -> None:
    words = ("attention=", "mlp=", "1", "3-5", ",", ";", "-", "0-999999", "none", *TEXTS)
    parse_layers("".join(rng.choice(words) for _ in "abcd"), rng.choice((1, 2, 5, 30)))


def _model(rng: random.Random) -> None:
    options = {rng.choice(("draft", "method", "dtype", "kernels", "max_context", "target_devices")): wild_value(rng)}
    if rng.random() < 0.5:
        generate("a", model=wild_value(rng))  # pyright: ignore[reportArgumentType]
    LLM(rng.choice((wild_value(rng), "/nowhere")), **options)


def _options(rng: random.Random) -> None:
    value = rng.choice((*TEXTS, "[" * 5000, "9" * 5000, "1e999", "nan", "{a=1}", "[[1,2],[3]]"))
    merge_options({}, rng.choice((None, value)), [f"{rng.choice(TEXTS)}={value}", f"seed={value}"], {"seed": (int,)})
