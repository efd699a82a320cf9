"""The geometry of a mixture of experts."""

import dataclasses

from jaxspec.errors import ConfigError
from pallas_kernels.experts.reference import Activation, Clamp, Scores

# No published model has a tenth of them. It bounds what a hostile file makes a reader build.
MOST_EXPERTS = 4096


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP: a router sends each row to a few of many MLPs.

    A row's router scores are the softmax of its router logits. Its result is the sum of the `per_token` best experts'
    results, each times its score; `renormalise` divides those scores by their sum. With `chosen_scores` they are the
    softmax of the chosen experts' logits alone.

    Attributes:
      count: E, experts of a layer.
      per_token: experts of a row.
      dim: width of an expert.
      renormalise: whether the scores of a row's experts add up to one.
      shared_dim: width of one more MLP that every row passes, times the sigmoid of a gate of its own; 0 for none.
      layers: which layers have experts; empty for all. The others have an MLP of `mlp_dim`.
      chosen_scores: see above; `renormalise` is true then.
      biases: whether the router and all projections of experts have biases.
      limit: of gpt-oss' activation `(up + 1) gate sigmoid(alpha gate)`, with the gate at most `limit` and up within it;
        None for `silu(gate) up`.
      alpha: see `limit`.
      beside: Gemma 4's kind. An MLP of `shared_dim` and the experts stand side by side, each with norms of its own, and
        both activate by gelu. The router norms the residual stream, and each expert's scores have a factor of its own.
    """

    count: int
    per_token: int
    dim: int
    renormalise: bool = True
    shared_dim: int = 0
    layers: tuple[bool, ...] = ()
    chosen_scores: bool = False
    biases: bool = False
    limit: float | None = None
    alpha: float = 1.702
    beside: bool = False

    def __post_init__(self):
        """Refuse mixtures that cannot be built, naming both numbers."""
        for name, minimum in (("count", 1), ("per_token", 1), ("dim", 1), ("shared_dim", 0)):
            value = getattr(self, name)
            known = not isinstance(value, bool) and isinstance(value, int) and minimum <= value < 2**31
            if not known:
                raise ConfigError(f"experts {name} must be an integer of at least {minimum}, got {value!r}")
        if self.count > MOST_EXPERTS:
            raise ConfigError(f"experts count {self.count} is more than {MOST_EXPERTS}")
        if self.per_token > self.count:
            raise ConfigError(f"experts per_token {self.per_token} must be at most the {self.count} experts there are")
        if self.chosen_scores and not self.renormalise:
            raise ConfigError("experts with chosen_scores have scores that add up to one; renormalise must be true")
        if self.beside and (not self.shared_dim or self.biases or self.limit is not None or not self.renormalise):
            raise ConfigError("experts beside an MLP of shared_dim are plain ones with renormalised scores")
        for name, factor in (("limit", self.limit), ("alpha", self.alpha)):
            if factor is not None and not factor > 0:
                raise ConfigError(f"experts {name} must be positive, got {factor}")

    @property
    def scores(self) -> Scores:
        """The kind of the router's scores, as the operation names it."""
        return "chosen" if self.chosen_scores else "renormalised" if self.renormalise else "all"

    @property
    def activation(self) -> Activation:
        """The activation, as the operation names it."""
        if self.beside:
            return "gelu"
        return None if self.limit is None else Clamp(self.limit, self.alpha)


def distinct_experts(experts: ExpertsConfig, rows: float) -> float:
    """Experts that some of so many rows are sent to, if each row's are drawn at random.

    The rows of a text have more in common: this is an upper estimate (docs/results/moe-cpu.md).
    """
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)
