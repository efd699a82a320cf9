"""`jaxspec-check`: is speculation lossless here?"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.cli.options import (
    MEASURED_ENGINE,
    MODEL,
    OptionTypes,
    ReportOption,
    check_output,
    finds_draft,
    has_own_devices,
    is_streamed,
    merge_options,
    model_options,
    sampling_options,
    setting_types,
)
from jaxspec.cli.processes import refuse_several
from jaxspec.cli.progress import Bar, table_console, write_report
from jaxspec.cli.run import command
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.methods.registry import METHODS, make_method

if TYPE_CHECKING:
    from rich.console import Console

    from jaxspec.check.run import Comparison
    from jaxspec.llm import LLM

NAME = "jaxspec-check"
PLAIN, ALL, QUICK_METHOD = "ar", "all", "auto"

PIPE_WIDTH = 150  # tables need this much room; a file or a pipe has it


@command(NAME, MODEL, MEASURED_ENGINE)
def app(
    given: dict[str, Any],
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts [a few of the suite that ships].")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of question_id, category and turns; first turns are used.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", "--method", help="By comma; all is every one that fits the models [auto; with --full all]."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All methods that fit, more texts and every setting; takes minutes.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens per answer [32; with --full 64].")
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option(min=1, help="Most prompts, spread over the file [2; with --full 8].")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=200, help="Draws per distribution test, for methods that need one [200; with --full 1000]."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random stream of seeded sampling; first seed of the draws.")] = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the chat template (default if there is one) or none.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="Compare answers under this JSON schema, too: greedy, and seeded sampling.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting of the method, name=value.")] = None,
    json_: ReportOption = None,
) -> None:
    """Check that methods give plain decoding's text; exit status 0 if they do, 1 if not.

    Greedy decoding and seeded sampling are compared token by token. Where two texts differ, plain decoding scores the
    place once more: a margin within rounding is a tie, a larger one a fault. Methods that promise the distribution
    only are compared greedily, and by a chi-square test of the first tokens of many draws.
    """
    refuse_several(NAME)
    check_output(json_)
    _check_prompts(prompt or [], prompts)
    from jaxspec.bench.columns import loading_method  # only now: --help and usage errors answer at once
    from jaxspec.bench.run import Column
    from jaxspec.check.reference_decoder import ReferenceDecoder
    from jaxspec.check.run import FULL, QUICK, RememberedDecoder, check_method, compare_shaped, estimate_full
    from jaxspec.llm import LLM, internals

    shape = None if json_schema is None else sampling_options({"json_schema": str(json_schema)}).structured_outputs
    size = FULL if full else QUICK
    sizes = {"max_tokens": max_tokens, "max_prompts": max_prompts, "samples": samples}
    size = dataclasses.replace(size, **{name: value for name, value in sizes.items() if value is not None})
    given = {"target_devices": 1} | given
    texts = _read_prompts(prompt or [], prompts, size.max_prompts)
    names = [name for name, _ in texts]
    drafting, apart, streamed = finds_draft(given), has_own_devices(given), is_streamed(given)
    wanted = methods or (ALL if full or apart else QUICK_METHOD)
    chosen, skipped = _make_methods(wanted, set_ or [], drafting, apart, streamed)
    columns = [Column(each.name, each) for each in chosen]
    first = loading_method(columns, drafting, "draft_model" in given, apart)
    llm = LLM(**model_options(given), method=first, session_memory=0)
    plain = llm if internals(llm).engine.method.name == PLAIN else llm.with_method(PLAIN)
    target, kernels = internals(llm).target, internals(llm).kernels
    encoded = [_encode(plain, text, chat) for _, text in texts]
    report: dict[str, Any] = {
        "lossless": True, "model": str(llm.model_path), "draft": llm.draft_path and str(llm.draft_path),
        "dtype": str(target.dtype), "activations": target.activations, "kv_dtype": str(target.kv_dtype),
        "weights": str(target.weights), "kernels": kernels.name,
        **{name: given.get(name) for name in ("target_devices", "draft_devices", "draft_platform")},
        **dataclasses.asdict(size), "seed": seed, "prompts": names, "methods": [], "skipped": skipped,
    }  # fmt: skip

    console = table_console(json_, PIPE_WIDTH)
    report["rows"] = _check_rows(plain, encoded[0], size.max_tokens)
    console.print(_words_on_rows(report["rows"], kernels.name), markup=False, highlight=False)
    reference, remembered = ReferenceDecoder(target, internals(llm).params.target), RememberedDecoder(plain)
    setup_s = 0.0
    for candidate in chosen:
        start = time.perf_counter()
        try:
            # Plain decoding is compared with its own first answers: it has to repeat itself.
            speculative = plain if candidate.name == PLAIN else llm.with_method(candidate)
        except ConfigError as error:
            if wanted != ALL:
                raise
            skipped[candidate.name] = str(error)
            continue
        setup_s = max(setup_s, time.perf_counter() - start)
        with Bar() as bar:
            advance = _counter(bar, candidate.name)
            entry = check_method(remembered, speculative, encoded, size, seed, reference, advance)
        if shape is not None:
            entry["shaped"] = compare_shaped(plain, speculative, encoded, shape, size.max_tokens, seed)
            # Elsewhere a tie may fall otherwise.
            entry["lossless"] &= not kernels.invariant or entry["shaped"]["equal"] == entry["shaped"]["texts"]
        report["methods"].append(entry)
        _print_method(console, entry, names, plain)
    faulty = [entry["method"] for entry in report["methods"] if not entry["lossless"]]
    if kernels.invariant and report["rows"]["bitwise"] is False:
        faulty.append("passes of several rows")
    calls = kernels.own_calls().values()
    refused = [call.refused for call in calls if call.refused is not None]
    report["kernels_refused"] = refused
    unused = bool(refused) and not any(call.taken for call in calls)  # other kernels carried out the calls then
    report["lossless"] = not faulty and not unused
    named = given.get("kernels", "auto")
    for name, reason in [*skipped.items(), *((f"kernels {named}", f"do not take {call}") for call in refused)]:
        console.print(f"not checked: {name}: {reason}", markup=False, highlight=False)
    if not full and report["methods"]:
        every = [type(each) for each in _make_methods(ALL, [], drafting, apart, streamed)[0]]
        minutes = max(1, round(estimate_full(report["methods"], setup_s, every) / 60))
        text = f"this was the quick check; --full checks {len(every)} methods with more texts, in about {minutes} min"
        console.print(text, markup=False, highlight=False)
    report["cache"] = _describe_cache(llm, console)
    write_report(_jsonable(report), json_)
    if faulty:
        raise JaxspecError(f"not lossless here: {', '.join(faulty)}")
    if unused:
        raise JaxspecError(f"kernels {named!r} take no call of this model: others were checked; use auto or xla")


def _describe_cache(llm: "LLM", console: "Console") -> dict[str, Any] | None:
    """Place and size of what jaxspec keeps on the disk; None where it keeps nothing."""
    from jaxspec.llm import internals
    from jaxspec.runtime.store import folder, limit

    cache = internals(llm).engine.store.cache_folder
    if cache is None:
        return None
    used, most = limit.used_bytes(cache), limit.most_bytes()
    text = f"cache: {cache}, {used / 2**20:.0f} MiB of at most {most / 2**20:.0f} MiB"
    text += f"; {folder.ENVIRONMENT} and {limit.ENVIRONMENT} change that"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return {"folder": str(cache), "bytes": used, "limit": most}


def _check_prompts(given: Sequence[str], file: Path | None) -> None:
    if given and file is not None:
        raise ConfigError("give prompts as arguments or by --prompts, not both")
    if not all(given):
        raise ConfigError("a prompt is empty: it has 0 characters and at least 1 is needed")


def _read_prompts(given: Sequence[str], file: Path | None, most: int) -> list[tuple[str, str]]:
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
    text: str, assignments: Sequence[str], has_draft: bool, apart: bool, streamed: bool
) -> tuple[list[Any], dict[str, str]]:
    """The methods to check with their settings, and those that `ALL` leaves out, with the reason."""
    from jaxspec.bench.columns import why_unfit

    names = [name.strip() for name in text.split(",")]
    skipped: dict[str, str] = {}
    if names == [ALL]:
        reasons = {name: why_unfit(name, has_draft, apart, streamed) for name in METHODS}
        skipped = {name: why for name, why in reasons.items() if why is not None}
        names = [name for name in METHODS if name not in skipped and name != PLAIN]
        if not names:
            raise ConfigError(
                f"no method but {PLAIN} fits these models; --methods {PLAIN} checks that it repeats itself"
            )
    elif ALL in names:
        raise ConfigError(f"--methods {text!r}: {ALL} stands alone, or name the methods")
    defaults: list[Any] = [make_method(name) for name in names]
    known: dict[str, OptionTypes] = {}
    for method in defaults:
        known |= setting_types(method)
    settings = merge_options({}, None, assignments, known)
    # Every setting goes to the methods that have it. Made anew, so that settings derived from others follow them.
    own = [{name: settings[name] for name in setting_types(method) if name in settings} for method in defaults]
    return [make_method(*each) for each in zip(names, own, strict=True)], skipped


def _check_rows(plain: "LLM", prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Logits of plain decoding's own text, one by one and verified together."""
    from jaxspec.check.invariance import measure_invariance
    from jaxspec.config import SamplingParams
    from jaxspec.llm import internals

    answer = plain.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    target, params = internals(plain).target, internals(plain).params.target
    result = measure_invariance(target, params, prompt, answer.token_ids)  # pyright: ignore[reportAttributeAccessIssue]
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


def _print_method(console: "Console", entry: Mapping[str, Any], names: Sequence[str], llm: "LLM") -> None:
    """Tables of one method, and a sentence on them."""
    from rich.markup import escape

    from jaxspec.bench import tables

    def make_table(title: str, columns: Sequence[str]) -> Any:
        table = tables.make_table(title, columns)
        table.columns[0].max_width, table.columns[0].no_wrap = 40, False
        return table

    settings = " ".join(f"{name}={value}" for name, value in entry["settings"].items())
    title = escape(f"{entry['method']} {settings}".strip())
    columns = ("sampling", "equal", "tokens", "ties", "prompt", "position", "plain", "method", "margin", "rounding")
    table = make_table(f"{title}: token by token", (*columns, "verdict"))
    for row in entry["tokens"]:
        # The first fault, else the first tie.
        worst = sorted((c for c in row["comparisons"] if c.verdict != "equal"), key=lambda c: c.verdict)
        shown = _difference(worst[0], names, llm) if worst else [""] * 6
        verdict = "different" if row["different"] else "tie" if row["tie"] else "equal"
        counts = [f"{row['equal']}/{row['prompts']}", str(row["tokens"]), str(row["ties"])]
        table.add_row(*map(escape, [row["sampling"], *counts, *shown, verdict]))
    console.print(table)
    if entry["distribution"]:
        columns = ("sampling", "draws", "first tokens", "after accepted drafts", "impossible", "p", "verdict")
        table = make_table(f"{title}: distribution", columns)
        for row in entry["distribution"]:
            after = " ".join(f"{depth}:{p:.2g}" for depth, p in row["after"].items())
            after += f" untested: {', '.join(map(str, row['untested']))}" if row["untested"] else ""
            cells = [row["sampling"], str(row["samples"]), f"{row['joint']:.2g}", after, str(row["impossible"])]
            table.add_row(*map(escape, [*cells, f"{row['p_value']:.2g}", row["verdict"]]))
        console.print(table)
    for row in entry["tokens"]:
        if row["suspicious"]:
            text = f"{row['ties']} ties in {row['tokens']} tokens are more than rounding explains: {row['sampling']}"
            console.print(f"suspicious: {text}", markup=False, highlight=False)
    if "shaped" in entry:
        text = "{equal} of {texts} texts under the schema equal".format(**entry["shaped"])
        console.print(f"{entry['method']}: {text}", markup=False, highlight=False)
    console.print(f"{entry['method']}: {_words(entry)}", markup=False, highlight=False)


def _difference(comparison: "Comparison", names: Sequence[str], llm: "LLM") -> list[str]:
    """Cells of the first difference: prompt, position, both tokens, the margin and the largest margin of a tie."""

    def show(token: int | None) -> str:
        # A faulty method may emit an id that is no token.
        text = llm.tokenizer.token_bytes(token).decode(errors="replace") if token is not None and token >= 0 else ""
        return "the end" if token is None else f"{text!r} ({token})"

    numbers = ["none" if comparison.margin is None else f"{comparison.margin:.3g}"]
    numbers.append("" if comparison.eps is None else f"{comparison.eps:.3g}")
    tokens = [show(comparison.expected_token), show(comparison.got_token)]
    return [names[comparison.prompt], str(comparison.position), *tokens, *numbers]


def _words(entry: Mapping[str, Any]) -> str:
    rows = entry["tokens"]
    prompts, equal, tie, tokens, ties = (sum(r[k] for r in rows) for k in ("prompts", "equal", "tie", "tokens", "ties"))
    found = f"{equal} of {prompts} texts equal, {tie} equal up to ties ({ties} ties in {tokens} tokens)"
    if entry["distribution"]:
        verdicts = [row["verdict"] for row in entry["distribution"]]
        found += f", {verdicts.count('equal')} of {len(verdicts)} distributions equal"
        untested = sorted({depth for row in entry["distribution"] for depth in row["untested"]})
        if untested:
            found += f"; too few draws to test the token after {', '.join(map(str, untested))} accepted ones"
    return f"{'lossless here' if entry['lossless'] else 'NOT LOSSLESS'}: {found}"


def _jsonable(value: Any) -> Any:
    """Dataclasses as objects, and null for infinities, which JSON does not have."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _counter(bar: Bar, name: str) -> Callable[[str, int], None]:
    done: dict[str, int] = {}

    def advance(what: str, total: int) -> None:
        done[what] = done.get(what, 0) + 1
        bar.show(f"{name}: {what}", done[what], total)

    return advance
