"""Whether a draft fits its target: what is accepted, what that gains here, and the likely cause where it is little."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.llm import internals
from jaxspec.tune.run import Progress, Trial, compare_methods, measure_acceptance

# A first drafted token is accepted so often with a draft that fits, in share of rounds. Heads that read hidden states:
# about 0.8 in EAGLE's paper, 0.6 of the draft that ships. Draft models of the same family: 0.5 to 0.9 (Leviathan et
# al. 2023, table 3).
TYPICAL = {True: (0.55, 0.85), False: (0.5, 0.9)}
FAR_BELOW = 0.5  # of the lower end of what is typical
# So many times as much accepted of plain text as of chats: the chats' template is strange to the draft.
TEMPLATE = 1.5


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a chain of a draft had accepted, by depth: the share of those that were reached."""

    reads_states: bool  # whether the draft is fed the target's hidden states
    chats: tuple[float, ...]  # answers to prompts in the chat template
    plain: tuple[float, ...]  # continuations of the same prompts as plain text; empty without a chat template
    is_mtp: bool = False  # whether it is a layer of the target's own checkpoint

    @property
    def accepted(self) -> float:
        """Tokens of the chain that a round accepts on average."""
        return sum(itertools.accumulate(self.chats, lambda reached, share: reached * share))

    def lines(self) -> list[str]:
        """Findings for people."""
        kind = "heads that read hidden states" if self.reads_states else "draft models of the target's family"
        low, high = TYPICAL[self.reads_states]
        first = self.chats[0]
        return [
            f"a chain of {len(self.chats)} has {self.accepted:.2f} tokens accepted on average",
            f"the first one is accepted in {first:.0%} of rounds; typical of {kind}: {low:.0%} to {high:.0%}",
            self._judge(first, low),
        ]

    def _judge(self, first: float, low: float) -> str:
        if self.plain and self.plain[0] > max(TEMPLATE * first, low * FAR_BELOW) and first < low:
            return (
                f"of plain text {self.plain[0]:.0%} are: the draft was probably trained with another chat template, "
                "or without one"
            )
        if first >= low:
            return "the draft fits this target"
        if first >= low * FAR_BELOW:
            return "that is below what is usual: prompts of another kind than it was trained on, or another fine-tune"
        if self.is_mtp:
            return "that is far below: the model was probably trained further than its layer for multi-token prediction"
        if self.reads_states:
            return (
                "that is far below: the head was probably trained for another base model or fine-tune, or its config "
                "names other layers than it was trained with (eagle_aux_hidden_state_layer_ids, see docs/drafts.md)"
            )
        return "that is far below: the draft was probably trained on other data or is another model's"


def examine_draft(
    llm: Any, prompts: Sequence[BenchPrompt], sampling: SamplingParams, progress: Progress
) -> Iterator[Trial]:
    """The trial of `auto` alone, with findings about the draft. ConfigError: there is no draft model."""
    models = internals(llm).models
    if models.draft is None:
        raise ConfigError("--quick examines a draft model: give one with --draft-model")
    for trial in compare_methods(llm, "auto", prompts, sampling, progress):
        plain = ()
        if llm.tokenizer.has_chat_template:
            plain = measure_acceptance(llm, prompts, sampling, progress, encode=_encode_plainly)
        features = models.draft.cfg.features
        is_mtp = features is not None and features.kind == "mtp"
        fit = Fit(features is not None, tuple(trial.known["acceptance"]), tuple(plain), is_mtp)
        known = {**trial.known, "fit": dataclasses.asdict(fit)}
        yield dataclasses.replace(trial, known=known, lines=(*trial.lines, *fit.lines()))


def _encode_plainly(llm: Any, prompt: BenchPrompt) -> list[int]:
    return llm.encode(prompt.turns[0])
