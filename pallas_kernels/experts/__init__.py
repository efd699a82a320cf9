"""A mixture of experts: a router's choice for each row, and the products with the chosen experts."""

from pallas_kernels.experts.api import choose_experts, chosen_experts, experts
from pallas_kernels.experts.reference import Activation, Clamp, Scores

__all__ = ["Activation", "Clamp", "Scores", "choose_experts", "chosen_experts", "experts"]
