"""Training data on disk: dialogues, with what the target computed for every token, in memory-mapped shards.

A shard is one safetensors file. It is written under another name and then renamed, so that a file under a shard's name
is always complete.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treeeagle_edge.errors import CannotRunError, InputError


@dataclass(frozen=True)
class Dialogue:
    """One dialogue of T tokens; row t holds what the target computed at token t."""

    tokens: Tensor  # [T] int32
    in_answer: Tensor  # [T] bool: chosen by the target as its answer
    best: Tensor  # [T] int32: the most likely next token
    features: Tensor  # [T, taps * Ht] bfloat16
    hidden: Tensor  # [T, Ht] bfloat16, after the final norm: what the target's logits come from

    def __len__(self) -> int:
        return self.tokens.shape[0]


_PARTS = ("tokens", "in_answer", "best", "features", "hidden")


def bytes_per_token(hidden_size: int, taps: int) -> int:
    """Disk that one token takes."""
    return (taps + 1) * hidden_size * 2 + 4 + 4 + 1


def shard_path(folder: Path, index: int) -> Path:
    """Where shard `index` lies."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, dialogues: Sequence[Dialogue]) -> None:
    """Write `dialogues` as one whole file. Raises CannotRunError where the disk is full or not writable."""
    ends = torch.tensor([len(dialogue) for dialogue in dialogues]).cumsum(0)
    tensors = {
        part: torch.cat([getattr(dialogue, part) for dialogue in dialogues]).contiguous() for part in _PARTS
    }
    save_whole({**tensors, "ends": ends}, path)


def save_whole(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all. Raises CannotRunError where it cannot be written."""
    unfinished = path.with_name(path.name + f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, path)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        unfinished.unlink(missing_ok=True)
        raise CannotRunError(
            f"{path} cannot be written: {error}", "make room on the disk and run the same command again"
        ) from error


class Shard:
    """A shard opened for reading. Features are read from disk only when a dialogue is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a damaged file."""
        try:
            self._file = safe_open(path, "pt")
            self.ends: list[int] = self._file.get_tensor("ends").tolist()
            self.tokens = self._file.get_tensor("tokens")
            self.in_answer = self._file.get_tensor("in_answer")
            self.best = self._file.get_tensor("best")
        except Exception as error:  # safetensors has an exception of its own
            raise InputError(
                f"{path} is damaged: {error}", "delete it and run the same command again"
            ) from error
        self._features = self._file.get_slice("features")
        self._hidden = self._file.get_slice("hidden")

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, index: int) -> slice:
        """Rows of dialogue `index`."""
        return slice(self.ends[index - 1] if index else 0, self.ends[index])

    def dialogue(self, index: int) -> Dialogue:
        """Dialogue `index`, read from disk."""
        rows = self.span(index)
        return Dialogue(
            self.tokens[rows], self.in_answer[rows], self.best[rows], self._features[rows], self._hidden[rows]
        )
