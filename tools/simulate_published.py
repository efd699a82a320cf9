"""Published rows of the papers beside what a model of their schedules says, with the error of each.

    python tools/simulate_published.py [--markdown FILE]

Three papers: SwiftSpec (overlapped and serial trees, five pairs, batch sizes, ablations), SpecExec (offloaded targets)
and SWIFT (self-drafting). The published figures are in tools/swiftspec_sim/published.toml. A row says of its model
value how it came about: "predicted" from other published figures, "fitted" to the row itself, or resting on something
"assumed" that the papers do not give. Nothing here was measured by us.
"""

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from swiftspec_sim.clock import Setting, Steps, check_length
from swiftspec_sim.synthetic import simulate
from swiftspec_sim.times import Split, parse_split

import jaxspec
from jaxspec.cli.run import run_command

NAME = "simulate_published"
FIGURES = Path(__file__).parent / "swiftspec_sim" / "published.toml"
AGREES = 0.10
# The printed draft times are taken to cover so many expansions: with one, the published lengths are impossible.
EXPANSIONS = 2
SERIAL_PASSES = 4  # of a serial round: two printed draft times
ROOM = 8
SURENESS = (0.3, 0.45, 0.55, 0.62, 0.68, 0.74, 0.8, 0.88)
MOST = 8  # devices


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure; `kind` is "predicted", "fitted" or "assumed"."""

    paper: str
    what: str
    unit: str
    published: float | None
    modelled: float | None
    kind: str
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative; None where one side is missing."""
        if self.published is None or self.modelled is None:
            return None
        return self.modelled / self.published - 1


def schedules(depth: int) -> tuple[Setting, Setting]:
    """The serial schedule on eight devices, and the overlapped one of a depth on 6/2."""
    serial = jaxspec.SwiftSpec(7, 8, depth=SERIAL_PASSES - 1, overlap=False, reuse=False)
    return Setting(Split(8, None), serial), Setting(Split(6, 2), jaxspec.SwiftSpec(7, 8, depth=depth))


def steps(target: float, draft: float, rest: float) -> Steps:
    """Times of one schedule; `rest` is what a round takes apart from its passes."""
    return Steps(target, draft, draft, message=0.0, walk=0.0, turn=rest)


class Lengths:
    """Acceptance lengths of schedules against the sureness of a synthetic draft, by interpolation."""

    def __init__(self):
        """Nothing is simulated yet."""
        self._known: dict[Setting, np.ndarray] = {}

    def of(self, setting: Setting, sureness: float) -> float:
        """A schedule's length."""
        return float(np.interp(sureness, SURENESS, self._curve(setting)))

    def sureness(self, setting: Setting, length: float) -> float:
        """The sureness at which a schedule has a length; `ConfigError` where no draft could reach it."""
        check_length(setting, length)
        return float(np.interp(length, self._curve(setting), SURENESS))

    def _curve(self, setting: Setting) -> np.ndarray:
        if setting not in self._known:
            found = [simulate(s, setting, steps(10.0, 1.0, 0.0), ROOM).length for s in SURENESS]
            self._known[setting] = np.maximum.accumulate(np.asarray(found))
        return self._known[setting]


def qwen_rows(figures: Mapping[str, Any], lengths: Lengths) -> Iterator[Row]:
    """Qwen2-72B: a draft's sureness from each serial length, the parallel length and speed from that."""
    parallel, serial = figures["qwen"]["parallel"], figures["qwen"]["serial"]
    expand = {"parallel": parallel["draft_ms"] / EXPANSIONS, "serial": serial["draft_ms"] / EXPANSIONS}
    depth = int(parallel["target_ms"] / expand["parallel"])
    in_turn, beside = schedules(depth)
    bare = serial["target_ms"] + SERIAL_PASSES * expand["serial"]
    rest = 1000 * serial["lengths"][-1] / serial["tokens_per_s"] - bare
    yield Row("SwiftSpec", "Qwen2-72B serial, 8 devices", "tokens/s", serial["tokens_per_s"],
              1000 * serial["lengths"][-1] / (bare + rest), "fitted",
              f"its length; {rest:.2f} ms a round for messages, walk and host are what is left")  # fmt: skip
    for name, theirs, before in zip(figures["qwen"]["sets"], parallel["lengths"], serial["lengths"], strict=True):
        found = lengths.of(beside, lengths.sureness(in_turn, before))
        note = f"from the serial {before:.2f}; depth {depth}, two expansions in a printed draft time (hypothesis)"
        yield Row("SwiftSpec", f"Qwen2-72B parallel length, {name}", "tokens/pass", theirs, found, "predicted", note)
    sure = lengths.sureness(in_turn, serial["lengths"][-1])
    run = simulate(sure, beside, steps(parallel["target_ms"], expand["parallel"], rest), ROOM)
    speed = 1000 * lengths.of(beside, sure) / run.round_ms
    implied = 1000 * parallel["lengths"][-1] / parallel["tokens_per_s"]
    note = f"round of {run.round_ms:.2f} ms, published {implied:.2f}"
    yield Row("SwiftSpec", "Qwen2-72B parallel, 6/2", "tokens/s", parallel["tokens_per_s"], speed, "predicted", note)
    yield Row("SwiftSpec", "full / kernels only", "ratio", figures["ablation"]["full / kernels only"],
              speed / serial["tokens_per_s"], "predicted", "Qwen2-72B; the paper's is a mean over pairs")  # fmt: skip


class PassTimes:
    """Time of a pass from parameters and layers, by least squares on the published step times alone."""

    def __init__(self, passes: list[Mapping[str, Any]]):
        """Terms: layers, bytes per device, layers that reduce, and layers times the steps of a reduction."""
        rows, times = [], []
        for model in passes:
            for devices, ms in model["ms"].items():
                rows.append(self._terms(model["parameters"], model["layers"], int(devices)))
                times.append(ms)
        matrix, wanted = np.array(rows), np.array(times)
        # Relative errors count.
        self._weights = _least_squares(matrix / wanted[:, None], np.ones_like(wanted))
        self.worst = float(np.abs(matrix @ self._weights / wanted - 1).max())

    def __call__(self, model: Mapping[str, float], devices: int) -> float:
        """Milliseconds."""
        return float(np.array(self._terms(model["parameters"], model["layers"], devices)) @ self._weights)

    def _terms(self, parameters: float, layers: float, devices: int) -> tuple[float, ...]:
        return layers, parameters / devices, layers * (devices > 1), layers * math.log2(devices), 1.0


def _least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Non-negative least squares for a few columns: the best of all subsets."""
    best, found = math.inf, np.zeros(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), size):
            weights = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(((matrix[:, chosen] @ weights - wanted) ** 2).sum())
            if (weights >= 0).all() and error < best:
                best, found = error, np.zeros(matrix.shape[1])
                found[list(chosen)] = weights
    return found


def pair_rows(figures: Mapping[str, Any], lengths: Lengths) -> Iterator[Row]:
    """Best splits and speeds of the five pairs, with passes from the model of step times and Qwen2's sureness."""
    times = PassTimes(figures["passes"])
    in_turn, _ = schedules(3)
    sure = lengths.sureness(in_turn, figures["qwen"]["serial"]["lengths"][-1])
    for pair in figures["pairs"]:
        speeds = {}
        for target in (2, 4, 6):  # the paper tries even numbers
            pass_ms, expand = times(pair["target"], target), times(pair["draft"], MOST - target)
            depth = max(1, min(ROOM, int(pass_ms / expand)))
            setting = Setting(Split(target, MOST - target), jaxspec.SwiftSpec(7, 8, depth=depth))
            run = simulate(sure, setting, steps(pass_ms, expand, 0.35), ROOM)
            speeds[f"{target}/{MOST - target}"] = run.tokens_per_s
        best = max(speeds, key=lambda split: speeds[split])
        listed = ", ".join(f"{split} {speed:.0f}" for split, speed in speeds.items())
        agree = "the same split" if best in pair["splits"] else "another split"
        note = f"{listed}; best {best}, published {' or '.join(pair['splits'])}: {agree}"
        yield Row("SwiftSpec", f"{pair['name']}, {best}", "tokens/s", pair.get("tokens_per_s"), speeds[best], "assumed",
                  f"draft as sure as Qwen2's, passes of vLLM (model within {times.worst:.0%}); {note}")  # fmt: skip


def batch_rows(figures: Mapping[str, Any], lengths: Lengths) -> Iterator[Row]:
    """Batches of 4, 8 and 16 rows on Llama-3-70B."""
    in_turn, _ = schedules(3)
    sure = lengths.sureness(in_turn, figures["qwen"]["serial"]["lengths"][-1])
    found = {}
    for rows, ms in figures["batches"]["ms"].items():
        method = jaxspec.SwiftSpec(int(rows) - 1, 8, 8 if int(rows) < 16 else 15, depth=ROOM)
        setting = Setting(parse_split("4/4"), method)
        run = simulate(sure, setting, steps(ms, ms / ROOM, 0.35), ROOM)
        found[int(rows)] = run.length, run.tokens_per_s
    yield Row("SwiftSpec", "length of bs 16 over bs 8", "ratio", figures["batches"]["length_gain_16"],
              found[16][0] / found[8][0], "assumed", f"draft as sure as Qwen2's, depth {ROOM}")  # fmt: skip
    speeds = ", ".join(f"bs {rows} {speed:.0f}" for rows, (_, speed) in found.items())
    best = max(found, key=lambda rows: found[rows][1])
    yield Row("SwiftSpec", "best bs of 4, 8, 16", "rows", 8, best, "assumed", f"{speeds} tokens/s")


def ablation_rows(figures: Mapping[str, Any], lengths: Lengths) -> Iterator[Row]:
    """Ratios on Llama-3-70B with vLLM's passes, and the ratios that follow from others."""
    models = {model["model"]: model["ms"] for model in figures["passes"]}
    target, draft = models["Llama-3-70B"], models["Llama-3.2-3B"]
    in_turn, _ = schedules(3)
    sure, ablation = lengths.sureness(in_turn, figures["qwen"]["serial"]["lengths"][-1]), figures["ablation"]
    depth = int(target["4"] / draft["4"])
    beside = Setting(Split(4, 4), jaxspec.SwiftSpec(7, 8, depth=depth))
    parallel = simulate(sure, beside, steps(target["4"], draft["4"], 0.35), ROOM).tokens_per_s
    serial = simulate(sure, in_turn, steps(target["8"], draft["8"], 0.35), ROOM).tokens_per_s
    yield Row("SwiftSpec", "parallel only / serial", "ratio", ablation["parallel only / serial"], parallel / serial,
              "assumed", f"Llama-3-70B with vLLM's passes, depth {depth}, draft as sure as Qwen2's")  # fmt: skip
    yield Row("SwiftSpec", "full / parallel only", "ratio", ablation["full / parallel only"],
              target["4"] / figures["batches"]["ms"]["8"], "predicted",
              "the target's passes alone: vLLM's over SwiftSpec's on four devices")  # fmt: skip
    product = ablation["full / kernels only"] * ablation["kernels only / serial"]
    yield Row("SwiftSpec", "kernels only / serial", "ratio", ablation["kernels only / serial"],
              ablation["parallel only / serial"] * ablation["full / parallel only"] / ablation["full / kernels only"],
              "predicted", f"from the other three ratios: both ways to full, {product:.2f}")  # fmt: skip


def specexec_rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    """Offloaded targets: a round is one transfer of the weights, and a draft time in proportion to K.

    Both times are those of the first row of a device and a form of the target, which is fitted; what the others say of
    their own speed is not used.
    """
    fitted: dict[tuple[str, str], tuple[float, float]] = {}
    for device, form, pair, data, temperature, budget, rate, speed, gain in figures["rows"]:
        key = device, form
        kind = "predicted" if key in fitted else "fitted"
        if kind == "fitted":
            load = gain / speed  # seconds of a pass: the plain speed is tokens/s over the speed-up
            fitted[key] = load, max(0.0, rate / speed - load) / budget
        load, per_node = fitted[key]
        draft = per_node * budget
        note = f"K {budget}: pass {load:.2f} s, draft {draft:.2f} s"
        name = f"{pair} on {device}, {data}, t = {temperature}"
        yield Row("SpecExec", name, "tokens/s", speed, rate / (load + draft), kind, note)


def swift_rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    """Self-drafting: the best speed-up of a chain whose draft costs what is not skipped."""
    for model, skipped, low, _, plain, speed in figures["rows"]:
        cost = 1 - skipped
        best, length = max(
            (sum(low**n for n in range(steps + 1)) / (steps * cost + 1), steps)
            for steps in range(1, figures["draft_steps"] + 1)
        )
        note = f"acceptance {low:.0%}, {length} draft steps, {skipped:.0%} skipped for free, no search: an upper bound"
        yield Row("SWIFT", model, "tokens/s", speed, best * plain, "predicted", note)


def all_rows(path: Path = FIGURES) -> list[Row]:
    """Every published row."""
    figures, lengths = tomllib.loads(path.read_text(encoding="utf-8")), Lengths()
    swiftspec = figures["swiftspec"]
    makers = (qwen_rows, pair_rows, batch_rows, ablation_rows)
    rows = [row for maker in makers for row in maker(swiftspec, lengths)]
    return [*rows, *specexec_rows(figures["specexec"]), *swift_rows(figures["swift"])]


def cells_of(row: Row) -> list[str]:
    """A row of the table."""
    large = row.unit == "rows" or (row.published or row.modelled or 0) > 50

    def number(value: float) -> str:
        return f"{value:.0f}" if large else f"{value:.2f}"

    error = row.error
    verdict = "-" if error is None else "fitted" if row.kind == "fitted" else "yes" if abs(error) <= AGREES else "no"
    return [
        row.paper, row.what, row.unit, "not given" if row.published is None else number(row.published),
        "-" if row.modelled is None else number(row.modelled), "-" if error is None else f"{error:+.1%}", row.kind,
        verdict, row.note,
    ]  # fmt: skip


HEAD = ["paper", "row", "unit", "published", "model", "error", "model is", "within 10 %", "rests on"]


def main(
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown here.")] = None,
) -> None:
    """Print the table."""

    def run() -> None:
        rows = [cells_of(row) for row in all_rows()]
        table = Table(title="published rows beside a model of their schedules")
        for name in HEAD:
            table.add_column(name)
        for row in rows:
            table.add_row(*row)
        Console(width=220).print(table)
        if markdown is not None:
            lines = ["| " + " | ".join(line) + " |" for line in (HEAD, ["---"] * len(HEAD), *rows)]
            markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")

    run_command(NAME, run)


if __name__ == "__main__":
    typer.run(main)
