"""Tokens per pass of a chain and of trees that one draft filling blocks proposes: counts, no clock.

    python tools/count_block.py DRAFT [--budgets 7,16,32] [--max-prompts 40] [--max-tokens 64] [--json FILE]

The default model answers the shipped prompts greedily. Trees of one budget differ in what their scores are:

* plain: the sums of the block's log-probabilities, as `specexec` takes them.
* penalty: built-in rates of probabilities, and 0.3 of them below a choice that is not the first; nothing is learned.
* learned: what `auto` learns of each depth, rank and place beside the first choice, the penalty included.

Rows cost nothing here and nothing is copied, so that a tree has all its tokens. All variants must give the same texts.
"""

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from harness import (
    conversation,
    digest_of,
    environment_line,
    format_interval,
    make_parser,
    make_table,
    numbers,
    pooled_interval,
    read_prompts,
    write_report,
)
from rich.console import Console
from rich.progress import track

from jaxspec import LLM, Chain, SamplingParams, SpecExec
from jaxspec.llm import internals
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.cost_model import (
    BESIDE,
    DEPTHS,
    KINDS,
    PLACES,
    RANKS,
    AcceptanceStats,
    CostModel,
)
from jaxspec.methods.core.drafter import block_rows, num_places
from jaxspec.methods.core.proposals import tree_proposals
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner, SpeculativeRunner
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.methods.core.tree_drafter import CARRIED_OVER, TreeDrafter
from jaxspec.methods.core.tree_round import SYNC_ROWS, TreeSettings
from jaxspec.methods.core.verify import match
from jaxspec.sampling.accept import Verified

# So many observations are not changed by what an answer adds.
FROZEN = 1e20
# A draft pass, where rows are free: so little that it always pays.
CHEAP = 1e-3


def fixed_penalty() -> AcceptanceStats:
    """What every text begins with: 0.3 below a choice that is not the first, 1 elsewhere, and nothing changes it."""
    tried, ratio = np.zeros(KINDS, np.float32), np.ones(KINDS, np.float32)
    tried[PLACES:] = FROZEN / CARRIED_OVER
    ratio[PLACES:][np.tile(np.repeat([False, True], RANKS), DEPTHS)] = BESIDE
    return AcceptanceStats(tried, tried * ratio)  # pyright: ignore[reportArgumentType]


class FrozenDrafter(TreeDrafter):
    """Every text begins with the same figures."""

    def _begin(self, sequence: Any, state: Any) -> Any:
        return super()._begin(sequence, None)


@dataclasses.dataclass(frozen=True)
class Corrected(Method):
    """The tree of a block whose scores are corrected as `auto` does, with all rows that the budget holds."""

    num_draft_tokens: int = 16
    branch: int = 16
    learns: bool = True

    name: ClassVar[str] = "corrected"
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        """The root and its tree."""
        return self.num_draft_tokens + 1

    @property
    def draft_rows(self) -> int:
        """Of a draft pass."""
        return 1

    def bind(
        self, models: Models, tokens: int, store: Store = NO_STORE, previous: Runner | None = None
    ) -> SpeculativeRunner:
        """See `Method.bind`."""
        draft = models.draft
        assert draft is not None
        settings = TreeSettings(
            self.num_rows, branch=self.branch, weighs=True, places=min(num_places(draft), self.num_draft_tokens)
        )  # fmt: skip
        slots = cache_slots(tokens, max(SYNC_ROWS, self.num_rows, block_rows(draft, self.max_path)))
        costs = CostModel(np.ones(self.num_rows), CHEAP, 0.0, one_pass=True, source="given")

        def make_drafter(verified: Verified) -> TreeDrafter:
            made = (TreeDrafter if self.learns else FrozenDrafter)(
                draft, slots, settings, verified, propose=tree_proposals("noise", draft.vocab, self.branch),
                costs=costs,
            )  # fmt: skip
            made.learned = None if self.learns else fixed_penalty()
            return made

        return SpeculativeRunner(
            models.target, tokens, make_drafter, max_path=self.max_path, num_rows=self.num_rows, rule=match,
            dynamic_rows=False, draft=draft,
        )  # fmt: skip


def variants(budget: int, places: int) -> dict[str, Method]:
    """What is compared at one budget."""
    branch = min(16, budget)
    made: dict[str, Method] = {"chain": Chain(min(budget, places)), "plain": SpecExec(budget, branch=branch)}
    made |= {"penalty": Corrected(budget, branch, learns=False), "learned": Corrected(budget, branch)}
    return made


def count(llm: LLM, prompts: Sequence[Any], max_tokens: int) -> dict[str, list[tuple[int, int]]]:
    """Tokens and target passes of every answer, by category; and the texts, by the name of no category."""
    found: dict[str, list[Any]] = collections.defaultdict(list)
    for prompt in prompts:
        out = llm.chat(conversation(prompt), SamplingParams(max_tokens=max_tokens))
        stats = out.stats.speculative_decoding
        assert stats is not None
        found[prompt.category].append((stats.num_spec_steps + stats.num_accepted_draft_tokens, stats.num_spec_steps))
        found[""].append(tuple(out.token_ids))
    return found


def main() -> None:
    """Count all variants at all budgets and print a table by category."""
    parser = make_parser(__doc__, max_prompts=40)
    parser.add_argument("draft", type=Path, help="a draft that fills blocks, for the default model")
    parser.add_argument("--budgets", type=numbers, default=[7, 16, 32], help="tokens of a tree, K [7,16,32]")
    arguments = parser.parse_args()
    prompts, texts, counts = read_prompts(arguments), None, {}
    llm = LLM(draft=str(arguments.draft), method=Chain(2))
    draft = internals(llm).models.draft
    places = 0 if draft is None else num_places(draft)
    if not places:
        raise SystemExit(f"{arguments.draft}: this draft fills no block")
    console = Console(stderr=True)
    known: dict[Method, Any] = {}  # a chain has no more tokens than places, whatever K is
    for budget in arguments.budgets:
        for name, method in track(variants(budget, places).items(), f"K = {budget}", console=console):
            if method not in known:
                found = count(llm.with_method(method), prompts, arguments.max_tokens)
                said = found.pop("")
                texts = texts or said
                if said != texts:
                    raise SystemExit(f"{name} at K = {budget} gave other texts")
                known[method] = found
            counts[budget, name] = known[method]
    head = ["K", "scores", *next(iter(counts.values())), "all", "95 %", "of the chain"]
    rows = []
    for (budget, name), found in counts.items():
        every = [pair for pairs in found.values() for pair in pairs]
        rates = [_rate(pairs) for pairs in (*found.values(), every)]
        chain = _rate([pair for pairs in counts[budget, "chain"].values() for pair in pairs])
        ends = format_interval(pooled_interval(every))
        rows.append([budget, name, *(f"{rate:.2f}" for rate in rates), ends, f"{rates[-1] / chain:.2f}"])
    print(environment_line(), "", make_table(head, rows), sep="\n")
    kept = [{"budget": budget, "scores": name, "counts": found} for (budget, name), found in counts.items()]
    write_report(arguments.json, draft=digest_of(arguments.draft), counts=kept)


def _rate(pairs: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in pairs) / sum(passes for _, passes in pairs)


if __name__ == "__main__":
    main()
