"""One door to every checkpoint format: open first, check everything, load onto a mesh later."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxspec.checkpoint.default_model import default_model_path, verify_default
from jaxspec.checkpoint.keymaps import source_storage
from jaxspec.checkpoint.load import detect_format, load_foreign, open_checkpoint
from jaxspec.checkpoint.native.manifest import open_native
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import Params
from jaxspec.models.quantization import Storage, fit_storage
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement


@dataclasses.dataclass(frozen=True)
class Weights:
    """A checkpoint whose headers are read and checked, and whose weights are still on disk.

    Attributes:
      path: the checkpoint.
      config: geometry.
      eos_ids: token ids that end a text.
      own_storage: the types of the weights as the checkpoint holds them.
      load: reads every parameter that the checkpoint holds as a placement has it: in blocks where its storage says so,
        else as numbers.
      vocabulary: digest of the vocabulary of the target whose embedding the model shares; None where it has its own.
      layers: blocks of the target of which the model consists, as its draft; None for a model with weights of its own.
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]
    own_storage: Storage
    load: Callable[[Placement], Params]
    vocabulary: str | None = None
    layers: LayerSet | None = None

    def storage(self, plan: MeshPlan) -> Storage:
        """What a placement on `plan` keeps the weights in, where they are to stay as the checkpoint holds them."""
        return fit_storage(self.own_storage, self.config, plan.tensor)


def open_weights(path: Path | None) -> Weights:
    """Open a checkpoint of any format, or the default model.

    Raises:
      CheckpointError: it is missing, damaged or incomplete, or asks for something that is not supported.
    """
    is_default = path is None
    if path is None:
        path = default_model_path()
    if detect_format(path) == "native":
        native = open_native(path)

        def restore(placement: Placement) -> Params:
            # Orbax takes a second to import; by now that runs beside the compiler.
            from jaxspec.checkpoint.native.checkpoint import restore_native

            return restore_native(native, placement.plan, placement.weights, placement.vocab_rows)

        return Weights(path, native.config, native.eos_ids, native.storage, restore, native.vocabulary)
    try:
        source = open_checkpoint(path)
    except ConfigError as error:
        # What the checkpoint asks for, not what the caller did.
        raise CheckpointError(str(error)) from error

    def load(placement: Placement) -> Params:
        if is_default:
            verify_default(source.path)
        return load_foreign(source, placement.plan, placement.weights, placement.vocab_rows)

    return Weights(path, source.config, source.eos_ids, source_storage(source), load)
