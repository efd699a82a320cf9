"""The manifest of a native checkpoint, `jaxspec.json`; it is read and checked without the arrays and without Orbax.

Version 2 lists the files of the checkpoint with their checksums, and has a checksum of its own.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.native.files import Files, check_text_files, describe_files, read_files, verify_files
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.files import read_json
from jaxspec.models import quantization
from jaxspec.models.config import ModelConfig, config_from_data, config_to_data
from jaxspec.models.params import ArrayInfo, declare_leaves
from jaxspec.models.quantization import PARTS, WEIGHT_TYPES, LeafType, Storage, weight_leaves

MANIFEST = "jaxspec.json"
FORMAT, VERSION = "jaxspec", 2
WITHOUT_FILES = 1  # the version that lists no files; it is still read

# A folder of this name belongs to an unfinished conversion, whatever it holds.
PARTIAL = re.compile(r"\..*\.partial-\d+")

_MANIFEST_KEYS = ("format", "version", "model", "dtype", "eos_ids", "num_bytes", "arrays")
_FILES_KEYS = ("files", "checksum")  # since version 2
_DRAFT_KEYS = ("vocabulary",)  # where the embedding is the target's
_MAX_LISTED = 5


@dataclasses.dataclass(frozen=True)
class NativeCheckpoint:
    """An opened native checkpoint; its manifest is checked, its arrays are still on disk.

    Attributes:
      eos_ids: token ids that end a text.
      storage: how each weight is stored (norms and biases are float32).
      vocabulary: digest of the vocabulary of the target whose embedding the model shares; None where it has its own.
      files: every file but the manifest, with size and SHA-256; None in a checkpoint of version 1.
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]
    storage: Storage
    vocabulary: str | None = None
    files: Files | None = None

    @functools.cached_property
    def infos(self) -> dict[str, ArrayInfo]:
        """Declaration of every stored array by leaf name."""
        return declare_leaves(self.config, self.storage)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(map(count_bytes, self.infos.values()))

    def leaf_bytes(self, name: str, expert: int | None = None) -> int:
        """Size of one array, of a query, key and value that are stored apart, or of an expert of one."""
        names = [name] if name in self.infos else [f"{name}.{part}" for part in PARTS]
        infos = [self.infos[each] for each in names]
        return sum(count_bytes(info) // (1 if expert is None else info.shape[0]) for info in infos)


def open_native(path: str | Path) -> NativeCheckpoint:
    """Open a native checkpoint: its manifest and the files beside the arrays are checked.

    Raises:
      CheckpointError: the folder is no finished checkpoint, its manifest is damaged, of an unknown version, or does not
        list the arrays of its own geometry, or a file of the tokenizer is missing, was added or changed.
    """
    path = Path(path)
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path}: is no native checkpoint: {MANIFEST} is missing")
    if PARTIAL.fullmatch(path.resolve().name):
        raise CheckpointError(f"{path}: was left by an interrupted conversion; delete it and convert again")
    manifest = read_json(file)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file}: format is {manifest.get('format')!r}, not {FORMAT!r}")
    if type(version := manifest.get("version")) is not int or version not in (WITHOUT_FILES, VERSION):
        reads = f"{WITHOUT_FILES} and {VERSION}"
        raise CheckpointError(f"{file}: format version {version!r} is not supported, this jaxspec reads {reads}")
    model = manifest.get("model")
    shares = isinstance(model, dict) and model.get("shares_embedding") is True
    if isinstance(model, dict) and model.get("features") is not None:
        # A feature draft's folder has no tokenizer of which the digest could be taken.
        shares = "vocabulary" in manifest
    keys = _MANIFEST_KEYS + (_DRAFT_KEYS if shares else ()) + (() if version == WITHOUT_FILES else _FILES_KEYS)
    missing, unknown = [key for key in keys if key not in manifest], [key for key in manifest if key not in keys]
    if missing or unknown:
        raise CheckpointError(f"{file}: missing keys: {missing or 'none'}; unknown keys: {unknown or 'none'}")
    dtype, arrays, vocabulary = manifest["dtype"], manifest["arrays"], manifest.get("vocabulary")
    if dtype not in WEIGHT_TYPES:
        raise CheckpointError(f"{file}: dtype is {dtype!r}, not one of {', '.join(WEIGHT_TYPES)}")
    if not isinstance(arrays, dict):
        raise CheckpointError(f"{file}: arrays must be an object, got {type(arrays).__name__}")
    try:
        cfg = config_from_data(manifest["model"], f"{file}: model")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    # Before anything as long as the geometry claims is built.
    if cfg.num_layers > len(arrays):
        listed = f"only {len(arrays)} arrays are listed"
        raise CheckpointError(f"{file}: the model has {cfg.num_layers} layers, but {listed}")
    if shares and not isinstance(vocabulary, str):
        raise CheckpointError(f"{file}: vocabulary must be the digest of the target's, got {vocabulary!r}")
    eos_ids = manifest["eos_ids"]
    if not isinstance(eos_ids, list) or any(type(i) is not int or not 0 <= i < cfg.vocab_size for i in eos_ids):
        raise CheckpointError(f"{file}: eos_ids must be token ids below {cfg.vocab_size}, got {eos_ids!r}")
    files = None if version == WITHOUT_FILES else read_files(manifest["files"], file)
    checkpoint = NativeCheckpoint(path, cfg, tuple(eos_ids), _read_storage(cfg, dtype, arrays), vocabulary, files)
    try:
        expected = {name: _describe_leaf(info) for name, info in checkpoint.infos.items()}
    except ValueError as error:
        raise CheckpointError(f"{file}: arrays do not match the model: {error}") from error
    problems = [f"{name} is missing" for name in expected if name not in arrays]
    problems += [f"{name} is unexpected" for name in arrays if name not in expected]
    problems += [f"{n} is {arrays[n]}, not {e}" for n, e in expected.items() if n in arrays and arrays[n] != e]
    if problems:
        more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(f"{file}: arrays do not match the model: {'; '.join(problems[:_MAX_LISTED])}{more}")
    if dtype != checkpoint.storage.default:
        raise CheckpointError(f"{file}: dtype is {dtype!r}, but most weights are {checkpoint.storage.default}")
    if manifest["num_bytes"] != checkpoint.num_bytes:
        raise CheckpointError(f"{file}: num_bytes is {manifest['num_bytes']!r}, the arrays have {checkpoint.num_bytes}")
    if files is not None:
        # Last, because the checks above say more.
        if manifest["checksum"] != manifest_checksum(manifest):
            raise CheckpointError(f"{file}: its checksum is not that of its content: damaged or changed by hand")
        check_text_files(path, files, MANIFEST)
    return checkpoint


def verify_native(path: str | Path) -> NativeCheckpoint:
    """Read every file of a native checkpoint and compare it with the manifest.

    Raises:
      CheckpointError: as `open_native`, or a file has changed, or the checkpoint is of version 1, without checksums.
    """
    checkpoint = open_native(path)
    if checkpoint.files is None:
        older = f"is of version {WITHOUT_FILES}, which lists no checksums of its files"
        raise CheckpointError(f"{path}: {older}; convert it again (jaxspec-convert {path} NEW)")
    verify_files(checkpoint.path, checkpoint.files, MANIFEST)
    return checkpoint


def write_manifest(
    folder: Path, cfg: ModelConfig, storage: Storage, eos_ids: Sequence[int], vocabulary: str | None = None
) -> None:
    """Write `jaxspec.json`, which makes `folder` a checkpoint and lists its files. Call it last."""
    storage = quantization.restrict_storage(storage, cfg)
    infos = declare_leaves(cfg, storage)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": config_to_data(cfg),
        "dtype": storage.default,
        "eos_ids": list(eos_ids),
        "num_bytes": sum(map(count_bytes, infos.values())),
        "arrays": {name: _describe_leaf(info) for name, info in infos.items()},
        "files": {name: entry for name, entry in describe_files(folder).items() if name != MANIFEST},
    } | ({} if vocabulary is None else {"vocabulary": vocabulary})
    manifest["checksum"] = manifest_checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything that a manifest says beside its checksum, whatever the order and the white space."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def count_bytes(info: ArrayInfo) -> int:
    """Size of one declared array."""
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def _describe_leaf(info: ArrayInfo) -> dict[str, Any]:
    """Shape, dtype and block format, as the manifest holds them."""
    described = {"shape": list(info.shape), "dtype": np.dtype(info.dtype).name}
    return described if info.format is None else described | {"format": info.format}


def _read_storage(cfg: ModelConfig, default: str, arrays: dict[str, Any]) -> Storage:
    """The types of the weights as the manifest lists them; one without a known type gets the default."""

    def read_type(name: str) -> str | None:
        entry = arrays.get(name)
        listed = (entry.get("format"), entry.get("dtype")) if isinstance(entry, dict) else ()
        return next((t for t in listed if isinstance(t, str) and t in WEIGHT_TYPES), None)

    types: dict[str, LeafType] = {}
    for leaf in weight_leaves(cfg):
        parts = [read_type(f"{leaf}.{part}") for part in PARTS] if leaf.endswith(".qkv") else [None]
        types[leaf] = tuple(filter(None, parts)) if all(parts) else read_type(leaf) or default
    return quantization.collect_storage(types, {leaf for leaf in types if f"{leaf}_order" in arrays})
