"""A conversation of ten turns: time to the first token of each turn, with and without the turns before it kept.

    JAX_NUM_CPU_DEVICES=2 python tools/bench_turns.py [--methods ar,auto,specexec,swiftspec] [--turns 10]

Each method answers the conversation twice. The warm model keeps its caches from turn to turn, the cold one computes
every prompt from its first token (`session_memory=0`). Both get the warm model's answers as history, and have to say
the same tokens. The programs are compiled before: a short conversation runs first.
"""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec.cli.run import run_command

NAME = "bench_turns"
QUESTION = (
    "Here is note number {n} of my travel diary: in the morning we walked along the harbour, watched the boats come in "
    "with their nets full of fish, drank coffee at the corner of the old market, and climbed the stairs to the "
    "lighthouse. In the afternoon it rained, so we read our books and wrote letters to our friends at home. "
    "What should we do on day {n}, and why?"
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def main(
    model: Annotated[str | None, typer.Option(help="Checkpoint [the default model].")] = None,
    methods: Annotated[str, typer.Option(help="By comma.")] = "ar,auto,specexec,swiftspec",
    turns: Annotated[int, typer.Option(min=1)] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 96,
) -> None:
    """Time to the first token by turn, warm and cold."""

    def run() -> None:
        table = Table(title="seconds to the first token: warm, cold, warm over cold")
        found = {name: converse(model, name, turns, max_tokens) for name in methods.split(",")}
        for heading in ("turn", "prompt", "new", *found):
            table.add_column(heading)
        first = next(iter(found.values()))
        for turn in range(turns):
            cells = [(rows[turn]["warm"], rows[turn]["cold"]) for rows in found.values()]
            shown = [f"{warm:.3f}  {cold:.3f}  {warm / cold:.2f}" for warm, cold in cells]
            table.add_row(str(turn + 1), str(first[turn]["prompt"]), str(first[turn]["new"]), *shown)
        Console().print(table, soft_wrap=True)
        for name, rows in found.items():
            print(f"{name}: tokens of all turns equal those of cold runs: {all(row['equal'] for row in rows)}")

    run_command(NAME, run)


def converse(model: str | None, method: str, turns: int, max_tokens: int) -> list[dict[str, Any]]:
    """Of each turn: prompt and new tokens, seconds to the first token warm and cold, whether the tokens are equal."""
    own: dict[str, Any] = {"target_devices": 1, "draft_devices": 1} if method == "swiftspec" else {}
    warm, cold = (jaxspec.LLM(model, method=method, session_memory=kept, **own) for kept in (None, 0))
    sampling = jaxspec.SamplingParams(max_tokens=max_tokens)
    for llm in (warm, cold):
        llm.chat([{"role": "user", "content": "Hello. " + QUESTION.format(n=0) * 4}], sampling)
    messages, rows = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTION.format(n=turn + 1)})
        answer, expected = warm.chat(messages, sampling), cold.chat(messages, sampling)
        messages.append({"role": "assistant", "content": answer.text})
        stats = answer.stats
        rows.append({
            "prompt": stats.prompt_tokens, "new": stats.prompt_tokens - stats.cached_prompt_tokens,
            "warm": stats.ttft_s, "cold": expected.stats.ttft_s,
            "equal": answer.token_ids == expected.token_ids,
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    app()
