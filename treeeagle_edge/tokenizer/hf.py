"""The tokenizer of a Hugging Face directory: as it is, rebuilt, or converted by `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from treeeagle_edge.config.generation_defaults import read_generation_defaults
from treeeagle_edge.errors import InputError
from treeeagle_edge.json_file import read_json
from treeeagle_edge.tokenizer.chat_template import find_template
from treeeagle_edge.tokenizer.codec import Tokenizer
from treeeagle_edge.tokenizer.spm import Pieces, add_special, read_spm_model, spm_backend

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def load_hf_tokenizer(directory: Path) -> Tokenizer:
    """Raises InputError where `directory` holds no tokenizer, or a damaged one.

    tokenizer.json is read by the `tokenizers` library alone: importing `transformers` costs seconds, and only
    vocab.json with merges.txt, or an unusual tokenizer.model, needs its conversion.
    """
    settings = _optional(directory / "tokenizer_config.json")
    file = directory / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for everything it cannot parse
            raise InputError(f"{file} is damaged or of an unknown kind", "download the file again") from error
        special_tokens = _named_tokens(settings, directory)
        _add_missing(backend, settings, special_tokens)
    elif (pieces := _sentencepiece_model(directory)) is not None:
        backend = spm_backend(pieces)
        add_special(backend, pieces.tokens, pieces.kinds)
        special_tokens = _named_tokens(settings, directory)
        _add_missing(backend, {**_added_tokens(directory), **settings}, special_tokens)
    elif any((directory / name).is_file() for name in _SLOW_FILES):
        backend, special_tokens = _convert(directory)
    else:
        raise InputError(
            f"{directory} holds no tokenizer",
            "add tokenizer.json and tokenizer_config.json from the model's repository",
        )
    config = _optional(directory / "config.json")
    return Tokenizer(
        backend,
        template=find_template(directory, settings),
        special_tokens=special_tokens,
        stop_ids=read_generation_defaults(directory, config).stop_ids,
    )


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _sentencepiece_model(directory: Path) -> Pieces | None:
    """The vocabulary of tokenizer.model, Vicuna's only file; None where it is of another kind."""
    file = directory / "tokenizer.model"
    return read_spm_model(file) if file.is_file() else None


def _added_tokens(directory: Path) -> dict[str, Any]:
    """added_tokens.json (text -> id) of older directories, in the form of tokenizer_config.json."""
    added = _optional(directory / "added_tokens.json")
    return {"added_tokens_decoder": {str(index): {"content": text} for text, index in added.items()}}


def _content(token: Any) -> str | None:
    """A token's text, written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _named_tokens(settings: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json, else of the older special_tokens_map.json."""
    older = _optional(directory / "special_tokens_map.json")
    found = {name: _content(settings.get(name, older.get(name))) for name in _NAMED}
    return {name: text for name, text in found.items() if text is not None}


def _add_missing(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Make tokens whole that only tokenizer_config.json names, as `transformers` does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    for index in sorted(listed, key=int):
        entry = listed[index]
        if entry["content"] not in known:
            flags = {
                key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized")
            }
            token = AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
            known.add(entry["content"])
    for text in special_tokens.values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _convert(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend that `transformers` builds from a sentencepiece model or from vocab.json and merges.txt."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        backend = converted.backend_tokenizer
    except (ImportError, OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise InputError(
            f"the tokenizer in {directory} cannot be converted",
            "add tokenizer.json from the model's repository, or install sentencepiece and protobuf",
        ) from error
    return backend, dict(converted.special_tokens_map)
