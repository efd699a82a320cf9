"""`jaxspec-tune`: what decodes fastest on this machine, written as a preset for `jaxspec-decode --config`."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.cli.options import KERNELS_HELP, check_new_file, check_output
from jaxspec.cli.progress import Bar
from jaxspec.cli.run import run_command
from jaxspec.cli.tune_layers import (
    INTERVAL,
    RATIOS,
    STEPS,
    TASK,
    LayerOptions,
    find_layers,
    layers_preset,
    layers_report,
    plot_layers,
    print_layers,
)
from jaxspec.cli.tune_splits import find_split, print_splits, splits_preset, splits_report
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.tune.run import Candidate, Tuning

NAME = "jaxspec-tune"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def tune(
    preset: Annotated[Path | None, typer.Argument(help="TOML preset to write; without it nothing is written.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Checkpoint [the default model].")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Draft's checkpoint, or none [the shipped one if it fits].")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines in Spec-Bench's form [the mini suite].")] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Prompts taken, evenly over the categories.")] = 12,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=8, help="Tokens of an answer.")] = 96,
    temperature: Annotated[float, typer.Option("--temperature", "--temp", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random stream at temperature > 0.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Of the confirming run.")] = 2,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kernels: Annotated[str, typer.Option(help=KERNELS_HELP)] = "auto",
    target_devices: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    method: Annotated[
        str | None,
        typer.Option(help="swiftspec splits the devices between target and draft, swift searches layers [the rest]."),
    ] = None,
    devices: Annotated[int | None, typer.Option(min=2, help="Devices to be split [all].")] = None,
    ratios: Annotated[str, typer.Option(help="For swift: shares of blocks to skip, with commas between.")] = RATIOS,
    steps: Annotated[int, typer.Option(min=1, help="For swift: sets that are tried for each ratio.")] = STEPS,
    interval: Annotated[int, typer.Option(min=1, help="For swift: of so many sets one is Bayesian.")] = INTERVAL,
    task: Annotated[str, typer.Option(help="For swift: name under which the sets are kept.")] = TASK,
    swift_layers: Annotated[
        Path | None, typer.Option(help="For swift: file of layer sets to write [beside the compiled programs].")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="For swift: draw matchness against steps (needs matplotlib).")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write every number here; - is standard output.")] = None,
) -> None:
    """Measure step costs and acceptance, predict, confirm the best against plain decoding, write a preset."""

    def run() -> None:
        out = check_output(json_)
        check_new_file(preset, "the preset")
        if method not in (None, "swiftspec", "swift"):
            raise ConfigError(
                f"--method {method!r}: only swiftspec and swift have tuners of their own; leave it out for the rest"
            )
        if method != "swiftspec" and devices is not None:
            raise ConfigError("--devices are split by --method swiftspec; --target-devices is for the other methods")
        layers = LayerOptions(ratios, steps, interval, task, swift_layers, plot)
        if method == "swift":
            layers.check()
            if draft_model is not None:
                raise ConfigError("--method swift needs no draft model: leave --draft-model out")
        elif layers != LayerOptions():
            raise ConfigError("--ratios, --steps, --interval, --task, --swift-layers and --plot are for --method swift")
        if method == "swiftspec" and target_devices != 1:
            raise ConfigError("--method swiftspec tries every split of --devices: leave --target-devices out")
        # Heavy imports only now: --help and usage errors answer at once.
        from rich.console import Console

        from jaxspec.bench.prompts import load_prompts, select_prompts
        from jaxspec.config import SamplingParams
        from jaxspec.llm import LLM
        from jaxspec.tune.run import tune as find_fastest

        command = _in_a_comment(shlex.join([NAME, *sys.argv[1:]]))
        console = Console(stderr=True)
        chosen = select_prompts(load_prompts(prompts), None, max_prompts)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        given = {"model": model, "draft_model": draft_model, "dtype": dtype, "kernels": kernels}
        if method == "swift":
            given["target_devices"] = target_devices  # pyright: ignore[reportArgumentType]
            with Bar() as bar:
                tuned, file = find_layers(given, layers, chosen, sampling, repeats, command, bar.show)
            print_layers(tuned, Console(stderr=str(out) == "-"))
            console.print(f"the layer sets are in {file.path}", highlight=False)
            if plot is not None:
                plot_layers(tuned, plot)
            _write(layers_preset(tuned, given, layers, command), layers_report(tuned), preset, out, console)
            return
        if method is not None:
            with console.status("loading") as status:
                results = find_split(given, devices, chosen, sampling, repeats, command, status.update)
            print_splits(results, Console(stderr=str(out) == "-"))
            _write(splits_preset(results, given, command), splits_report(results), preset, out, console)
            return
        llm = LLM(model, draft=draft_model, dtype=dtype, kernels=kernels, target_devices=target_devices)  # pyright: ignore[reportArgumentType]
        with console.status("loading") as status:
            tuning = find_fastest(llm, chosen, sampling, repeats, command, lambda what: status.update(what))
        _print(tuning, Console(stderr=str(out) == "-"))
        text = _preset(tuning, {**given, "target_devices": target_devices}, command)
        _write(text, _report(tuning), preset, out, console)

    run_command(NAME, run)


def main() -> None:
    """Entry point."""
    app(prog_name=NAME)


def _write(text: str, report: dict[str, Any], preset: Path | None, out: Path | None, console: Any) -> None:
    if preset is not None:
        preset.write_text(text, encoding="utf-8")
        console.print(f"wrote {preset}; use it with: jaxspec-decode --config {preset}", highlight=False)
    if out is not None:
        numbers = json.dumps(report, allow_nan=False, default=str)
        print(numbers) if str(out) == "-" else out.write_text(numbers + "\n", encoding="utf-8")


def _in_a_comment(text: str) -> str:
    """Text for a line of TOML comment, which ends at a line break and holds no control characters or surrogates."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _print(tuning: "Tuning", console: Any) -> None:
    from rich.table import Table

    costs = tuning.costs
    passes = ", ".join(f"{rows}: {1e3 * seconds:.1f}" for rows, seconds in costs.target_s.items())
    console.print(f"target pass in ms by rows: {passes}", highlight=False)
    if costs.draft_s:
        console.print(f"draft pass: {1e3 * costs.draft_s:.2f} ms", highlight=False)
        depth = ", ".join(f"{share:.2f}" for share in tuning.acceptance)
        console.print(f"accepted by depth of a chain: {depth}", highlight=False)
    drafted = "too few to tell" if costs.round_cost is None else f"{costs.round_cost:.3f}"
    rounds = f"plain {costs.plain_cost:.3f}, with a draft {drafted}"
    console.print(f"a round besides its passes, in one-row passes: {rounds}", highlight=False)
    table = Table("method", "predicted", "measured", title="speed-up over plain decoding")
    for candidate in tuning.candidates:
        table.add_row(candidate.label, _figure(candidate.predicted), _figure(candidate.measured))
    console.print(table)
    console.print(_verdict(tuning), highlight=False)


def _verdict(tuning: "Tuning") -> str:
    if tuning.best.method.name == "ar":
        return "plain decoding is the fastest here: nothing that was tried gains on it"
    gain = f"{tuning.best.measured:.2f} times plain decoding"
    if tuning.best.method.name == "auto" and not _settings(tuning.best):
        return f"auto as it is without a preset is the fastest here, {gain}: nothing that was tried gains on it"
    return f"the fastest here is {tuning.best.label}, {gain}"


def _figure(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}"


def _preset(tuning: "Tuning", given: dict[str, Any], command: str) -> str:
    """TOML; `given` are options of the model."""
    options: dict[str, Any] = {"method": tuning.best.method.name, **_settings(tuning.best)}
    options |= {name: value for name, value in given.items() if value not in (None, "auto", 1)}
    if not tuning.best.method.drafts and options.get("draft_model") != "none":
        options.pop("draft_model", None)  # a method that drafts without it would refuse it
    lines = [f"# {command}", f"# {_verdict(tuning)}"]
    lines += [f"{name} = {_toml(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON's strings, numbers and lists of numbers are TOML's too, but for one character that only TOML escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _settings(candidate: "Candidate") -> dict[str, Any]:
    """The settings of a method that are not its defaults."""
    method: Any = candidate.method
    if method == type(method)():  # whose fields may follow from others, and so differ from their own defaults
        return {}
    blank = {field.name: field.default for field in dataclasses.fields(method)}
    return {name: value for name, value in dataclasses.asdict(method).items() if value != blank[name]}


def _report(tuning: "Tuning") -> dict[str, Any]:
    def describe(candidate: "Candidate") -> dict[str, Any]:
        return {
            "label": candidate.label,
            "method": candidate.method.name,
            "settings": _settings(candidate),
            "predicted": candidate.predicted,
            "measured": candidate.measured,
        }

    return {
        "costs": dataclasses.asdict(tuning.costs),
        "acceptance": tuning.acceptance,
        "candidates": [describe(candidate) for candidate in tuning.candidates],
        "best": describe(tuning.best),
        "confirmation": tuning.report,
    }
