"""Counters of a speculative generation, in vLLM's vocabulary."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxspec.engine import StepOutput
from jaxspec.methods.swiftspec.messages import DraftCounts


def count_speculation(rounds: Sequence[StepOutput], num_tokens: int, budget: int) -> dict[str, Any]:
    """Count what the emitted tokens owe to a draft.

    Args:
      rounds: of one generation, in order.
      num_tokens: emitted tokens; what lies behind is not counted.
      budget: most tokens that the method drafts in a round.

    Returns:
      In vLLM's words, a step being a round with one target pass: `num_spec_steps`; `num_spec_tokens` (the budget);
      `num_draft_tokens` and `num_accepted_draft_tokens`, verified and accepted; `mean_acceptance_length`, 1 + accepted
      per step, the bonus token included; `draft_acceptance_rate`, accepted per drafted token (None without drafts);
      `acceptance_histogram`, steps by number of accepted tokens; `per_step_accepted` and `per_step_drafted`.
      For trees besides: `acceptance_by_depth`, the share of steps that accept depth d among those that accepted depth
      d - 1 and drafted one deeper; `mean_tree_depth` and `mean_tree_size` (tokens, root not counted); `budget_used`,
      the mean size over the budget; `num_draft_passes`. `rounds_by_kind` counts rounds in which a draft model
      ran ("drafted"), others that verified copies of earlier text ("copied"), and those without any draft ("plain").
      Where a draft keeps one tree through all rounds, `draft_tree`: see `count_draft_tree`.
    """
    kept = []
    for emitted in rounds:
        if num_tokens <= 0:
            break
        kept.append(emitted.cut(num_tokens))
        num_tokens -= len(kept[-1].tokens)
    steps = len(kept)
    accepted = [r.accepted for r in kept]
    drafted = [r.drafted for r in kept]
    histogram, kinds = Counter(accepted), Counter(map(_kind, kept))
    trees = [r.draft for r in kept if r.draft is not None]
    return {
        "num_spec_steps": steps,
        "num_spec_tokens": budget,
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "mean_acceptance_length": 1 + sum(accepted) / steps,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if any(drafted) else None,
        "acceptance_histogram": [histogram[n] for n in range(max(accepted) + 1)],
        "acceptance_by_depth": _by_depth(kept),
        "mean_tree_depth": sum(r.depth for r in kept) / steps,
        "mean_tree_size": sum(drafted) / steps,
        "budget_used": sum(drafted) / (steps * budget),
        "num_draft_passes": sum(r.draft_passes for r in kept),
        "rounds_by_kind": {kind: kinds[kind] for kind in ("plain", "copied", "drafted")},
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
        **({"draft_tree": count_draft_tree([trees])} if trees else {}),
    }


def count_draft_tree(generations: Sequence[Sequence[DraftCounts]]) -> dict[str, Any]:
    """Count what became of a tree that outlives the rounds (ALGORITHMS 3.4).

    Args:
      generations: of each, the counts of its rounds in order. A first round has no tree to hit, so that it is in none
        of the rates; they are None where there is no other round.

    Returns:
      `token_hit_rate`, rounds whose new root was in the tree; `evaluated_hit_rate`, those in which it was evaluated
      besides, so that a batch could be chosen at once; `exposed_passes_per_round`, draft passes that the target waited
      for; `tokens_computed`, tokens that went through the draft, and of these `tokens_caught_up`, verified before the
      draft had seen them. What each re-rooting did with the evaluated nodes, summed over rounds (one that survives
      three rounds is kept three times): `nodes_kept`, in the tree; `nodes_committed`, as part of the prefix;
      `nodes_dropped`, computed in vain.
    """
    everything = [counts for rounds in generations for counts in rounds]
    later = [counts for rounds in generations for counts in rounds[1:]]

    def total(name: str) -> int:
        return sum(getattr(counts, name) for counts in everything)

    def rate(name: str) -> float | None:
        return sum(getattr(counts, name) for counts in later) / len(later) if later else None

    return {
        "token_hit_rate": rate("token_hit"),
        "evaluated_hit_rate": rate("evaluated_hit"),
        "exposed_passes_per_round": rate("exposed"),
        "tokens_computed": total("computed"),
        "tokens_caught_up": total("caught_up"),
        "nodes_kept": total("kept"),
        "nodes_committed": total("committed"),
        "nodes_dropped": total("dropped"),
    }


def _kind(emitted: StepOutput) -> str:
    if emitted.draft_passes:
        return "drafted"
    return "copied" if emitted.drafted else "plain"


def _by_depth(rounds: Sequence[StepOutput]) -> list[float]:
    rates = []
    for depth in range(1, max(r.depth for r in rounds) + 1):
        tried = [r for r in rounds if r.depth >= depth and r.accepted >= depth - 1]
        if not tried:
            break
        rates.append(sum(r.accepted >= depth for r in tried) / len(tried))
    return rates
