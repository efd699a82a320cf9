"""What SwiftSpec would do on hardware you do not have: recorded texts, given step times, the real scheduler.

    python tools/simulate_swiftspec.py record TRACE.npz --draft DRAFT --max-prompts 6 --max-tokens 48
    python tools/simulate_swiftspec.py simulate TRACE.npz --times tools/swiftspec_sim/times/qwen2-72b-h800.toml

`record` lets the target write its answers, and the draft say what it proposes: after every prefix of each answer, and
after every other context that a set of settings (--widths, --depths, --batches, overlapped and in turn, with and
without reuse) evaluates while it decodes that answer. What a target writes does not depend on the settings, so one
table serves them all.

`simulate` decodes the recorded answers again under any settings, with the library's own functions for growing,
selecting and re-rooting, and keeps two clocks. Settings outside the recorded set may ask for contexts that were not
recorded. They lie off the answer, where nothing is ever accepted. Only their children's scores are unknown, and these
decide which tokens get a place in the tree and the batch. Such children get the log-probabilities of the most probable
recorded sibling of their parent, or of the parent's parent if no sibling was recorded. The last column of the table
says how often.

Not modelled: prefill, sampling of drafts (there is none: trees hold the most probable tokens), the host, and passes
that cost less because few of their rows are live. A trace holds for the text and draft it was recorded with: mean
lengths of another pair must come from somewhere else (--length-from).
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table as Columns
from swiftspec_sim.clock import Replayed, Setting, Summary, longest_length, replay, steps_of, summarise
from swiftspec_sim.record import Recorder, cover
from swiftspec_sim.replay import make_table
from swiftspec_sim.times import Published, Times, load_times, parse_split
from swiftspec_sim.trace import Trace, load_traces, save_traces

import jaxspec
from jaxspec.bench.prompts import load_prompts, select_prompts
from jaxspec.cli.run import run_command
from jaxspec.errors import ConfigError

NAME = "simulate_swiftspec"
PIPE_WIDTH = 180
# Padding of tables: texts of a few tokens more or less share their compiled functions.
TOKEN_STEP = 64

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def record(
    trace: Annotated[Path, typer.Argument(help="The file to write, .npz.")],
    model: Annotated[str | None, typer.Option(help="The target's checkpoint [the default model].")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft's checkpoint [the shipped one].")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines in Spec-Bench's form [the mini suite].")] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Of all categories in turn.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 48,
    temperature: Annotated[float, typer.Option(help="Of the target; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the target's choices at temperature > 0.")] = 0,
    widths: Annotated[str, typer.Option(help="Settings to cover: w, by comma.")] = "4,8",
    depths: Annotated[str, typer.Option(help="Settings to cover: d, by comma.")] = "1,2,3,4",
    batches: Annotated[str, typer.Option(help="Settings to cover: bs, by comma.")] = "8,16",
    nodes: Annotated[int, typer.Option(help="Most contexts of an answer.")] = 4096,
) -> None:
    """Record answers of a target, and what its draft proposes while they are decoded."""

    def run() -> None:
        covered = [
            jaxspec.SwiftSpec(rows - 1, width, depth=depth, overlap=overlap, reuse=reuse)
            for rows, width in itertools.product(_numbers("--batches", batches), _numbers("--widths", widths))
            for overlap, reuse in ((True, True), (False, True), (False, False))
            for depth in _numbers("--depths", depths)
        ]
        chosen = select_prompts(load_prompts(prompts), None, max_prompts)
        keep = max(method.branch or 0 for method in covered)
        llm = jaxspec.LLM(model, draft=draft, method=jaxspec.SpecExec(8))
        placement, params = llm.engine.models.draft, llm.draft_params
        assert placement is not None and params is not None
        sampling = jaxspec.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        asked = [llm.encode([{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]
        recorder = Recorder(placement, params, keep=keep, nodes=nodes, context=max(map(len, asked)))
        traces = []
        for prompt, ids in track(list(zip(chosen, asked, strict=True)), "recording", console=Console(stderr=True)):
            answer = llm.generate(ids, sampling)
            assert isinstance(answer, jaxspec.Completion)
            found = recorder.begin(str(prompt.question_id), prompt.category, ids, answer.token_ids)
            for method in covered:
                found = cover(recorder, found, method, nodes, max(m.depth or 1 for m in covered))
            if recorder.is_full(found):
                print(f"{prompt.question_id}: more than {nodes} contexts; some stay approximated (--nodes)")
            traces.append(found)
        about = {
            "model": llm.model_path.name,
            "draft": llm.draft_path.name if llm.draft_path else None,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "covered": {"widths": widths, "depths": depths, "batches": batches},
        }
        save_traces(trace, traces, about)
        print(f"{trace}: {len(traces)} answers, {sum(len(t.text) for t in traces)} tokens, "
              f"{sum(len(t.parent) for t in traces)} contexts of {keep} proposals")  # fmt: skip

    run_command(NAME, run)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="What `record` wrote.")],
    times: Annotated[Path, typer.Option(help="Step times, TOML; see tools/swiftspec_sim/times.")],
    splits: Annotated[
        str | None, typer.Option(help="Target/draft devices, by comma; 8 is 8 shared ones [all there are].")
    ] = None,
    batch: Annotated[str, typer.Option(help="bs, by comma.")] = "8",
    width: Annotated[str, typer.Option(help="w, by comma.")] = "8",
    depth: Annotated[
        str | None, typer.Option(help="d, by comma [r and r + 1, r target passes per draft pass; in turn 1, 2, 3].")
    ] = None,
    branch: Annotated[int | None, typer.Option(help="k [the method's default].")] = None,
    serial: Annotated[bool, typer.Option("--serial", help="Take turns on split devices too.")] = False,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Grow until the target's result is there.")] = False,
    reuse: Annotated[bool, typer.Option(help="Keep the tree when the root moves.")] = True,
    leaves: Annotated[bool, typer.Option(help="Batches may hold proposals that were not evaluated.")] = True,
    branch_free: Annotated[bool, typer.Option("--branch-free", help="A draft pass in every turn.")] = False,
    length_from: Annotated[
        str, typer.Option(help="Tokens per second from the lengths of the trace, or those 'published' with the times.")
    ] = "trace",
    json_: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
) -> None:
    """Decode the recorded answers under given step times."""

    def run() -> None:
        if length_from not in ("trace", "published"):
            raise ConfigError(f"--length-from {length_from!r}: must be trace or published")
        table = load_times(times)
        try:
            traces, about = load_traces(trace)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{trace}: {error}") from error
        wanted = table.splits() if splits is None else [parse_split(s) for s in splits.split(",")]
        settings = []
        for split, rows, w in itertools.product(wanted, _numbers("--batch", batch), _numbers("--width", width)):
            overlap = split.draft is not None and not serial
            base = jaxspec.SwiftSpec(
                rows - 1, w, branch, adaptive=adaptive and overlap, overlap=overlap, reuse=reuse, leaves=leaves
            )
            for d in _depths(table, Setting(split, base)) if depth is None else _numbers("--depth", depth):
                settings.append(Setting(split, dataclasses.replace(base, depth=d), branch_free))
        simulator = Simulator(traces, table, [*settings, *published_settings(table)])
        progress = track(settings, "replaying", console=Console(stderr=True))
        results = [(setting, simulator.run(setting)) for setting in progress]
        beside = list(simulator.beside_published())
        lengths = [simulator.lengths(setting) for _, setting, _ in beside]
        console = Console() if Console().is_terminal else Console(width=PIPE_WIDTH)
        console.print(f"{table.title}; trace of {about['model']} + {about['draft']}: {len(traces)} answers, "
                      f"{sum(len(t.text) for t in traces)} tokens", highlight=False, soft_wrap=True)  # fmt: skip
        print_grid(console, table, results, length_from)
        if beside:
            print_published(console, beside)
            print_lengths(console, beside, lengths)
        if json_ is not None:
            report = {
                "times": dataclasses.asdict(table),
                "trace": about,
                "grid": [_describe(setting) | dataclasses.asdict(summary) for setting, summary in results],
                "published": [
                    {"published": dataclasses.asdict(row), "lengths": by_kind, **_describe(setting), **found}
                    for (row, setting, _), by_kind, found in zip(
                        beside, lengths, [dataclasses.asdict(summary) for *_, summary in beside], strict=True
                    )
                ],
            }  # fmt: skip
            json_.write_text(json.dumps(_without_nan(report), indent=1) + "\n", encoding="utf-8")

    run_command(NAME, run)


class Simulator:
    """Replays of all texts; settings whose trees are alike share their compiled functions."""

    def __init__(self, traces: Sequence[Trace], times: Times, settings: Sequence[Setting]):
        """Put the tables on the device; `settings` says how much room they need."""
        self._times = times
        self._keep = traces[0].keep
        self._traces = traces
        most = max((s.method.num_rows for s in settings), default=0)
        tokens = -(-(max(len(t.text) for t in traces) + most) // TOKEN_STEP) * TOKEN_STEP
        nodes = max(len(t.parent) for t in traces)
        self._tables = [make_table(t, nodes, tokens) for t in traces]
        self._room = max((s.depth * (4 if s.method.adaptive else 1) for s in settings), default=0)

    def replays(self, setting: Setting) -> list[Replayed]:
        """Every text under a setting."""
        method = setting.method
        if (method.branch or 0) > self._keep:
            raise ConfigError(f"k is {method.branch}, and the trace holds {self._keep} proposals of each context")
        steps = steps_of(self._times, setting)
        pairs = zip(self._tables, self._traces, strict=True)
        return [replay(table, len(trace.text), setting, steps, self._room) for table, trace in pairs]

    def run(self, setting: Setting) -> Summary:
        """All texts under a setting."""
        return summarise(self.replays(setting), setting, steps_of(self._times, setting))

    def lengths(self, setting: Setting) -> dict[str, float]:
        """Mean accepted length by category."""
        replays = self.replays(setting)
        result = {}
        for category in dict.fromkeys(t.category for t in self._traces):
            mine = [r for r, t in zip(replays, self._traces, strict=True) if t.category == category]
            result[category] = sum(r.tokens for r in mine) / sum(len(r.rounds) for r in mine)
        return result

    def beside_published(self) -> Iterator[tuple[Published, Setting, Summary]]:
        """What the model says for each published row."""
        for row in self._times.published:
            for setting in _settings_of(row, self._times):
                yield row, setting, self.run(setting)


def published_settings(times: Times) -> list[Setting]:
    """Settings that published rows may have been measured with: none says its d."""
    return [setting for row in times.published for setting in _settings_of(row, times)]


def _settings_of(row: Published, times: Times) -> list[Setting]:
    base = Setting(row.split, jaxspec.SwiftSpec(row.batch - 1, row.width, overlap=row.split.draft is not None))
    if base.overlap:
        return [_with(base, depth=d) for d in _depths(times, base)]
    # The catching-up pass and one of growth; and a tree that outlives its round, with one or two.
    return [_with(base, depth=1, reuse=False), _with(base, depth=1), _with(base, depth=2, reuse=False)]


def _with(setting: Setting, **changes: Any) -> Setting:
    return dataclasses.replace(setting, method=dataclasses.replace(setting.method, **changes))


def _depths(times: Times, setting: Setting) -> list[int]:
    """The paper's rule: r target passes per draft pass, or one more."""
    if not setting.overlap:
        return [1, 2, 3]
    steps = steps_of(times, setting)
    ratio = int(steps.target / steps.draft) if steps.draft else 1
    return [max(1, ratio), max(1, ratio) + 1]


def print_grid(
    console: Console, times: Times, results: Sequence[tuple[Setting, Summary]], length_from: str = "trace"
) -> None:
    """One line per setting; the fastest is marked."""
    plain = 1000 / min(times.target_pass(parse_split(str(n)), 1) + times.walk for n in times.target)
    rates = [rate_of(times, setting, summary, length_from) for setting, summary in results]
    best = max((r for r in rates if r is not None), default=None)
    table = Columns(title=f"tokens/s with {length_from} lengths; plain decoding: {plain:.0f}")
    for name in ("split", "mode", "bs", "w", "d", "tokens/s", "x plain", "length", "round ms", "formula", "exposed",
                 "target idle", "draft idle", "token hit", "eval. hit", "computed", "dropped", "stood in"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("split", "mode") else "right")
    for (setting, s), rate in zip(results, rates, strict=True):
        method = setting.method
        shown = ("-", "-") if rate is None else (f"{rate:.0f}{' *' * (rate == best)}", f"{rate / plain:.2f}")
        table.add_row(
            str(setting.split), mode_of(setting), str(method.num_rows), str(method.width), str(method.depth),
            *shown, f"{s.length:.2f}", f"{s.round_ms:.2f}", f"{s.steady_ms:.2f}", f"{s.exposed:.2f}",
            *(f"{100 * share:.0f} %" for share in (s.target_idle, s.draft_idle, s.token_hit, s.evaluated_hit)),
            f"{s.computed:.1f}", f"{s.dropped:.1f}", f"{100 * s.stood_in:.1f} %",
        )  # fmt: skip
    console.print(table)


def print_published(console: Console, beside: Sequence[tuple[Published, Setting, Summary]]) -> None:
    """Published rates and what the model makes of them."""
    table = Columns(title="beside what was published")
    for name in ("split", "mode", "bs", "w", "d", "exposed", "round ms", "implied", "tokens/s, published",
                 "its length", "model, its length", "error", "our length", "model, our length"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("split", "mode") else "right")
    for row, setting, s in beside:
        method, theirs = setting.method, row.length
        known = ["-", f"({row.tokens_per_s * s.round_ms / 1000:.2f})", "-", "-"]
        if theirs is not None and theirs > (most := longest_length(setting)):
            known = [f"{1000 * theirs / row.tokens_per_s:.2f}", f"{theirs:.2f}", f"impossible: at most {most}", "-"]
        elif theirs is not None:
            rate = 1000 * theirs / s.round_ms
            known = [f"{1000 * theirs / row.tokens_per_s:.2f}", f"{theirs:.2f}", f"{rate:.0f}",
                     f"{100 * (rate / row.tokens_per_s - 1):+.1f} %"]  # fmt: skip
        table.add_row(
            str(setting.split), mode_of(setting), str(method.num_rows), str(method.width), str(method.depth),
            f"{s.exposed:.2f}", f"{s.round_ms:.2f}", known[0], f"{row.tokens_per_s:.0f}", known[1], known[2], known[3],
            f"{s.length:.2f}", f"{s.tokens_per_s:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print("implied: their length over their rate. In brackets: their rate times our round.", highlight=False)


def print_lengths(
    console: Console, beside: Sequence[tuple[Published, Setting, Summary]], lengths: Sequence[dict[str, float]]
) -> None:
    """Our accepted lengths by category under the published settings."""
    table = Columns(title="our accepted length by category")
    for name in ("split", "mode", "d", *lengths[0], "all"):
        table.add_column(name, justify="left" if name in ("split", "mode") else "right")
    for (_, setting, s), found in zip(beside, lengths, strict=True):
        numbers = (f"{length:.2f}" for length in (*found.values(), s.length))
        table.add_row(str(setting.split), mode_of(setting), str(setting.method.depth), *numbers)
    console.print(table)


def rate_of(times: Times, setting: Setting, summary: Summary, length_from: str) -> float | None:
    """Tokens per second; None where no length was published for such a setting, or it cannot have the published one."""
    if length_from == "trace":
        return summary.tokens_per_s
    method = setting.method
    for row in times.published:
        same = (row.split.draft is not None) == setting.overlap
        if same and (row.batch, row.width) == (method.num_rows, method.width) and row.length is not None:
            if row.length > longest_length(setting):
                return None
            return 1000 * row.length / summary.round_ms
    return None


def mode_of(setting: Setting) -> str:
    """Of a setting, in words."""
    words = ["overlap" if setting.overlap else "serial"]
    words += ["adaptive"] * setting.method.adaptive + ["fresh trees"] * (not setting.method.reuse)
    words += ["nodes only"] * (not setting.method.leaves) + ["branch-free"] * setting.branch_free
    return ", ".join(words)


def _describe(setting: Setting) -> dict[str, Any]:
    method = setting.method
    return {
        "split": str(setting.split), "mode": mode_of(setting), "batch": method.num_rows, "width": method.width,
        "depth": method.depth, "branch": method.branch,
    }  # fmt: skip


def _numbers(option: str, text: str) -> list[int]:
    parts: Iterable[str] = (part.strip() for part in text.split(","))
    numbers = [int(part) if part.isdecimal() else 0 for part in parts]
    if not all(numbers):
        raise ConfigError(f"{option} {text!r}: write positive numbers, by comma")
    return numbers


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    app()
