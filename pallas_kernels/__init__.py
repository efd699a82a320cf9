"""Operations that decide the speed of a decoding step: one folder each, a reference beside every fast path."""

# What users may ask for; `registry.choose` says what each means.
KERNEL_NAMES = ("auto", "xla", "cpu", "pallas-triton", "mosaic", "jax-triton")
