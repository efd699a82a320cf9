"""Choose the reader of a folder of quantised safetensors from its settings."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxspec.checkpoint.quantised import awq, compressed_tensors, fp8, gptq, mxfp4
from jaxspec.checkpoint.quantised.layout import QuantisedWeight, Tensors
from jaxspec.errors import CheckpointError
from jaxspec.files import read_json
from jaxspec.models.families.base import ConfigValues

READERS: dict[str, ModuleType] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "mxfp4": mxfp4,
}
# Settings beside `config.json`, of older files.
_OLD_FILES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
_PREFIX = "quantization_config."


class Scheme(NamedTuple):
    """A reader, and the settings that it has checked."""

    reader: ModuleType
    values: ConfigValues

    def find_weights(self, tensors: Tensors) -> tuple[dict[str, QuantisedWeight], set[str]]:
        """The quantised weights by name, and names of tensors that nothing needs."""
        unused = self.reader.unused_tensors(tensors) if hasattr(self.reader, "unused_tensors") else set()
        weights = self.reader.find_weights(tensors, self.values)
        taken = {name for weight in weights.values() for name in weight.tensors}
        for name in weights:
            if name not in taken and tensors.describe(name) is not None:
                raise CheckpointError(f"{tensors.path}: holds {name!r} twice: as numbers, and quantised")
        return weights, unused


def find_scheme(folder: Path, config: Any, config_file: Path) -> Scheme | None:
    """The scheme of a folder, from `quantization_config` of its parsed `config.json`, or a file beside it.

    Raises:
      CheckpointError: the settings are no JSON object.
      ConfigError: they ask for a scheme or a layout that is not supported.
    """
    file, settings, method = config_file, config.get("quantization_config"), None
    if not settings:
        for name, of in _OLD_FILES:
            if (folder / name).is_file():
                file, settings, method = folder / name, read_json(folder / name), of
                break
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: quantization_config must be a JSON object, got {type(settings).__name__}")
    values = ConfigValues(file, {f"{_PREFIX}{key}": value for key, value in settings.items()}, _PREFIX)
    method = values.get("quant_method", method)
    if not isinstance(method, str) or method not in READERS:
        values.refuse("quant_method", f"supported: {', '.join(READERS)}; GGUF files are, too")
    reader = READERS[method]
    reader.check(values)
    later = ("group_size", "q_group_size")
    values.refuse_unread(
        lambda key, value: key in reader.HARMLESS_KEYS or key in later or value in (None, 0, "", [], {})
    )
    return Scheme(reader, values)
