"""A Hugging Face directory: config.json beside safetensors or pytorch_model.bin, whole or in shards."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from treeeagle_edge.checkpoint.bnb import BnbTensors, StoredMatrix
from treeeagle_edge.checkpoint.tensor_shapes import check_tensors
from treeeagle_edge.config.generation_defaults import read_generation_defaults
from treeeagle_edge.config.reader import model_config_from_json, read_config_json
from treeeagle_edge.errors import InputError
from treeeagle_edge.json_file import read_json
from treeeagle_edge.model_config import ModelConfig

_AGAIN = "download the model again; the file is damaged or incomplete"


class _Shard(Protocol):
    """One file of weights."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class _SafetensorsShard:
    """Memory-mapped by the safetensors library; a tensor is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        # here, since random weights need it not: `treeeagle gpu-check` runs where it is not installed
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is truncated or no safetensors file", _AGAIN) from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)


class _PickleShard:
    """pytorch_model.bin: unpickled with weights only, so that no code in the file runs, and memory-mapped."""

    def __init__(self, path: Path) -> None:
        try:
            mappable = zipfile.is_zipfile(path)  # the format before torch 1.6 is no archive
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise InputError(f"{path} is truncated, or holds more than tensors", _AGAIN) from error
        if not isinstance(loaded, dict) or not all(
            isinstance(value, torch.Tensor) for value in loaded.values()
        ):
            raise InputError(f"{path} holds no state dict", "use a repository with safetensors")
        self._tensors: dict[str, torch.Tensor] = loaded

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


class _Shards:
    """The weight files of a directory, of which one at a time is open.

    A mapped file keeps the pages that were read of it in this process: were all files open, a load would end with the
    whole checkpoint in memory, however little of it is held.
    """

    def __init__(self, files: Sequence[Path], opener: Callable[[Path], _Shard]) -> None:
        """Opens each file in turn and reads its header. Raises InputError for one that is damaged."""
        self._opener = opener
        self._file, self._shard = files[0], opener(files[0])
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            for name, shape in self._opened(file).shapes().items():
                self._file_of[name], self.shapes[name] = file, shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`. KeyError where no file has it."""
        return self._opened(self._file_of[name]).tensor(name)

    def _opened(self, file: Path) -> _Shard:
        if file != self._file:
            self._file, self._shard = file, self._opener(file)
        return self._shard


class HFCheckpoint:
    """Opens `path`, a directory; see `checkpoint.Checkpoint` for what it offers."""

    def __init__(self, path: Path) -> None:
        """Reads config, shard index and shard headers. Raises InputError for what is missing or damaged."""
        config = read_config_json(path)
        declared = model_config_from_json(config, path)
        self.path = path
        self.generation = read_generation_defaults(path, config)
        self._shards = _open_shards(path)
        found = {
            name: shape
            for name, shape in self._shards.shapes.items()
            # a buffer that old exports saved, derived from the config
            if not name.endswith("rotary_emb.inv_freq")
        }
        if declared.tie_word_embeddings and "lm_head.weight" in found:
            if "tie_word_embeddings" in config:  # the copy that some exports write beside the tied embedding
                del found["lm_head.weight"]
            else:
                declared = _untied(declared)
        self._stored = BnbTensors(found, self._read, path) if declared.stored is not None else None
        if self._stored is not None:
            found = self._stored.shapes
        check_tensors(found, declared, path)
        if self._stored is not None:
            self._stored.check(declared)
        self.config = declared
        self._names = frozenset(found)

    def names(self) -> frozenset[str]:
        """Canonical names of all tensors; the parts of a quantised matrix go by its own name."""
        return self._names

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU, whichever files are opened later; fp32 for a quantised matrix."""
        stored = self.stored(name)
        return self._read(name) if stored is None else stored.dequantised()

    def stored(self, name: str) -> StoredMatrix | None:
        """Codes and scales of a matrix that bitsandbytes quantised, None for any other tensor."""
        if self._stored is None or name not in self._stored:
            return None
        return self._stored.matrix(name)

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            return self._shards.tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{name} in {self.path} cannot be read", _AGAIN) from error

    def raw(self, name: str) -> None:
        """None: no blocks of GGUF's kinds are stored here."""


def _untied(config: ModelConfig) -> ModelConfig:
    """A family that ties by default, and a file that carries an lm_head: the file is right."""
    return replace(config, tie_word_embeddings=False)


def _open_shards(path: Path) -> _Shards:
    """The weight files of the directory. Safetensors come before pickles."""
    kinds: tuple[tuple[str, Callable[[Path], _Shard]], ...] = (
        ("model.safetensors", _SafetensorsShard),
        ("pytorch_model.bin", _PickleShard),
    )
    for single, opener in kinds:
        index = path / f"{single}.index.json"
        if (path / single).is_file():
            return _Shards([path / single], opener)
        if index.is_file():
            return _Shards([_present(path / name, index) for name in _shard_names(index)], opener)
    raise InputError(
        f"{path} holds no weights (model.safetensors or pytorch_model.bin, whole or with an index)",
        "download the whole repository; a directory with config.json alone is not enough",
    )


def _shard_names(index: Path) -> list[str]:
    """File names in an index's weight_map, each once."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map", _AGAIN)
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InputError(
            f"{index} names {outside[0]}, which is outside its directory", "download the index again"
        )
    return names


def _present(shard: Path, index: Path) -> Path:
    if not shard.is_file():
        raise InputError(
            f"{shard} is missing, though {index.name} names it", "download the model again, all shards of it"
        )
    return shard
