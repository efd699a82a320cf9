"""One door to every checkpoint format: open first, check everything, load onto a mesh later."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxspec.checkpoint.default import default_model_path, verify_default
from jaxspec.checkpoint.load import detect_format, load_foreign, open_checkpoint
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params
from jaxspec.placement import Placement


@dataclasses.dataclass(frozen=True)
class Weights:
    """A checkpoint whose headers are read and checked, and whose weights are still on disk."""

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]
    load: Callable[[Placement], Params]


def open_weights(path: Path | None) -> Weights:
    """Open a checkpoint of any format, or the default model.

    Raises:
      CheckpointError: it is missing, damaged or incomplete, or asks for something that is not supported.
    """
    is_default = path is None
    if path is None:
        path = default_model_path()
    if detect_format(path) == "native":
        # Orbax takes a second to import.
        from jaxspec.checkpoint.native import open_native, restore_native

        native = open_native(path)
        return Weights(
            path, native.config, native.eos_ids, lambda p: restore_native(native, p.plan, p.dtype, p.vocab_rows)
        )
    try:
        source = open_checkpoint(path)
    except ConfigError as error:
        # What the checkpoint asks for, not what the caller did.
        raise CheckpointError(str(error)) from error

    def load(placement: Placement) -> Params:
        if is_default:
            verify_default(source.path)
        return load_foreign(source, placement.plan, placement.dtype, placement.vocab_rows)

    return Weights(path, source.config, source.eos_ids, load)
