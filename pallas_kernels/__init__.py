"""The operations that take most of a decoding step: one folder each, with a reference beside every fast path."""

# The names that users may ask for. `selection.choose` says what each one means.
KERNEL_NAMES = ("auto", "xla", "cpu", "pallas-triton", "mosaic", "jax-triton", "mosaic-tpu")
