"""The training objective: where the head drafts, what the target predicts there, and the loss over all steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.training.corpus import Batch
from treeeagle_edge.training.loss import soft_cross_entropy
from treeeagle_edge.training.module import Inputs, TrainableHead

STEP_WEIGHT = 0.8  # each further step counts 0.8 times as much as the one before (EAGLE-3)


@dataclass(frozen=True)
class Teacher:
    """The parts of the target that training reads, on the training device."""

    embedding: Tensor  # [V, H] as the target stores it
    drafted: Tensor  # [Vd, Ht] rows of lm_head for the draft vocabulary, the logit scale multiplied in
    target_ids: Tensor  # [Vd] int64 target id of each draft id
    is_drafted: Tensor  # [V] bool


@dataclass(frozen=True)
class Lesson:
    """A batch, prepared for the loss."""

    inputs: Inputs
    # [P, Vd] the target's distribution over the draft vocabulary, at P positions: those that an answer token follows
    wanted: Tensor
    place: Tensor  # [B, T] int64 row of `wanted` for each position, -1 where there is none
    follows: Tensor  # [B, T] bool: an answer token follows, whether the draft vocabulary has it or not
    usable: Tensor  # [B, A] bool: this place of `anchors` holds an anchor

    @property
    def first_rows(self) -> int:
        """How many anchors count at their first step: the loss is averaged over them."""
        return int((self.at(0) >= 0).sum())

    def at(self, step: int) -> Tensor:
        """[B, A] row of `wanted` that `step` of each anchor's chain should match, -1 where there is none."""
        return torch.where(self.counts(step), self._ahead(self.place, step), -1)

    def counts(self, step: int) -> Tensor:
        """[B, A] bool: whether `step` of the anchor's chain predicts an answer token."""
        inside = self.inputs.anchors + 1 + step < self.place.shape[1]
        return inside & self.usable & self._ahead(self.follows, step)

    def _ahead(self, rows: Tensor, step: int) -> Tensor:
        position = self.inputs.anchors + 1 + step
        return rows.gather(1, position.clamp(max=rows.shape[1] - 1))


def prepare(batch: Batch, teacher: Teacher, dtype: torch.dtype) -> Lesson:
    """Prepare `batch`. Anchors are the rows that predict an answer token: prompts are read, but not learnt."""
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
    """Columns where `mask` [B, T] is true, as [B, A] padded with 0; and [B, A], true where there is no padding."""
    counts = mask.sum(dim=1)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : max(1, int(counts.max()))]
    usable = torch.arange(order.shape[1], device=mask.device) < counts[:, None]
    return torch.where(usable, order, 0), usable


def lesson_loss(head: TrainableHead, lesson: Lesson, steps: int, rows: int) -> Tensor:
    """Scalar: the cross-entropy of all steps, each weighted by STEP_WEIGHT, divided by `rows`.

    rows: `Lesson.first_rows`, summed over all processes that share the batch.
    """
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
    """Counts over the held-out dialogues, for each step. They are sums, so that batches can be added up."""

    rows: Tensor  # [steps] how often an answer token was to be predicted
    scored: Tensor  # [steps] how often the draft vocabulary has the token that the target would choose
    loss: Tensor  # [steps] cross-entropy, nats, summed over the scored rows
    hits: Tensor  # [steps] how often the head's most likely token is the target's
    accepted: Tensor  # [steps] how often that was so at this step and at all steps before it

    @classmethod
    def zero(cls, steps: int) -> Scores:
        """Nothing counted yet."""
        return cls(*(torch.zeros(steps, dtype=torch.float64) for _ in range(5)))


@torch.no_grad()
def score(head: TrainableHead, lesson: Lesson, scores: Scores) -> None:
    """Add one batch to `scores`. Where the draft vocabulary lacks the target's choice, that counts as a miss."""
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
