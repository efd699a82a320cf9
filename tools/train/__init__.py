"""Distilling a draft model: text sampled from the target, its logits, training, and what the draft reaches."""
