"""Draft trees: growing, selecting, re-rooting; pure functions over one pytree."""
