"""Names that other projects give to our options: refused by the right name, in Python as on the command line."""

import functools
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from jaxspec.errors import ConfigError, shown, suggest

# What vLLM, SGLang, llama.cpp, transformers, mlx-lm and SpecExec call these options.
_NAMES = {
    "num_draft_tokens": (
        "num-speculative-tokens", "speculative-num-draft-tokens", "speculative-num-steps", "draft", "draft-max",
        "draft-n", "spec-draft-n-max", "draft-length", "max-budget", "budget", "length",
    ),
    "draft_model": (
        "model-draft", "-md", "hf-repo-draft", "speculative-model", "speculative-draft-model-path", "assistant-model",
    ),
    "draft_devices": ("speculative-draft-tensor-parallel-size",),
    "method": ("speculative-algorithm", "spec-type", "gen-type"),
    "max_tokens": ("n-predict", "predict", "max-new-tokens", "max-length", "num-predict"),
    "target_devices": ("tensor-parallel-size", "-tp", "tp", "tp-size"),
    "max_context": ("max-model-len", "ctx-size", "-c", "context-length", "num-ctx", "max-seq-len"),
    "repetition_penalty": ("repeat-penalty",),
    "prompt_file": ("file", "-f"),
    "system": ("system-prompt", "-sys"),
    "stop": ("reverse-prompt", "-r", "stop-strings"),
    "min_probability": ("draft-p-min", "spec-draft-p-min"),
    "revision": ("hf-revision", "model-revision"),
    "interactive": ("conversation", "-cnv", "interactive-first"),
    "model": ("model-path", "hf-repo", "-hf"),
    "compile_cache": ("compilation-cache-dir",),
    "dtype": ("torch-dtype",),
    "expert_parallel": ("enable-expert-parallel",),
    "kv_dtype": ("kv-cache-dtype", "cache-type-k", "cache-type-v", "-ctk", "-ctv"),
}  # fmt: skip
# What has no single option here: what to write, and an option that the command must have for that.
_HINTS = {
    "--draft": ("use --draft-model for a checkpoint, --num-draft-tokens for a number of tokens", "--draft-model"),
    "--speculative-config": ("use --method, --draft-model and --num-draft-tokens", "--draft-model"),
    "--do-sample": ("give a --temperature above 0", "--temperature"),
    "--device": ("JAX chooses the devices; the variable JAX_PLATFORMS=cpu names a platform", "--kernels"),
    "--quantization": ("the checkpoint says how its weights are quantised; jaxspec-convert quantises", "--dtype"),
    "--prompt": ("give the prompt without an option", "--prompt-file"),
    "-p": ("give the prompt without an option", "--prompt-file"),
    "-ngl": ("all layers run on the devices; --offload says where else they are kept", "--offload"),
}
# Of the commands that run in several processes.
_OF_SEVERAL_PROCESSES = ("--coordinator", "--num-processes", "--process-id", "--draft-process")
_SHORT = {name for names in _NAMES.values() for name in names if name.startswith("-")}
_OURS = {name.lstrip("-").replace("-", "_"): ours for ours, names in _NAMES.items() for name in names}
# Settings of methods, and what `LLM` calls the checkpoint of a draft.
_METHOD_SETTINGS, _IN_PYTHON = ("num_draft_tokens", "min_probability"), {"draft_model": "draft"}

_Class = TypeVar("_Class", bound=type)


def own_name(name: str) -> str | None:
    """Our name of another project's option, written with underscores; None where there is none."""
    return _OURS.get(name)


def option_hint(option: str, known: Collection[str]) -> str | None:
    """The option to write for another project's, such as "-md", if this command, which has those `known`, has it.

    Of options of other commands, those of several processes are explained.
    """
    if not option.startswith("-") or (not option.startswith("--") and option not in {*_SHORT, *_HINTS}):
        return None
    if option in _HINTS:
        hint, needed = _HINTS[option]
        return hint if needed in known else None
    if option in _OF_SEVERAL_PROCESSES:
        return "this command runs in one process"
    ours = own_name(option.lstrip("-").replace("-", "_"))
    if ours is None:
        return None
    flag = "--" + ours.replace("_", "-")
    if flag in known:
        return f"use {flag}"
    return f"use --set {ours}=..." if "--set" in known and "--config" in known else None


def check_keywords(of: str, given: Collection[str], known: Collection[str], others: Collection[str] = ()) -> None:
    """TypeError for a keyword argument that `of` does not have; `known` and `others` are the words to suggest.

    `others` are names of `of`'s neighbour: options of `LLM` for `SamplingParams`, and the other way round.
    """
    for name in given:
        if name in known:
            continue
        ours = own_name(name) or name
        ours = _IN_PYTHON.get(ours, ours)
        if ours in known:
            hint = f"use {ours!r}"
        elif ours in others:
            hint = f"{ours!r} belongs to {'LLM' if of == 'SamplingParams' else 'SamplingParams'}"
        elif ours in _METHOD_SETTINGS:
            hint = f"it is a setting of a method, such as method=SpecExec({ours}=...)"
        elif hint := _HINTS.get("--" + name.replace("_", "-"), ("",))[0]:
            hint = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), hint)
        else:
            hint = suggest(name, known)
        raise TypeError(f"{of} has no option {name!r}; {hint}")


def refuse_names(of: str, given: Collection[object], known: Collection[str]) -> None:
    """ConfigError for a key of a mapping that is none of `known`."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{of} has no {shown(name)}; known: {', '.join(known)}")


def refuse_unknown(others: Callable[[], Collection[str]]) -> Callable[[_Class], _Class]:
    """Class decorator of a dataclass: an unknown keyword is refused as by `check_keywords`."""

    def decorate(cls: _Class) -> _Class:
        create: Any = cls.__init__

        @functools.wraps(create)
        def init(self: Any, *values: Any, **named: Any) -> None:
            check_keywords(cls.__name__, named, cls.__dataclass_fields__, others())
            create(self, *values, **named)

        cls.__init__ = init
        return cls

    return decorate
