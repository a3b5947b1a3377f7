"""Settings of a training run: the target, what the head learns from, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.settings import RunSettings
from treeeagle_edge.training.trainer import TrainSettings


@dataclass(frozen=True)
class DataSettings:
    """Which dialogues a head learns from."""

    tokens: int = 1_000_000  # about this many tokens are written
    dialogues: int = 128  # how many are written at the same time; also the number of dialogues in a shard
    length: int = 512  # tokens of the longest dialogue
    seed: int = 0
    file: Path | None = None  # the person's own dialogues, instead of those that the target writes
    regenerate: bool = False  # take only the questions of `file`, and let the target answer
    exclude: tuple[Path, ...] = ()  # questions that no training text may share eight words in a row with


@dataclass(frozen=True)
class TrainingRun:
    """All settings of a training run."""

    target: RunSettings  # the model and how it will run; its head is ignored
    out: Path
    data: DataSettings
    training: TrainSettings
    draft_vocab: int = 8192
    init: str | None = None  # a head to start from
    layout: str = "safeailab"
    save_every: float = 180.0  # seconds between checkpoints
