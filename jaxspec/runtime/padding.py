"""Zero padding, so that every tensor-parallel degree divides (SwiftSpec, section 4: TP padding).

Padded heads have zero query, key, value and output weights, padded MLP columns zero gate, up and down weights:
they add exact zeros to the residual stream (zero bytes are zeros in every block format). Padded vocabulary rows are
masked where logits are made.
"""

from jax.sharding import PartitionSpec


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def pad_shape(shape: tuple[int, ...], spec: PartitionSpec, multiple: int) -> tuple[int, ...]:
    """Shape whose split dimensions are rounded up to a multiple of `multiple`."""
    return tuple(n if name is None else round_up(n, multiple) for n, name in zip(shape, spec, strict=True))
