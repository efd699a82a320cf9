"""`jaxspec-tune`: what decodes fastest on this machine, written as a preset for `jaxspec-decode --config`."""

import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.cli.options import (
    MEASURED_ENGINE,
    MODEL,
    ReportOption,
    check_new_file,
    check_output,
    is_streamed,
    model_options,
    options_of,
    print_plan,
    sampling_options,
)
from jaxspec.cli.processes import refuse_several
from jaxspec.cli.progress import Bar, table_console, write_report
from jaxspec.cli.run import command
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError, suggest
from jaxspec.methods.registry import METHODS

if TYPE_CHECKING:
    from jaxspec.tune.run import Trial, Tuning

NAME = "jaxspec-tune"

# For swift. Offline, a Bayesian proposal costs no more than a pass: there are more of them than while decoding.
RATIOS, STEPS, INTERVAL, TASK = "0.2,0.3,0.45", 300, 8, "default"

QUICK_PROMPTS = 6  # of `--quick`
LEAST_TOKENS = 8  # of an answer: shorter ones cannot be timed
SAMPLED = options_of(
    SamplingParams, "max_tokens", "temperature", "top_p", "seed", max_tokens=96, temperature=0.0, top_p=1.0, seed=0
)


@command(NAME, MODEL, SAMPLED, MEASURED_ENGINE)
def app(
    given: dict[str, Any],
    preset: Annotated[Path | None, typer.Argument(help="TOML preset to write; without it nothing is written.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines in Spec-Bench's form [the mini suite].")] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Prompts taken, evenly over the categories.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Answers of the confirming run to each prompt.")] = 2,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method to tune; swiftspec splits the devices between target and draft, swift searches layers "
            "[auto, lookup, chain and specexec]."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Within a minute: does the draft fit, what does auto gain, and what may be wrong."
        ),
    ] = False,
    devices: Annotated[int | None, typer.Option(min=2, help="For swiftspec: devices to be split [all].")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="For swiftspec and with --offload: print what devices hold, and end.")
    ] = False,
    ratios: Annotated[str, typer.Option(help="For swift: shares of blocks to skip, by comma.")] = RATIOS,
    steps: Annotated[int, typer.Option(min=1, help="For swift: sets that are tried for each ratio.")] = STEPS,
    interval: Annotated[int, typer.Option(min=1, help="For swift: of so many sets one is Bayesian.")] = INTERVAL,
    task: Annotated[str, typer.Option(help="For swift: name under which the sets are kept.")] = TASK,
    swift_layers: Annotated[
        Path | None, typer.Option(help="For swift: file of layer sets to write [beside the compiled programs].")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="For swift: draw matchness against steps (needs matplotlib).")
    ] = None,
    json_: ReportOption = None,
) -> None:
    """Measure step costs and acceptance, predict, confirm the best against plain decoding, write a preset.

    With --plan, only print what the devices would hold.
    """
    refuse_several(NAME)
    out = check_output(json_)
    check_new_file(preset, "the preset")
    for_swift = {"--ratios": ratios != RATIOS, "--steps": steps != STEPS, "--interval": interval != INTERVAL}
    for_swift |= {"--task": task != TASK, "--swift-layers": swift_layers is not None, "--plot": plot is not None}
    target_devices, draft_model = given.get("target_devices", 1), given.get("draft_model")
    if given["max_tokens"] < LEAST_TOKENS:
        raise ConfigError(f"--max-tokens must be at least {LEAST_TOKENS}, got {given['max_tokens']}")
    _check_method(method, devices, target_devices, draft_model, [name for name, set_ in for_swift.items() if set_])
    streamed, device_memory = is_streamed(given), given.get("device_memory")
    if quick:
        refused = {"--method": method, "a preset": preset, "--offload": streamed or None}
        if unused := [name for name, value in refused.items() if value is not None]:
            raise ConfigError(f"--quick examines the draft with method auto: it does not go with {unused[0]}")
        max_prompts, repeats = min(max_prompts, QUICK_PROMPTS), 1
    if streamed and method in ("swiftspec", "swift"):
        raise ConfigError(f"--method {method} is not tuned with --offload: leave one of them out")
    if not streamed and method != "swiftspec" and (plan or device_memory is not None):
        raise ConfigError("--plan and --device-memory are for --method swiftspec and for --offload")
    from jaxspec.config import parse_bytes

    memory = None if device_memory is None else parse_bytes("--device-memory", device_memory)
    engine = {name: given[name] for name in MEASURED_ENGINE if name in given}
    if not streamed:
        engine.pop("device_memory", None)  # it says which splits fit
    models = engine | {name: given[name] for name in MODEL if name in given}
    numerics = {name: engine.get(name, "auto") for name in ("dtype", "kernels", "activations", "kv_dtype")}
    if plan and streamed:
        print_plan(models | {"target_devices": target_devices}, method or "auto", {"a preset": preset, "--json": json_})
        return
    files = (given.get("model"), draft_model, *numerics.values())
    if plan:
        refused = {"a preset": preset, "--json": json_, "--resident-layers": given.get("resident_layers")}
        if unused := [name for name, value in refused.items() if value is not None]:
            raise ConfigError(f"--plan prints a plan and ends: it does not go with {unused[0]}")
        _print_plan(files, devices, memory)
        return
    shares = _parse_ratios(ratios)
    if not task:
        raise ConfigError("--task must not be empty")
    check_new_file(plot, "--plot")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxspec-decode[plot]'")
    from rich.console import Console  # heavy imports only now: --help and usage errors answer at once

    from jaxspec.bench.prompts import load_prompts, select_prompts
    from jaxspec.llm import LLM, internals
    from jaxspec.tune.fit import examine_draft
    from jaxspec.tune.run import compare_methods, compare_streamed
    from jaxspec.tune.run import tune as find_fastest

    command_line = shlex.join([NAME, *sys.argv[1:]])
    chosen = select_prompts(load_prompts(prompts), None, max_prompts)
    sampling = sampling_options(given)
    shared = model_options({name: value for name, value in models.items() if name != "target_devices"})

    def load(**options: Any) -> LLM:
        return LLM(session_memory=0, **shared, **options)

    with Bar() as bar:
        bar.show("loading", 0, 1)
        if method == "swiftspec":
            trials = _split_devices(load, files, devices, memory, bar.show)
        elif method == "swift":
            from jaxspec.methods.swift.settings import layer_store
            from jaxspec.tune.swift import LayerOptions, tune_layers

            llm = load(draft="none", method="ar", target_devices=target_devices)
            store = layer_store(internals(llm).engine.store, internals(llm).target.cfg, swift_layers or "")
            if store is None:
                raise ConfigError("without a compile cache layer sets need a file: name one with --swift-layers")
            store.check()
            named = None if swift_layers is None else str(swift_layers.resolve())
            options = LayerOptions(shares, steps, interval, task, named)
            trials = tune_layers(llm, options, store, chosen, sampling, bar.show)
        else:
            llm = load(method=method if method not in (None, "ar") else "auto", target_devices=target_devices)
            compare = compare_streamed if streamed else compare_methods
            if quick:
                trials = examine_draft(llm, chosen, sampling, bar.show)
            else:
                trials = compare(llm, method, chosen, sampling, bar.show)
        if method != "swiftspec":
            models["target_devices"] = target_devices
        tuning = find_fastest(trials, chosen, sampling, repeats, command_line, bar.show)

    _print(tuning, table_console(out))
    notes = Console(stderr=True)
    if method == "swiftspec" and (path := _save_profile(tuning, files, command_line, given)) is not None:
        notes.print(f"method auto will use this profile: {path}", highlight=False, soft_wrap=True)
    if method == "swift":
        notes.print(f"the layer sets are in {store.path}", highlight=False, soft_wrap=True)
        if plot is not None:
            from jaxspec.tune.swift import plot_layers

            plot_layers(tuning.trials[0], plot)
    if preset is not None:
        preset.write_text(tuning.preset(models, command_line), encoding="utf-8")
        notes.print(f"wrote {preset}; use it with: jaxspec-decode --config {preset}", highlight=False, soft_wrap=True)
    write_report(tuning.report(), out)


def _check_method(
    method: str | None, devices: int | None, target_devices: int, draft_model: str | None, for_swift: Sequence[str]
) -> None:
    """Refuse a method that cannot be tuned, and options that are for another one."""
    names = [name for name in METHODS if name != "ar"]
    if method is not None and method not in names:
        raise ConfigError(f"--method {method!r} cannot be tuned; {suggest(method, names)}")
    if method != "swift" and for_swift:
        raise ConfigError(f"{', '.join(for_swift)} are for --method swift")
    if method == "swift" and draft_model is not None:
        raise ConfigError("--method swift needs no draft model: leave --draft-model out")
    if method != "swiftspec" and devices is not None:
        raise ConfigError("--devices are split by --method swiftspec; --target-devices is for the other methods")
    if method == "swiftspec" and target_devices != 1:
        raise ConfigError("--method swiftspec tries every split of --devices: leave --target-devices out")


def _parse_ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--ratios {text!r} must be numbers with commas between them") from error
    if not all(0 < ratio < 1 for ratio in ratios):
        raise ConfigError(f"--ratios {text!r} must lie between 0 and 1, both excluded")
    return ratios


def _count_devices(devices: int | None) -> int:
    """Devices to be split: as asked for, else all there are."""
    import jax

    available = len(jax.devices())
    devices = available if devices is None else devices
    if not 2 <= devices <= available:
        raise ConfigError(
            f"--method swiftspec splits at least 2 devices and at most the {available} there are, got {devices}; "
            "on CPU, JAX_NUM_CPU_DEVICES=N makes N of them"
        )
    return devices


def _print_plan(files: tuple[Any, ...], devices: int | None, device_memory: int | None) -> None:
    from rich.table import Table

    from jaxspec.tune.plan import PairFiles, list_splits, memory_limit, plan_lines

    count, limit = _count_devices(devices), memory_limit(device_memory)
    pair = PairFiles(*files)
    head, *rows = plan_lines([pair.plan(*split) for split in list_splits(count)], limit)
    table = Table(title="a device's part of each model, by split")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    table_console().print(table)


def _split_devices(
    load: Any, files: tuple[Any, ...], devices: int | None, device_memory: int | None, progress: Any
) -> "Iterator[Trial]":
    from jaxspec.tune.plan import PairFiles, memory_limit
    from jaxspec.tune.swiftspec import split_devices

    count, limit = _count_devices(devices), memory_limit(device_memory)
    pair = PairFiles(*files)

    def refuse(target: int, draft: int | None) -> str | None:
        planned = pair.plan(target, draft)
        if planned.fits(limit) or limit is None:
            return None
        return f"needs {planned.most_bytes / 2**30:.2f} GiB of a device's {limit / 2**30:.2f}"

    def place(target: int, draft: int | None) -> Any:
        # A draft on shared devices is loaded with a method that never takes devices of its own.
        return load(method="swiftspec" if draft else "chain", target_devices=target, draft_devices=draft)

    return split_devices(place, count, progress, refuse)


def _save_profile(tuning: "Tuning", files: tuple[Any, ...], command_line: str, given: dict[str, Any]) -> Path | None:
    """Keep the speeds for method `auto`; returns the file, or None without a compile cache."""
    from jaxspec.methods.auto.profiles import profile_path, save_profile
    from jaxspec.runtime.store.folder import enable_compile_cache
    from jaxspec.tune.plan import PairFiles
    from jaxspec.tune.run import profile_rows

    folder = enable_compile_cache(None)
    model, draft = PairFiles(*files).paths
    if folder is None or draft is None:
        return None
    settings = dict(zip(("dtype", "kernels", "activations", "kv_dtype"), files[2:], strict=True))
    path = profile_path(folder, model, draft, **settings, numerics=given.get("numerics", "fast"))
    save_profile(path, profile_rows(tuning), command_line)
    return path


def _print(tuning: "Tuning", console: Any) -> None:
    from jaxspec.bench.tables import make_table, speed_cells

    for line in tuning.lines:
        console.print(line, highlight=False, markup=False)
    several = len(tuning.trials) > 1
    names = ["method", "predicted", "tokens/s", "speed-up (95 %)", "acceptance length", "over the fastest plain"]
    table = make_table("speed-up over plain decoding beside it", names[: len(names) - (not several)])
    for candidate in tuning.candidates:
        cells = ["-"] * 3 if candidate.row is None else speed_cells(candidate.row)
        table.add_row(
            candidate.label, _figure(candidate.predicted), *cells, *[_figure(candidate.score)] * several
        )  # fmt: skip
    console.print(table)
    console.print(tuning.verdict, highlight=False, soft_wrap=True)


def _figure(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}"
