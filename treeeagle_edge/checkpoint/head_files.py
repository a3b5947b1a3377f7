"""The files of a draft head, found and read. Nothing is checked against a target yet."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.json_file import read_json

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def locate_head(path: Path) -> tuple[Path, Path]:
    """(folder, weight file) of the head at `path`, a folder or the file itself. InputError where there is none."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise InputError(
                f"{path.name} is a GGUF head, which is not supported",
                "use the Hugging Face original of the head",
            )
        return path.parent, path
    if not path.is_dir():
        raise InputError(f"no head at {path}", "check the path, or pass --head none to decode plainly")
    for name in _WEIGHT_FILES:
        if (path / name).is_file():
            return path, path / name
    raise InputError(f"{path} holds no head weights", f"expected one of {', '.join(_WEIGHT_FILES)}")


def read_head_tensors(weights: Path) -> dict[str, Tensor]:
    """Every tensor of a .safetensors or .bin file, as stored. Raises InputError for anything else."""
    hint = "the file may be truncated or of another kind: fetch it again"
    try:
        if weights.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(weights)
        # weights_only: a pickle from the internet must not run code
        loaded = torch.load(weights, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its words are about PyTorch, and fill a screen
        raise InputError(
            f"cannot read the head's weights in {weights}: it is no table of tensors, or holds more than that",
            hint,
        ) from error
    except Exception as error:  # the unpickler raises whatever the bytes of a damaged file happen to provoke
        raise InputError(f"cannot read the head's weights in {weights}: {reason_of(error)}", hint) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"{weights} does not hold a plain table of tensors", hint)
    return loaded


def read_head_json(path: Path) -> dict[str, Any]:
    """The head's config, empty where it has none. Raises InputError for a damaged one."""
    return read_json(path) if path.is_file() else {}
