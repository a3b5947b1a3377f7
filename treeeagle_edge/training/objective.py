"""What a batch asks of a head: which rows draft, what the target says there, and the loss over all unrolled steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.training.corpus import Batch
from treeeagle_edge.training.loss import soft_cross_entropy
from treeeagle_edge.training.module import Inputs, TrainableHead

STEP_WEIGHT = 0.8  # of each further step (EAGLE-3)


@dataclass(frozen=True)
class Teacher:
    """The parts of the target that training reads, on the training device."""

    embedding: Tensor  # [V, H] as the target stores it
    drafted: Tensor  # [Vd, Ht] rows of lm_head for the draft vocabulary, the logit scale multiplied in
    target_ids: Tensor  # [Vd] int64 target id of each draft id
    is_drafted: Tensor  # [V] bool


@dataclass(frozen=True)
class Lesson:
    """A batch, prepared."""

    inputs: Inputs
    # [P, Vd] the target's distribution over the draft vocabulary, where an answer token follows
    wanted: Tensor
    place: Tensor  # [B, T] int64 row of `wanted` for a position, -1 where there is none
    follows: Tensor  # [B, T] bool: an answer token follows, whether the draft vocabulary has it or not
    usable: Tensor  # [B, A] bool: an anchor that is no padding

    @property
    def first_rows(self) -> int:
        """Rows whose first step counts: what losses are averaged over."""
        return int((self.at(0) >= 0).sum())

    def at(self, step: int) -> Tensor:
        """[B, A] row of `wanted` for each anchor at `step`, -1 where there is none."""
        return torch.where(self.counts(step), self._ahead(self.place, step), -1)

    def counts(self, step: int) -> Tensor:
        """[B, A] bool: whether an answer token is foreseen at `step` of each anchor's chain."""
        inside = self.inputs.anchors + 1 + step < self.place.shape[1]
        return inside & self.usable & self._ahead(self.follows, step)

    def _ahead(self, rows: Tensor, step: int) -> Tensor:
        position = self.inputs.anchors + 1 + step
        return rows.gather(1, position.clamp(max=rows.shape[1] - 1))


def prepare(batch: Batch, teacher: Teacher, dtype: torch.dtype) -> Lesson:
    """Anchors are the rows from which an answer token is foreseen; prompts are read, not learnt."""
    device = teacher.embedding.device
    tokens, in_answer = batch.tokens.to(device), batch.in_answer.to(device)
    follows = F.pad(in_answer[:, 1:], (0, 1))  # the token after this position is an answer's
    anchored = F.pad(in_answer[:, 2:], (0, 2))
    anchors, usable = _gathered(anchored)
    spots = follows & teacher.is_drafted[batch.best.to(device)]
    place = torch.full(tokens.shape, -1, dtype=torch.int64, device=device)
    place[spots] = torch.arange(int(spots.sum()), device=device)
    logits = (batch.hidden.to(device)[spots].to(dtype) @ teacher.drafted.to(dtype).T).float()
    inputs = Inputs(batch.features.to(device), F.embedding(tokens, teacher.embedding), anchors)
    return Lesson(inputs, logits.softmax(dim=-1).to(dtype), place, follows, usable)


def _gathered(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Columns where `mask` [B, T] holds, as [B, A] padded with 0, and which of them are no padding."""
    counts = mask.sum(dim=1)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : max(1, int(counts.max()))]
    usable = torch.arange(order.shape[1], device=mask.device) < counts[:, None]
    return torch.where(usable, order, 0), usable


def lesson_loss(head: TrainableHead, lesson: Lesson, steps: int, rows: int) -> Tensor:
    """Scalar: cross-entropy of every step, weighted 0.8 a step, over `rows` first-step rows of the whole batch."""
    states, at, weights = [], [], []
    for step, state in enumerate(head.unroll(lesson.inputs, steps)):
        found = lesson.at(step)
        kept = found >= 0
        states.append(state[kept])
        at.append(found[kept])
        weights.append(torch.full(at[-1].shape, STEP_WEIGHT**step / rows, device=state.device))
    return soft_cross_entropy(
        torch.cat(states), head.lm_head, lesson.wanted, torch.cat(at), torch.cat(weights)
    )


@dataclass
class Scores:
    """What a held-out set says, by step: sums, so that batches add up."""

    rows: Tensor  # [steps] where an answer token was to be foreseen
    scored: Tensor  # [steps] of them, where the draft vocabulary has the target's choice
    loss: Tensor  # [steps] cross-entropy over the scored ones, nats
    hits: Tensor  # [steps] the head's most likely token is the target's
    accepted: Tensor  # [steps] it was so at this step and at all before it

    @classmethod
    def zero(cls, steps: int) -> Scores:
        """Nothing counted yet."""
        return cls(*(torch.zeros(steps, dtype=torch.float64) for _ in range(5)))


@torch.no_grad()
def score(head: TrainableHead, lesson: Lesson, scores: Scores) -> None:
    """Add what `head` does on one batch. A target's choice outside the draft vocabulary counts as a miss."""
    matrix = head.lm_head.to(head.dtype)
    reached = lesson.usable
    for step, state in enumerate(head.unroll(lesson.inputs, len(scores.rows))):
        at = lesson.at(step)
        kept = at >= 0
        wanted = lesson.wanted[at[kept]].float()
        log_probs = (state[kept] @ matrix.T).float().log_softmax(dim=-1)
        right = torch.zeros_like(kept)
        right[kept] = log_probs.argmax(-1) == wanted.argmax(-1)
        reached = reached & right
        scores.rows[step] += int(lesson.counts(step).sum())
        scores.scored[step] += int(kept.sum())
        scores.loss[step] -= float((wanted * log_probs).sum())
        scores.hits[step] += int(right.sum())
        scores.accepted[step] += int(reached.sum())
