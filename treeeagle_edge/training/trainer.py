"""The training loop, with a record of the run and checkpoints: a run that was killed goes on as if it had not been."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.progress import Progress
from treeeagle_edge.training.corpus import Corpus, Entry, batches, collate
from treeeagle_edge.training.module import TrainableHead
from treeeagle_edge.training.objective import Scores, Teacher, lesson_loss, prepare, score
from treeeagle_edge.training.optimiser import Optimiser
from treeeagle_edge.training.processes import Group

TIMED_STEPS = 10  # steps whose time tells how many fit into the minutes; as many before them only warm up
_SMOOTH = 0.98  # the loss that is shown is an average over about 1 / (1 - 0.98) = 50 steps


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained. Together with the dialogues and the initial weights, they decide the result."""

    steps: int = 5  # unrolled drafting steps
    batch_tokens: int = 2048  # answer tokens a step
    passes: float = 3.0  # times each dialogue is seen
    minutes: float | None = None  # training ends after so many at the latest
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass
class Record:
    """The course of a run, for the plot, the model card and the documentation."""

    loss: list[tuple[int, float]] = field(default_factory=list)  # step, smoothed training loss
    held_out: list[dict[str, Any]] = field(default_factory=list)  # step, loss and acceptance by depth
    seconds: float = 0.0  # of training, over all runs
    tokens: int = 0  # answer tokens seen


class Trainer:
    """Trains `head` on `corpus`, and keeps `checkpoint` up to date."""

    def __init__(
        self, head: TrainableHead, teacher: Teacher, corpus: Corpus, settings: TrainSettings,
        checkpoint: Path, *, group: Group, say: Progress, save_every: float, judge_times: int = 12,
    ) -> None:  # fmt: skip
        """`save_every`: seconds between checkpoints. `judge_times`: how often held-out dialogues are scored in all."""
        self.head, self.teacher, self.corpus, self.settings = head, teacher, corpus, settings
        self.record = Record()
        self._optimiser = Optimiser(head, settings.learning_rate)
        self._checkpoint, self._group, self._say = checkpoint, group, say
        self._save_every, self._judge_times = save_every, judge_times
        self._step = 0
        self._smoothed: float | None = None
        per_pass = sum(1 for _ in self._epoch(0))
        self._steps = max(1, round(per_pass * settings.passes))
        self._bounded = settings.minutes is None  # whether the number of steps is final
        self._timed: tuple[int, float] | None = None  # step and clock where timing began

    def run(self) -> Record:
        """Train to the end, from the checkpoint where there is one.

        Raises CannotRunError for a loss that is not finite, or a checkpoint that cannot be written.
        """
        if self._checkpoint.exists():
            self._load()
            self._say(f"going on from step {self._step:,} of {self._steps:,}")
        started = saved = time.monotonic()
        before = self.record.seconds
        judged = self._step
        remaining = self._remaining()
        while self._step < self._steps:
            if not self._bounded:
                self._bound()
            self._learn(next(remaining))
            self.record.seconds = before + time.monotonic() - started
            if self._step - judged >= max(1, self._steps // self._judge_times):
                judged = self._step
                self._judge()
            if time.monotonic() - saved > self._save_every:
                saved = time.monotonic()
                self._save()
        if not self.record.held_out or self.record.held_out[-1]["step"] != self._step:
            self._judge()
        self._save()
        return self.record

    def _remaining(self) -> Iterator[list[Entry]]:
        """The batches from the current step on, over all epochs."""
        skip = self._step
        epoch = 0
        while True:
            for entries in self._epoch(epoch):
                if skip:
                    skip -= 1
                else:
                    yield entries
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[list[Entry]]:
        s = self.settings
        return batches(
            self.corpus.train, tokens=s.batch_tokens, seed=s.seed, epoch=epoch, place=self._group.place
        )

    def _bound(self) -> None:
        """Once the speed is known, turn the minutes that were asked for into a number of steps.

        The checkpoint keeps that number, so that a run that goes on ends where it would have ended.
        """
        assert self.settings.minutes is not None
        if self._timed is None:
            if self._step >= TIMED_STEPS:
                self._timed = (self._step, time.monotonic())
        elif self._step == self._timed[0] + TIMED_STEPS:
            each = (time.monotonic() - self._timed[1]) / TIMED_STEPS
            more = int((self.settings.minutes * 60 - self.record.seconds) / each)
            self._steps = min(self._steps, self._group.agreed(self._step + max(1, more)))
            self._bounded = True

    def _learn(self, entries: list[Entry]) -> None:
        lesson = None
        if entries:
            batch = collate([self.corpus.read(entry) for entry in entries])
            lesson = prepare(batch, self.teacher, self.head.dtype)
        own = 0 if lesson is None else lesson.first_rows
        rows = self._group.total(own)
        loss = torch.zeros(())
        if lesson is not None and own:
            loss = lesson_loss(self.head, lesson, self.settings.steps, rows)
            loss.backward()
        self._group.add_up(self._optimiser.gradients())
        value = self._group.total(float(loss.detach()))
        if not math.isfinite(value):
            raise CannotRunError(
                f"the loss of step {self._step + 1:,} is not finite",
                "the last checkpoint is kept; run again with a smaller --learning-rate",
            )
        self._optimiser.step(self._step, self._steps)
        self._step += 1
        self.record.tokens += rows
        self._smoothed = value if self._smoothed is None else _SMOOTH * self._smoothed + (1 - _SMOOTH) * value
        if self._step % max(1, self._steps // 400) == 0:
            self.record.loss.append((self._step, self._smoothed))

    def _judge(self) -> None:
        """Score the held-out dialogues, of which each process takes a part, and note the result in the record."""
        scores = Scores.zero(self.settings.steps)
        mine = self.corpus.held_out[self._group.place.index :: self._group.place.count]
        for begin in range(0, len(mine), 8):
            batch = collate([self.corpus.read(entry) for entry in mine[begin : begin + 8]])
            score(self.head, prepare(batch, self.teacher, self.head.dtype), scores)
        self._group.add_up((scores.rows, scores.scored, scores.loss, scores.hits, scores.accepted))
        rows, scored = scores.rows.clamp(min=1), scores.scored.clamp(min=1)
        found: dict[str, Any] = {
            "step": self._step,
            "loss": (scores.loss / scored).tolist(),
            "hits": (scores.hits / rows).tolist(),
            "accepted": (scores.accepted / scores.rows[0].clamp(min=1)).tolist(),
        }
        self.record.held_out.append(found)
        each = self.record.seconds / max(1, self._step)
        shares = " ".join(f"{share:.3f}" for share in found["hits"])
        self._say(
            f"step {self._step:,} of {self._steps:,}, loss {self._smoothed or 0:.3f}, held out by step {shares},"
            f" {(self._steps - self._step) * each / 60:.0f} min left"
        )

    def _save(self) -> None:
        if not self._group.place.first:
            return
        state = {
            "settings": asdict(self.settings),
            "step": self._step,
            "steps": self._steps,
            "bounded": self._bounded,
            "smoothed": self._smoothed,
            "record": asdict(self.record),
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
        }
        unfinished = self._checkpoint.with_suffix(".part")
        try:
            torch.save(state, unfinished)
            os.replace(unfinished, self._checkpoint)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            unfinished.unlink(missing_ok=True)
            raise CannotRunError(
                f"the checkpoint {self._checkpoint} cannot be written: {error}",
                "the one before it is kept; make room on the disk and run the same command again",
            ) from error

    def _load(self) -> None:
        try:
            state = torch.load(self._checkpoint, weights_only=True)
        except Exception as error:
            raise InputError(
                f"the checkpoint {self._checkpoint} is damaged: {error}", "delete it to train from the start"
            ) from error
        if state["settings"] != asdict(self.settings):
            raise InputError(
                f"{self._checkpoint} belongs to a run with other settings",
                "give the same options again, or another --out",
            )
        self._step, self._steps, self._bounded = state["step"], state["steps"], state["bounded"]
        self._smoothed, self.record = state["smoothed"], Record(**state["record"])
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
