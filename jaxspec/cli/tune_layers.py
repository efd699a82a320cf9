"""`jaxspec-tune --method swift`: a search for layers on a prompt file, over ratios too; tables, plot and preset."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import check_new_file
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.bench.prompts import BenchPrompt
    from jaxspec.config import SamplingParams
    from jaxspec.methods.swift.store import LayerStore
    from jaxspec.tune.swift import LayerTuning

# Defaults of the command line. Off line a Bayesian proposal costs no more than a pass: there are more of them.
RATIOS, STEPS, INTERVAL, TASK = "0.2,0.3,0.45", 300, 8, "default"

# What is going on, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """Words of the command line that are about layers.

    Attributes:
      ratios: skip ratios, with commas between.
      steps: candidates of the search for each ratio.
      interval: every how many of them one is Bayesian.
      task: name under which sets are kept.
      layers_file: where; None is beside the compiled programs.
      plot: picture to draw, if one.
    """

    ratios: str = RATIOS
    steps: int = STEPS
    interval: int = INTERVAL
    task: str = TASK
    layers_file: Path | None = None
    plot: Path | None = None

    def check(self) -> tuple[float, ...]:
        """The ratios; minutes of work must not end at words that were wrong from the start.

        Raises:
          ConfigError: they are.
        """
        check_new_file(self.plot, "--plot")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install 'jaxspec-decode[plot]'")
        try:
            ratios = tuple(dict.fromkeys(float(word) for word in self.ratios.split(",")))
        except ValueError as error:
            raise ConfigError(f"--ratios {self.ratios!r} must be numbers with commas between them") from error
        if not all(0 < ratio < 1 for ratio in ratios):
            raise ConfigError(f"--ratios {self.ratios!r} must lie between 0 and 1, both excluded")
        if not self.task:
            raise ConfigError("--task must not be empty")
        return ratios


def find_layers(
    given: Mapping[str, Any],
    options: LayerOptions,
    prompts: "Sequence[BenchPrompt]",
    sampling: "SamplingParams",
    repeats: int,
    command: str,
    progress: Progress,
) -> "tuple[LayerTuning, LayerStore]":
    """Search for every ratio, confirm the best, and keep the sets; `given` are options of the model."""
    ratios = options.check()
    from jaxspec.llm import LLM
    from jaxspec.tune.swift import tune_layers

    llm = LLM(
        given["model"], draft="none", method="ar", dtype=given["dtype"], kernels=given["kernels"],
        target_devices=given["target_devices"],
    )  # fmt: skip
    file = llm.layer_file(options.layers_file)
    if file is None:
        raise ConfigError("there is no compile cache to keep layer sets beside: name a file with --swift-layers")
    file.check()
    tuning = tune_layers(
        llm, prompts, sampling, ratios, options.steps, options.interval, repeats, command, progress
    )  # fmt: skip
    for result in tuning.results:
        file.save(options.task, result.search, replace=True)
    return tuning, file


def print_layers(tuning: "LayerTuning", console: Any) -> None:
    """A line for each ratio."""
    from rich.table import Table

    table = Table("ratio", "skipped", "matchness", "predicted", "measured", title="speed-up over plain decoding")
    for result in tuning.results:
        table.add_row(
            f"{result.ratio:g}", str(result.layers.num_skipped), f"{result.matchness:.3f}", f"{result.predicted:.2f}",
            "" if result.measured is None else f"{result.measured:.2f}",
        )  # fmt: skip
    console.print(table)
    for result in tuning.results:
        console.print(f"ratio {result.ratio:g} skips {result.layers}", highlight=False)
    console.print(f"matchness of the uniform set: {tuning.uniform:.3f}", highlight=False)
    console.print(_verdict(tuning), highlight=False)


def plot_layers(tuning: "LayerTuning", path: Path) -> None:
    """Matchness of the best set against the steps of the search (extra `plot`: matplotlib)."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axis = pyplot.subplots(figsize=(6.5, 3.8))
    for result in tuning.results:
        steps, scores = zip(*result.search.history, strict=True)
        [line] = axis.step(steps, scores, where="post", label=f"ratio {result.ratio:g}")
        axis.plot(steps[-1], result.matchness, marker="o", color=line.get_color())
    axis.axhline(tuning.uniform, color="gray", linestyle=":", label="uniform set, other texts")
    axis.set(xlabel="candidates scored", ylabel="matchness of the best so far", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, title="dots: on other texts", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def layers_preset(tuning: "LayerTuning", given: Mapping[str, Any], options: LayerOptions, command: str) -> str:
    """A preset of the best ratio; the set itself is in the layer file."""
    best = tuning.best
    settings: dict[str, Any] = {"method": "ar"}
    if best is not None:
        settings = {"method": "swift", "ratio": best.ratio}
        if options.task != TASK:
            settings["task"] = options.task
        if options.layers_file is not None:
            settings["swift_layers"] = str(options.layers_file.resolve())
    settings |= {name: value for name, value in given.items() if value not in (None, "auto", 1, "none")}
    lines = [f"# {command}", f"# {_verdict(tuning)}"]
    lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def layers_report(tuning: "LayerTuning") -> dict[str, Any]:
    """Every number."""

    def describe(result: Any) -> dict[str, Any]:
        return {
            "ratio": result.ratio, "layers": str(result.layers), "num_skipped": result.layers.num_skipped,
            "matchness": result.matchness, "predicted": result.predicted, "measured": result.measured,
            "steps": result.search.steps, "stopped": result.search.stopped, "history": result.search.history,
        }  # fmt: skip

    return {
        "uniform": tuning.uniform,
        "judged_tokens": tuning.judged_tokens,
        "results": [describe(result) for result in tuning.results],
        "best": None if tuning.best is None else tuning.best.ratio,
        "confirmation": tuning.report,
    }


def _verdict(tuning: "LayerTuning") -> str:
    best = tuning.best
    if best is None:
        return "plain decoding is the fastest here: no set that was found gains on it"
    return f"the fastest here is swift at ratio {best.ratio:g}, {best.measured:.2f} times plain decoding"
