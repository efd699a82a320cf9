"""`jaxspec-check`: is speculation lossless here?"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.cli.options import KERNELS_HELP, OptionTypes, check_output, merge_options, setting_types
from jaxspec.cli.run import VersionOption, run_app, run_command
from jaxspec.errors import ConfigError, JaxspecError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxspec.check.reference_decoder import Scorer
    from jaxspec.check.run import Comparison
    from jaxspec.llm import LLM

NAME = "jaxspec-check"
PLAIN = "ar"
ALL = "all"

# Tables need this much room; a file or a pipe has it.
PIPE_WIDTH = 150

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def check(
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts [a few of the suite that ships].")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of question_id, category and turns; first turns are used.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Hugging Face folder, GGUF file or native checkpoint [the default model]."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="Checkpoint of a draft model.")] = None,
    method: Annotated[
        str, typer.Option(help="Methods to check, by comma; all is every one that fits the models.")
    ] = ALL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens per answer.")] = 64,
    max_prompts: Annotated[int, typer.Option(min=1, help="Most prompts, spread over the file.")] = 8,
    samples: Annotated[
        int, typer.Option(min=200, help="Draws per distribution test, for methods that need one.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Random stream of seeded sampling; first seed of the draws.")] = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the chat template (default if there is one) or none.")
    ] = None,
    target_devices: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    draft_devices: Annotated[
        int | None, typer.Option(min=1, help="Devices of its own for the draft; for swiftspec [the target's].")
    ] = None,
    draft_platform: Annotated[
        str | None, typer.Option(help="Where the draft's devices are, if not where the target's are: cpu.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kernels: Annotated[str, typer.Option(help=KERNELS_HELP)] = "auto",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting of the method, name=value.")] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON object with everything here; - is standard output.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Check that methods say what plain decoding says; exit status 0 if they do, 1 if not.

    Greedy decoding and seeded sampling are compared token by token. Where two texts part, plain decoding scores the
    place once more: a margin within rounding is a tie, anything beyond is a fault. Methods that promise the
    distribution only are compared greedily, and by a chi-square test of the first tokens of many draws.
    """

    def run() -> None:
        check_output(json_)
        # Heavy imports only now: --help and usage errors answer at once.
        texts = _read_prompts(prompt or [], prompts, max_prompts)
        from jaxspec.llm import LLM, has_draft

        drafting = has_draft(model, draft_model)
        apart = draft_devices is not None or draft_platform is not None
        methods, skipped = _make_methods(method, set_ or [], drafting, draft_model is not None, apart)
        first = next((m for m in methods if drafting and m.drafts and m.own_devices >= apart), PLAIN)
        llm = LLM(
            model, draft=draft_model, method=first, dtype=dtype, kernels=kernels,  # pyright: ignore[reportArgumentType]
            target_devices=target_devices, draft_devices=draft_devices, draft_platform=draft_platform,
        )  # fmt: skip
        plain = llm if llm.engine.method.name == PLAIN else llm.with_method(PLAIN)
        encoded = [_encode(plain, text, chat) for _, text in texts]
        names = [name for name, _ in texts]
        draft_path = None if llm.draft_path is None else str(llm.draft_path)
        options = {"max_tokens": max_tokens, "samples": samples, "seed": seed}
        report: dict[str, Any] = {
            "lossless": True, "model": str(llm.model_path), "draft": draft_path, "dtype": str(llm.engine.target.dtype),
            "weights": str(llm.engine.target.weights), "kernels": llm.kernels.name,
            "target_devices": target_devices, "draft_devices": draft_devices, "draft_platform": draft_platform,
            **options,
            "prompts": names, "methods": [], "skipped": skipped,
        }  # fmt: skip

        from jaxspec.check.reference_decoder import Scorer

        console = _console(json_)
        report["rows"] = _check_rows(plain, encoded[0], max_tokens)
        console.print(_words_on_rows(report["rows"], plain.kernels.name), markup=False, highlight=False)
        scorer = Scorer(plain.engine.target, plain.params)
        for candidate in methods:
            try:
                # Plain decoding shares its engine with itself: what is left to see is whether it repeats itself.
                speculative = plain if candidate.name == PLAIN else llm.with_method(candidate)
            except ConfigError as error:
                if method != ALL:
                    raise
                skipped[candidate.name] = str(error)
                continue
            with _Bar(candidate.name) as bar:
                entry = _check_method(plain, speculative, candidate, encoded, options, scorer, bar.advance)
            report["methods"].append(entry)
            _print_method(console, entry, names, plain)
        faulty = [entry["method"] for entry in report["methods"] if not entry["lossless"]]
        if plain.kernels.native and report["rows"]["bitwise"] is False:
            faulty.append("passes of several rows")
        calls = llm.kernels.own_calls().values()
        refused = [call.refused for call in calls if call.refused is not None]
        report["kernels_refused"] = refused
        # By whatever else these were carried out.
        unused = bool(refused) and not any(call.taken for call in calls)
        report["lossless"] = not faulty and not unused
        for name, reason in [*skipped.items(), *((f"kernels {kernels}", f"do not take {call}") for call in refused)]:
            console.print(f"not checked: {name}: {reason}", markup=False, highlight=False)
        if json_ is not None:
            text = json.dumps(_jsonable(report), ensure_ascii=False, allow_nan=False)
            print(text) if str(json_) == "-" else json_.write_text(text + "\n", encoding="utf-8")
        if faulty:
            raise JaxspecError(f"not lossless here: {', '.join(faulty)}")
        if unused:
            raise JaxspecError(f"kernels {kernels!r} take no call of this model: others were checked; use auto or xla")

    run_command(NAME, run)


def main() -> None:
    """Entry point."""
    run_app(app, NAME)


def _read_prompts(given: Sequence[str], file: Path | None, most: int) -> list[tuple[str, str]]:
    """Names and texts of the prompts."""
    if given and file is not None:
        raise ConfigError("give prompts as arguments or by --prompts, not both")
    if not all(given):
        raise ConfigError("a prompt is empty: it has 0 characters and at least 1 is needed")
    if given:
        return [(str(index), text) for index, text in enumerate(given, 1)][:most]
    from jaxspec.bench.prompts import load_prompts

    loaded = load_prompts(file)
    count = min(most, len(loaded))
    return [(str(p.question_id), p.turns[0]) for p in (loaded[i * len(loaded) // count] for i in range(count))]


def _encode(llm: "LLM", text: str, chat: bool | None) -> list[int]:
    template = llm.tokenizer.has_chat_template
    if chat and not template:
        raise ConfigError(f"{llm.model_path} has no chat template; --raw completes the text as it is")
    return llm.encode([{"role": "user", "content": text}] if template and chat is not False else text)


def _make_methods(
    text: str, assignments: Sequence[str], has_draft: bool, given: bool, apart: bool
) -> tuple[list[Any], dict[str, str]]:
    """The methods to check with their settings, and those left out of `ALL`, with the reason.

    `given` says that somebody named a draft, which one of the methods should use; `apart`, that it is to have devices
    of its own, where those that draft on the target's cannot be checked.
    """
    from jaxspec.methods.registry import METHODS, check_draft_given, make_method

    names = [name.strip() for name in text.split(",")]
    skipped: dict[str, str] = {}
    if names == [ALL]:
        fits = {name: has_draft or not kind.needs_draft for name, kind in METHODS.items()}
        skipped = {name: "needs a draft model (--draft-model)" for name, fit in fits.items() if not fit}
        if apart:
            together = [name for name, kind in METHODS.items() if fits[name] and kind.drafts and not kind.own_devices]
            reason = "runs the draft on the target's devices (--draft-devices, --draft-platform)"
            skipped |= dict.fromkeys(together, reason)
            fits |= dict.fromkeys(together, False)
        names = [name for name, fit in fits.items() if fit and name != PLAIN]
        if not names:
            raise ConfigError(
                f"no method but {PLAIN} fits these models; --method {PLAIN} checks that it repeats itself"
            )
    elif ALL in names:
        raise ConfigError(f"--method {text!r}: {ALL} stands alone, or name the methods")
    defaults: list[Any] = [make_method(name) for name in names]
    if has_draft and given and not any(method.drafts for method in defaults):
        raise ConfigError(f"none of the methods {', '.join(names)} uses a draft model: leave --draft-model out")
    settings = _parse_settings(defaults, assignments)
    # Made anew, not changed: what a method derives from its settings has to follow them.
    methods = [make_method(method.name, _own(method, settings)) for method in defaults]
    for method in methods:
        check_draft_given(method, has_draft and method.drafts)
        if apart and method.drafts and not method.own_devices:
            raise ConfigError(
                f"method {method.name!r} runs the draft on the target's devices: "
                "leave --draft-devices and --draft-platform out"
            )
    if apart and not any(method.drafts for method in methods):
        raise ConfigError(
            f"none of the methods {', '.join(names)} uses a draft: leave --draft-devices and --draft-platform out"
        )
    return methods, skipped


def _parse_settings(methods: list[Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Values by name; one that no method has is refused."""
    known: dict[str, OptionTypes] = {}
    for method in methods:
        known |= setting_types(method)
    if assignments and not known:
        raise ConfigError(f"--set {assignments[0]}: {methods[0].name!r} has no settings")
    return merge_options({}, None, assignments, known)


def _own(method: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting goes to the methods that have it."""
    return {field.name: settings[field.name] for field in dataclasses.fields(method) if field.name in settings}


def _check_rows(plain: "LLM", prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Logits of plain decoding's own text, one by one and verified together."""
    from jaxspec.check.invariance import measure_invariance
    from jaxspec.config import SamplingParams

    answer = plain.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    result = measure_invariance(plain.engine.target, plain.params, prompt, answer.token_ids)  # pyright: ignore[reportAttributeAccessIssue]
    return {**dataclasses.asdict(result), "bitwise": result.bitwise}


def _words_on_rows(rows: Mapping[str, Any], kernels: str) -> str:
    together = f"{rows['tokens']} tokens verified in chains and trees of up to {rows['rows']} rows ({kernels} kernels)"
    if rows["bitwise"] is None:
        return f"not checked: passes of several rows, for want of a longer text (tokens: {rows['tokens']})"
    if rows["bitwise"]:
        return f"logits of {together} are those of plain decoding, bit for bit"
    return (
        f"logits of {together} differ from plain decoding's by up to {rows['largest']:.2g}: tokens may where they tie"
    )


def _check_method(
    plain: "LLM",
    speculative: Any,
    method: Any,
    prompts: list[list[int]],
    options: Mapping[str, int],
    scorer: "Scorer",
    advance: Callable[[str, int], None],
) -> dict[str, Any]:
    """Everything about one method, for tables and JSON."""
    from jaxspec.check.distribution import DEPTH, check_law, draw_many, law_samplings
    from jaxspec.check.run import PlainLaw, check_tokens, default_samplings, describe, summarise

    exact = getattr(method, "exact", "tokens")
    samplings = default_samplings(options["max_tokens"], options["seed"])
    if exact == "law":
        samplings = [sampling for sampling in samplings if sampling.temperature == 0]
    entry: dict[str, Any] = {"method": method.name, "settings": dataclasses.asdict(method), "exact": exact}
    entry |= {"tokens": [], "law": []}
    for sampling in samplings:
        step = functools.partial(advance, "prompts", len(prompts) * len(samplings))
        compared = check_tokens(plain, speculative, prompts, [sampling], scorer, step)
        summary = dataclasses.asdict(summarise(compared, scorer.dtype))
        entry["tokens"].append({"sampling": describe(sampling), **summary, "comparisons": compared})
    if exact == "law":
        longest = getattr(method, "longest_path", DEPTH)
        # The shortest prompt: every draw prefills it.
        prompt = min(prompts, key=len)
        # A fully accepted round and the token behind it.
        for sampling in law_samplings(max(DEPTH, longest)):
            law, draws = PlainLaw(scorer, prompt, sampling), []
            for draw in draw_many(speculative, prompt, sampling, options["samples"], options["seed"]):
                draws.append(draw)
                advance("draws", 2 * options["samples"])
            result = dataclasses.asdict(check_law(law, prompt, draws, edge_fn=law.edge))
            # Too few rounds got there, or none told how far it got: no verdict on the token behind so many.
            untested = [depth for depth in range(1, longest) if depth not in result["behind"]]
            entry["law"].append(
                {"sampling": describe(sampling), "prompt": prompts.index(prompt), "untested": untested, **result}
            )
    faults = [row["different"] for row in entry["tokens"]] + [row["verdict"] == "different" for row in entry["law"]]
    return {**entry, "lossless": not any(faults)}


def _print_method(console: "Console", entry: Mapping[str, Any], names: Sequence[str], llm: "LLM") -> None:
    """Tables of one method, and what they come to in words."""
    from rich.markup import escape
    from rich.table import Table

    settings = " ".join(f"{name}={value}" for name, value in entry["settings"].items())
    title = escape(f"{entry['method']} {settings}".strip())
    table = Table(title=f"{title}: token by token", title_justify="left")
    table.add_column("sampling", max_width=40)
    for column in ("equal", "tokens", "ties", "prompt", "position", "plain", "method", "margin", "rounding", "verdict"):
        table.add_column(column, justify="left" if column in ("plain", "method", "verdict") else "right")
    for row in entry["tokens"]:
        worst = _worst(row["comparisons"])
        shown = [""] * 6 if worst is None else _difference(worst, names, llm)
        verdict = "different" if row["different"] else "tie" if row["tie"] else "equal"
        counts = [f"{row['equal']}/{row['prompts']}", str(row["tokens"]), str(row["ties"])]
        table.add_row(*map(escape, [row["sampling"], *counts, *shown, verdict]))
    console.print(table)
    if entry["law"]:
        table = Table(title=f"{title}: distribution", title_justify="left")
        table.add_column("sampling", max_width=40)
        for column in ("draws", "first tokens", "behind accepted drafts", "impossible", "p", "verdict"):
            table.add_column(column)
        for row in entry["law"]:
            behind = " ".join(f"{depth}:{p:.2g}" for depth, p in row["behind"].items())
            if row["untested"]:
                behind += f" untested: {', '.join(map(str, row['untested']))}"
            cells = [row["sampling"], str(row["samples"]), f"{row['joint']:.2g}", behind, str(row["impossible"])]
            table.add_row(*map(escape, [*cells, f"{row['p_value']:.2g}", row["verdict"]]))
        console.print(table)
    for row in entry["tokens"]:
        if row["suspicious"]:
            text = f"{row['ties']} ties in {row['tokens']} tokens are more than rounding explains: {row['sampling']}"
            console.print(f"suspicious: {text}", markup=False, highlight=False)
    console.print(f"{entry['method']}: {_words(entry)}", markup=False, highlight=False)


def _worst(compared: Sequence["Comparison"]) -> "Comparison | None":
    """The first fault, else the first tie."""
    for verdict in ("different", "tie"):
        for comparison in compared:
            if comparison.verdict == verdict:
                return comparison
    return None


def _difference(comparison: "Comparison", names: Sequence[str], llm: "LLM") -> list[str]:
    """Where two texts part: prompt, position, both tokens, the margin and what passes for rounding."""

    def show(token: int | None) -> str:
        # Faulty methods emit what is no token.
        text = llm.tokenizer.token_bytes(token).decode(errors="replace") if token is not None and token >= 0 else ""
        return "the end" if token is None else f"{text!r} ({token})"

    where = [names[comparison.prompt], str(comparison.position)]
    tokens = [show(comparison.expected_token), show(comparison.got_token)]
    if comparison.margin is None or comparison.eps is None:
        return [*where, *tokens, "none", ""]
    return [*where, *tokens, f"{comparison.margin:.3g}", f"{comparison.eps:.3g}"]


def _words(entry: Mapping[str, Any]) -> str:
    rows = entry["tokens"]
    prompts, equal, tie, tokens, ties = (sum(r[k] for r in rows) for k in ("prompts", "equal", "tie", "tokens", "ties"))
    found = f"{equal} of {prompts} texts equal, {tie} equal up to ties ({ties} ties in {tokens} tokens)"
    if entry["law"]:
        found += (
            f", {sum(row['verdict'] == 'equal' for row in entry['law'])} of {len(entry['law'])} distributions equal"
        )
        untested = sorted({depth for row in entry["law"] for depth in row["untested"]})
        if untested:
            found += f"; untested for want of draws: the token behind {', '.join(map(str, untested))} accepted ones"
    return f"{'lossless here' if entry['lossless'] else 'NOT LOSSLESS'}: {found}"


def _jsonable(value: Any) -> Any:
    """Dataclasses as objects, and null for what JSON cannot say (infinities)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _console(json_: Path | None) -> "Console":
    from rich.console import Console

    to_stdout = str(json_) != "-"
    console = Console(stderr=not to_stdout)
    return console if console.is_terminal else Console(stderr=not to_stdout, width=PIPE_WIDTH)


class _Bar:
    """Progress for people: nothing is shown where nobody looks."""

    def __init__(self, name: str):
        self._name = name
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Bar":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, what: str, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(f"{self._name}: {what}", total=total)
        self._progress.advance(self._tasks[what])
