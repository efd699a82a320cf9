"""Sampling: logits processors, position-keyed noise, the choice of a token."""
