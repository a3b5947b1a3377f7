"""A repository as the hub declares it: its files, sizes and checksums, and whether what it holds runs here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning.known_models import known_heads

_CHUNK = 1 << 20
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "quant*.json",  # where a quantiser says what it did, such as a rotation of hidden states
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a model needs one of them
_HEAD_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the better form first
# Of a model's weights the first form is taken that is there: whole or in shards with an index, safetensors or pickles.
_MODEL_WEIGHTS = (
    ("model.safetensors",),
    ("*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin",),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
_OTHER_WEIGHTS = ("consolidated*", "adapter*")  # other programs' copies, and what is no whole model


@dataclass(frozen=True)
class RemoteFile:
    """One file. checksum: SHA-256 of a large file, Git's SHA-1 of a small one; the hub's cache names the file by it."""

    name: str
    size: int  # bytes
    checksum: str

    def matches(self, path: Path) -> bool:
        """True where the content of `path` is what the hub declares. Reads all of it."""
        large = len(self.checksum) == 64
        digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest() == self.checksum


@dataclass(frozen=True)
class Repository:
    """What a repository holds in its newest commit."""

    name: str  # org/name
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile:
        """The file of this name. Raises InputError, saying what the repository holds, where there is none."""
        found = next((file for file in self.files if file.name == name), None)
        if found is None:
            raise _unreadable(self)
        return found


def look_up(name: str) -> Repository:
    """Ask the hub what `name` (org/name) holds. Raises the errors of the hub's client: see `errors.explained`."""
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(name, files_metadata=True, timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT))
    files = tuple(
        RemoteFile(entry.rfilename, entry.size or 0, entry.lfs.sha256 if entry.lfs else entry.blob_id or "")
        for entry in info.siblings or ()
    )
    assert info.sha is not None, "a repository without a commit"
    return Repository(name, info.sha, files)


def kind_of(name: str, config: Mapping[str, Any]) -> str:
    """ "head" where the repository `name` with this config.json is a draft head, else "model"."""
    heads = {head.lower() for head in known_heads()}
    named = " ".join(map(str, config.get("architectures") or ())).lower()
    marks = (
        config.get("draft_vocab_size") or config.get("speculators_model_type") or config.get("eagle_config")
    )
    return "head" if marks or "eagle" in named or name.lower() in heads else "model"


def check_model(name: str, config: Mapping[str, Any]) -> ModelConfig:
    """Shapes of the model in the repository `name`. Raises InputError, by name, for what does not run here."""
    from treeeagle_edge.config.reader import model_config_from_json

    return model_config_from_json(config, Path(name))


def files_of(repository: Repository, what: str) -> tuple[RemoteFile, ...]:
    """The files that a model or head needs. Files of other formats, and those in folders, are not fetched.

    Raises InputError, saying what the repository holds instead, where weights or config.json are missing.
    """
    repository.file("config.json")
    files = [file for file in repository.files if "/" not in file.name]
    names = [file.name for file in files]
    if what == "head":
        weights = next(([name] for name in _HEAD_WEIGHTS if name in names), [])
        texts = ["config.json"]
    else:
        usable = [name for name in names if not _any(name, _OTHER_WEIGHTS)]
        forms = ([name for name in usable if _any(name, form)] for form in _MODEL_WEIGHTS)
        weights = next((form for form in forms if any(not name.endswith(".json") for name in form)), [])
        texts = [name for name in names if _any(name, _TEXT_FILES)]
        if weights and not set(TOKENIZERS) & set(names):
            raise InputError(
                f"{repository.name} holds no tokenizer",
                "choose the repository that it was made from, or another",
            )
    if not weights:
        raise _unreadable(repository)
    return tuple(file for file in files if file.name in {*texts, *weights})


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unreadable(repository: Repository) -> InputError:
    """The error for a repository without config.json or weights of ours, by what it does hold."""
    names = [file.name for file in repository.files]
    name = repository.name
    gguf = next((file for file in names if file.endswith(".gguf")), None)
    if gguf is not None:
        return InputError(
            f"{name} holds GGUF files, of which one is enough",
            f"fetch the one you want, such as `hf download {name} {gguf}`, then give its path with --model",
        )
    if "adapter_config.json" in names:
        return InputError(
            f"{name} holds an adapter, not a whole model",
            "merge it into its base model, then give that folder",
        )
    return InputError(
        f"{name} holds nothing in a format that can be read",
        "choose a repository with config.json and .safetensors files",
    )
