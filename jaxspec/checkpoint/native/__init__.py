"""jaxspec's own checkpoints (Orbax)."""
