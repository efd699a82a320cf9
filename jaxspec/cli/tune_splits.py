"""`jaxspec-tune --method swiftspec`: tables and preset of the placement profile."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.bench.prompts import BenchPrompt
    from jaxspec.config import SamplingParams
    from jaxspec.tune.swiftspec import SplitResult


def find_split(
    given: Mapping[str, Any],
    devices: int | None,
    prompts: "Sequence[BenchPrompt]",
    sampling: "SamplingParams",
    repeats: int,
    command: str,
    progress: Callable[[str], None],
) -> "list[SplitResult]":
    """Profile every split of `devices`, all there are if None; `given` are options of the model."""
    import jax

    from jaxspec.llm import LLM
    from jaxspec.tune.swiftspec import profile_splits

    available = len(jax.devices())
    devices = available if devices is None else devices
    if not 2 <= devices <= available:
        raise ConfigError(
            f"--method swiftspec splits at least 2 devices and at most the {available} there are, got {devices}; "
            "on CPU, JAX_NUM_CPU_DEVICES=N makes N of them"
        )

    def load(target: int, draft: int) -> LLM:
        return LLM(
            given["model"], draft=given["draft_model"], method="swiftspec", dtype=given["dtype"],
            kernels=given["kernels"], target_devices=target, draft_devices=draft,
        )  # fmt: skip

    return profile_splits(load, devices, prompts, sampling, repeats, command, progress)


def print_splits(results: "Sequence[SplitResult]", console: Any) -> None:
    """A line for each split and setting, the fastest first."""
    from rich.table import Table

    table = Table("target", "draft", "verify ms", "expand ms", "method", "tokens/s", "tokens/pass", "gain")
    for result in results:
        times = result.times
        batch = result.method.batch_rows
        verify = "" if batch == 1 else f"{1e3 * times.verify_s[batch]:.2f}"
        table.add_row(
            str(times.target_devices), str(times.draft_devices), verify, f"{1e3 * times.expand_s:.2f}", _name(result),
            f"{result.tokens_per_s:.1f}", f"{result.tokens_per_pass:.2f}", f"{result.gain:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(_verdict(results), highlight=False, soft_wrap=True)


def splits_preset(results: "Sequence[SplitResult]", given: Mapping[str, Any], command: str) -> str:
    """A preset of the best split."""
    from jaxspec.tune.swiftspec import pick

    best = pick(results)
    times, method = best.times, best.method
    options: dict[str, Any] = {"method": method.name, "target_devices": times.target_devices}
    options |= {name: value for name, value in given.items() if value not in (None, "auto")}
    if method.drafts:
        options["draft_devices"] = times.draft_devices
        options |= {name: getattr(method, name) for name in ("batch", "width", "depth")}
    else:
        options.pop("draft_model", None)
    lines = [f"# {command}", f"# {_verdict(results)}"]
    lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def splits_report(results: "Sequence[SplitResult]") -> dict[str, Any]:
    """Every number."""
    return {"splits": [{**dataclasses.asdict(result), "method": _name(result)} for result in results]}


def _name(result: "SplitResult") -> str:
    method: Any = result.method
    return "ar" if method.name == "ar" else f"bs {method.batch}, w {method.width}, d {method.depth}"


def _verdict(results: "Sequence[SplitResult]") -> str:
    from jaxspec.tune.swiftspec import pick

    best = pick(results)
    count = best.times.target_devices
    where = f"{count} device{'s'[: count > 1]} for the target"
    if not best.method.drafts:
        return f"plain decoding on {where} is the fastest here: no split gains on it"
    return f"the fastest here is {_name(best)} with {where} and {best.times.draft_devices} for the draft"
