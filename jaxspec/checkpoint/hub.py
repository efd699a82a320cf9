"""Models by name: `org/name`, `org/name:Q4_K_M`, `org/name@revision` and `hf://...`, by way of `huggingface_hub`.

Its cache, token, mirror, offline switch and progress bars are used as its documentation describes them (`HF_HOME`,
`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`). Only the files that jaxspec reads are fetched.
"""

import dataclasses
import glob
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.native.manifest import MANIFEST
from jaxspec.errors import CheckpointError
from jaxspec.files import digest_file

LOG = logging.getLogger(__name__)

SCHEMES = ("hf://", "hf.co/", "https://huggingface.co/")
DEFAULT_QUANT = "Q4_K_M"  # of several GGUF files, as in llama.cpp
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
# What a Hugging Face folder is read from, in addition to its weights.
FOLDER_FILES = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
    INDEX,
})  # fmt: skip
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+))?", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model on the hub: repository, revision (None for its main branch), and which GGUF file of it."""

    repo: str
    revision: str | None = None
    file: str | None = None  # a quantisation such as Q4_K_M, or a file name
    # Whether `pytorch_model.bin` will do where there is nothing else: drafts are published so.
    takes_pickle: bool = False

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repo + revision + ("" if self.file is None else f":{self.file}")


def parse_name(model: str, revision: str | None = None) -> HubName | None:
    """The name of a model on the hub; None for what is a path.

    What exists on disk is a path, and so is what has another form. `revision` is used where the name has none.
    CheckpointError: a scheme such as hf:// without a proper name after it.
    """
    scheme = next((known for known in SCHEMES if model.startswith(known)), None)
    # Unlike those of pathlib these functions say no to what is no path at all, such as a name that is too long.
    if scheme is None and (os.path.exists(model) or model.startswith((".", "~", os.sep))):
        return None
    found = _NAME.fullmatch(model.removeprefix(scheme or "").rstrip("/"))
    if found is None and scheme is not None:
        raise CheckpointError(f"{model}: is no name of a model; write hf://org/name, :quantisation after it if wanted")
    return found and HubName(found["repo"], found["revision"] or revision, found["file"])


def fetch(name: HubName) -> Path:
    """A folder or GGUF file with what jaxspec reads of a model, from the cache or the network.

    CheckpointError, in one line: no network and not in the cache, no such repository, revision or file, no access,
    several files to choose from, or a file that is not what the hub says it is.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return _fetch(name)
    except CheckpointError:
        raise
    # The first is a kind of the second, and missing, private and gated repositories look alike without a token.
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: access is granted by its owners: accept the conditions at https://huggingface.co/{name.repo} "
            "and set HF_TOKEN, or run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: is no file or folder here, and no public repository on the hub; a private one needs HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the repository has no revision {name.revision!r}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name}: is no file or folder here, and no name of a repository") from error
    except Exception as error:  # the libraries below raise what they like where a connection breaks
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{name}: cannot be fetched from the hub: {line}") from error


def _fetch(name: HubName) -> Path:
    from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except errors.HfHubHTTPError as error:
        if error.response is None or error.response.status_code < 500:
            raise
        return _fetch_cached(name, error)
    except Exception as error:  # no connection, or told to be offline
        return _fetch_cached(name, error)
    known: dict[str, Any] = {file.rfilename: file for file in info.siblings or ()}
    chosen = choose_files(name, known)
    options: dict[str, Any] = {"repo_id": name.repo, "revision": name.revision}
    if INDEX in chosen:
        folder = Path(snapshot_download(**options, allow_patterns=[INDEX]))
        chosen = (chosen | _indexed(name, folder)) & known.keys()
    cached = {file for file in chosen if isinstance(try_to_load_from_cache(name.repo, file, revision=info.sha), str)}
    folder = Path(snapshot_download(**options, allow_patterns=[glob.escape(file) for file in sorted(chosen)]))
    for file in sorted(chosen - cached):
        lfs = known[file].lfs
        if lfs is not None:
            _verify(name, folder / file, lfs.sha256)
    return _opened(folder, chosen)


def _fetch_cached(name: HubName, reason: Exception) -> Path:
    """The cached files of a model, for while the hub cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    store = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
    revision = name.revision or "main"
    ref = store / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = store / "snapshots" / commit
    line = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
    if not folder.is_dir():
        raise CheckpointError(
            f"{name}: is no file or folder here, is not in the cache, and the hub cannot be reached ({line})"
        )
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    chosen = choose_files(name, files, where="the cached part of the repository")
    if INDEX in chosen:
        chosen |= _indexed(name, folder)
    if missing := sorted(chosen - files):
        raise CheckpointError(f"{name}: {missing[0]} is not in the cache, and the hub cannot be reached ({line})")
    return _opened(folder, chosen)


def choose_files(name: HubName, files: Collection[str], where: str = "the repository") -> set[str]:
    """Choose the files of a repository that are needed; shards that an index lists are added later.

    CheckpointError: none that jaxspec reads, or several to choose from.
    """
    ggufs = sorted(
        file for file in files if file.endswith(".gguf") and not re.match("(mmproj|imatrix)", file.rpartition("/")[2])
    )
    if name.file is not None:
        return {_choose_gguf(name, ggufs, files, where)}
    if MANIFEST in files:
        return set(files)
    if "config.json" in files:
        weights = {file for file in files if file.endswith(".safetensors") and "/" not in file}
        if INDEX in files:
            weights = set()
        elif "model.safetensors" in weights:
            weights = {"model.safetensors"}
        if weights or INDEX in files:
            return weights | (FOLDER_FILES & set(files))
        if name.takes_pickle and PICKLE in files:
            return {PICKLE} | (FOLDER_FILES & set(files))
    if ggufs:
        return {_choose_gguf(name, ggufs, files, where)}
    kinds = sorted({file.rpartition(".")[2] for file in files if "." in file})
    found = ", ".join(kinds) or "nothing"
    raise CheckpointError(f"{name}: {where} has no safetensors, no GGUF file and no native checkpoint; it has {found}")


def _choose_gguf(name: HubName, ggufs: Sequence[str], files: Collection[str], where: str) -> str:
    wanted = name.file
    if wanted is not None and wanted in files:
        found = [wanted]
    else:
        token = re.compile(rf"(^|[-._]){re.escape(wanted or DEFAULT_QUANT)}([-._]|$)", re.IGNORECASE)
        found = [file for file in ggufs if token.search(file.rpartition("/")[2].removesuffix(".gguf"))]
        if wanted is None and not found and len(ggufs) == 1:
            found = list(ggufs)
    if len(found) == 1 and not _SHARD.search(found[0]):
        return found[0]
    if found and all(_SHARD.search(file) for file in found):
        raise CheckpointError(
            f"{name}: {found[0]} is one of {len(found)} parts of a split GGUF, which are not supported; "
            "join them with `llama-gguf-split --merge`"
        )
    choices = ", ".join(f"{name.repo}:{file}" for file in found or ggufs) or "no GGUF file"
    what = "several GGUF files" if found or wanted is None else f"no GGUF file {wanted!r}"
    raise CheckpointError(f"{name}: {where} has {what}; there is {choices}")


def _indexed(name: HubName, folder: Path) -> set[str]:
    """The shards of a model's weights."""
    try:
        shards = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{name}: {INDEX} does not list the files of the weights") from error
    if strange := [shard for shard in shards if not isinstance(shard, str) or "/" in shard or shard.startswith(".")]:
        raise CheckpointError(f"{name}: {INDEX} names a file {strange[0]!r} outside its folder")
    return shards


def _verify(name: HubName, file: Path, sha256: str) -> None:
    """Compare a file that was just fetched with the hub's checksum; a wrong one is taken out of the cache."""
    if (found := digest_file(file)) != sha256:
        blob = file.resolve()
        file.unlink()
        blob.unlink(missing_ok=True)
        raise CheckpointError(
            f"{name}: {file.name} was damaged on its way: its SHA-256 begins with {found[:12]}, the hub's with "
            f"{sha256[:12]}; try again"
        )


def _opened(folder: Path, chosen: Collection[str]) -> Path:
    """The path for `open_weights`: the GGUF file, or the folder."""
    only = next(iter(chosen)) if len(chosen) == 1 else ""
    return folder / only if only.endswith(".gguf") else folder
