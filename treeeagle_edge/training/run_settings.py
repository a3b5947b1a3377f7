"""What a training run was asked for: its target, what a head learns from, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.settings import RunSettings
from treeeagle_edge.training.trainer import TrainSettings


@dataclass(frozen=True)
class DataSettings:
    """What a head learns from."""

    tokens: int = 1_000_000  # about so many are written
    dialogues: int = 128  # written side by side; a shard holds as many
    length: int = 512  # tokens of the longest dialogue
    seed: int = 0
    file: Path | None = None  # dialogues of the person's own
    regenerate: bool = False  # keep the questions of `file`, and let the target answer
    exclude: tuple[Path, ...] = ()  # questions that no training text may share eight words in a row with


@dataclass(frozen=True)
class TrainingRun:
    """Everything that was asked for."""

    target: RunSettings  # the model and how it will run; its head is not looked at
    out: Path
    data: DataSettings
    training: TrainSettings
    draft_vocab: int = 8192
    init: str | None = None  # a head to start from
    layout: str = "safeailab"
    save_every: float = 180.0  # seconds between checkpoints
