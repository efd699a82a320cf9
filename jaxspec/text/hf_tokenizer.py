"""Tokenizers in Hugging Face's files: reading a model folder, and writing one from any source."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.files import read_json
from jaxspec.text.tokenizer_risks import (
    check_added_tokens,
    check_charsmaps,
    naming_failures_quietly,
    run_within,
)

_TOKENIZER, _TOKENIZER_CONFIG, _GENERATION_CONFIG = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")  # what AutoTokenizer reads
_COPIED = (
    _TOKENIZER, _TOKENIZER_CONFIG, _GENERATION_CONFIG, _CHAT_TEMPLATE, "chat_template.json",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
CONVERT_SECONDS = 300.0  # of transformers, by the clock
_MAX_BYTES = 256 << 20  # the largest published tokenizer.json takes 33 megabytes
_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer as read from a folder or a GGUF file."""

    backend: Tokenizer
    bos_id: int | None  # the beginning-of-sequence token
    eos_ids: tuple[int, ...]  # the tokens that end a text or a turn, the usual one first
    special_tokens: dict[str, str]  # `bos_token`, `eos_token` and the like by name, for chat templates
    chat_template: str | None  # Jinja source


def load_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Read the tokenizer files of a Hugging Face folder or of a native checkpoint.

    `tokenizer.json` decides how text is encoded, as in transformers: its truncation and padding are switched off, and
    `add_bos_token` in the configuration beside it does not count. CheckpointError: files are missing or damaged.
    ConfigError: the tokenizer cannot be read without running its code or a package more.
    """
    config = _read_json(folder / _TOKENIZER_CONFIG)
    if (folder / _TOKENIZER).is_file():
        backend = _read_tokenizer(folder / _TOKENIZER)
    elif any((folder / name).is_file() for name in _OLDER_FILES):
        backend, config = _load_older(folder, config)
    else:
        raise CheckpointError(f"{folder} holds no tokenizer: {_TOKENIZER} is missing")
    backend.no_truncation()
    backend.no_padding()
    special_tokens = _take_special_tokens(folder, config)
    _add_missing_tokens(folder, backend, config, special_tokens)
    bos_token = special_tokens.get("bos_token")
    return TokenizerParts(
        backend=backend,
        bos_id=None if bos_token is None else backend.token_to_id(bos_token),
        eos_ids=_take_eos_ids(folder, backend, special_tokens),
        special_tokens=special_tokens,
        chat_template=_take_chat_template(folder, config),
    )


def save_folder_tokenizer(parts: TokenizerParts, folder: Path) -> None:
    """Write `parts` as the files that `load_folder_tokenizer` and transformers read."""
    parts.backend.save(str(folder / _TOKENIZER))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / _TOKENIZER_CONFIG, config | parts.special_tokens)
    if parts.chat_template is not None:
        (folder / _CHAT_TEMPLATE).write_text(parts.chat_template, encoding="utf-8")
    ids = {"bos_token_id": parts.bos_id, "eos_token_id": list(parts.eos_ids)}
    _write_json(folder / _GENERATION_CONFIG, {key: value for key, value in ids.items() if value not in (None, [])})


def copy_folder_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files of `source`; files of the older formats become a tokenizer.json."""
    if not (source / _TOKENIZER).is_file():
        save_folder_tokenizer(load_folder_tokenizer(source), folder)
        return
    for name in _COPIED:
        if (source / name).is_file():
            # The content alone: a download cache holds links, and their times and modes are its own.
            shutil.copyfile(source / name, folder / name)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, more than any tokenizer ({_MAX_BYTES})")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    check_charsmaps(content, path)
    with naming_failures_quietly(f"{path} is damaged"):
        return Tokenizer.from_buffer(content)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file; {} where there is none."""
    return read_json(path) if path.is_file() else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load_older(folder: Path, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Let transformers convert a tokenizer that has no tokenizer.json; its special tokens join `config`."""

    def convert() -> Any:
        # Imported here: it takes seconds, and few models need it.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    try:
        with naming_failures_quietly("transformers"):
            converted = run_within(CONVERT_SECONDS, convert)
            backend = getattr(converted, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                raise TypeError(f"its {type(converted).__name__} has no fast tokenizer")
    except CheckpointError as error:
        raise ConfigError(
            f"{folder} has no {_TOKENIZER}, and transformers cannot make one: {error.__cause__!s:.400}; save it where "
            f"the model's own packages are installed (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        ) from error
    tokens = {name: str(token) for name, token in converted.special_tokens_map.items() if isinstance(token, str)}
    return backend, tokens | config


def _take_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name, from tokenizer_config.json and the older special_tokens_map.json."""
    found = {}
    for name, token in (_read_json(folder / "special_tokens_map.json") | config).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name in _SPECIAL_TOKENS and text is not None:
            if not _is_text(text):
                raise CheckpointError(f"{folder / _TOKENIZER_CONFIG}: {name} must be a string, got {text!r}")
            found[name] = text
    return found


def _is_text(value: Any) -> bool:
    """Whether a value of JSON is a string that has a form in UTF-8: no half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _add_missing_tokens(
    folder: Path, backend: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add the tokens that only tokenizer_config.json declares, under the ids it declares."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder", {})
    if not isinstance(declared, dict):
        raise CheckpointError(f"{folder / _TOKENIZER_CONFIG}: added_tokens_decoder must be an object")
    try:
        entries = sorted((int(number), dict(token)) for number, token in declared.items())
        missing: dict[str, tuple[int, dict[str, Any]]] = {}
        for number, token in entries:
            content = token["content"]
            if not _is_text(content):
                raise TypeError(f"the content of {number} is no text")
            if content not in present and content not in missing:
                flags = {flag: bool(token.get(flag)) for flag in _TOKEN_FLAGS}
                missing[content] = number, {"content": content} | flags
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / _TOKENIZER_CONFIG}: added_tokens_decoder is malformed: {error!r}") from error
    added = [token for _, token in missing.values()]
    with naming_failures_quietly(f"{folder / _TOKENIZER_CONFIG}: added_tokens_decoder is malformed"):
        check_added_tokens(backend, list(missing))  # they pass through its normalizer
        for token in added:
            backend.add_tokens([AddedToken(**token)])
    for content, (number, _) in missing.items():
        if (found := backend.token_to_id(content)) != number:
            raise CheckpointError(
                f"{folder / _TOKENIZER_CONFIG} gives {content!r} the id {number}, and {_TOKENIZER} leaves it {found}"
            )
    present |= missing.keys()
    # A token that the model does not have would get an id of its own here, which the embedding does not cover.
    named = {token for token in special_tokens.values() if backend.token_to_id(token) is not None}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(named - present)])


def _take_eos_ids(folder: Path, backend: Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    """The ids of generation_config.json (else config.json), then the tokenizer's own."""
    for name in (_GENERATION_CONFIG, "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            break
    else:
        ids = []
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {ids!r}")
    eos_token = special_tokens.get("eos_token")
    own = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


def _take_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default chat template: a file of its own goes before tokenizer_config.json, as in transformers."""
    if (folder / _CHAT_TEMPLATE).is_file():
        try:
            return (folder / _CHAT_TEMPLATE).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / _CHAT_TEMPLATE} is damaged: {error}") from error
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several by name; the others are for tools and retrieval
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / _TOKENIZER_CONFIG}: chat_template must be a string")
    return template
