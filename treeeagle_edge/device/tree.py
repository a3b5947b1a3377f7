"""EAGLE-2's draft tree (arXiv 2406.16858) in tensor operations of fixed shapes: the trees of `growth.FixedGrowth`.

How many candidates each level has, and how many nodes there are, follows from the shape of the tree alone. Where there
are fewer, since nothing is drafted behind an end token, what is left over is marked as not real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.rounds import TreeShape

# hidden [f, H] of the parents, tokens [f] int64, level from 1, visible [f, rows of all levels so far] bool -> scored
Step = Callable[[Tensor, Tensor, int, Tensor], HeadOutput]
_NOTHING = float("-inf")


@dataclass(frozen=True)
class DeviceTree:
    """A `tree.DraftTree` as tensors, in the same order. Rows that hold no node come last, or last before a branch, and
    at the end of the branch (`device.branch`).
    """

    tokens: Tensor  # [N] int64, the root first
    parents: Tensor  # [N] int64, -1 for the root
    depths: Tensor  # [N] int64, 0 for the root
    log_probs: Tensor  # [N] float64, of the path from the root
    real: Tensor  # [N] bool, False where a row holds no node
    visible: Tensor  # [N, N] bool: the row itself and its ancestors
    is_sound: Tensor  # [1] bool, False where the head's scores are not finite; no node is real then
    levels: int  # the deepest a node can be

    @classmethod
    def root_only(cls, token: Tensor) -> DeviceTree:
        """Plain decoding; token: [1] int64."""
        zero, yes = torch.zeros_like(token), torch.ones_like(token, dtype=torch.bool)
        return cls(token, zero - 1, zero, zero.double(), yes, yes[None], yes, 0)


@dataclass(frozen=True)
class _Candidates:
    """Everything the head scored, level by level: [C] each."""

    tokens: Tensor  # int64
    scores: Tensor  # float64
    parents: Tensor  # int64, places in here, -1 below the root
    depths: Tensor  # int64


def num_rows(shape: TreeShape, children: int) -> int:
    """Rows of the tree, the root included, where the head scores `children` a node."""
    frontier, candidates = 1, 0
    for _ in range(shape.depth):
        candidates += frontier * children
        frontier = min(shape.branching, frontier * children)
    return 1 + min(shape.nodes, candidates)


def grow(scored: HeadOutput, root: Tensor, shape: TreeShape, stops: Tensor, step: Step) -> DeviceTree:
    """Draft below `root` [1] int64, whose row the head `scored`. stops: [V] bool, end tokens, which stay leaves.

    Equal scores keep the order in which they were found: lower levels first, then better parents.
    """
    device = root.device
    above = torch.zeros(1, dtype=torch.float64, device=device)  # scores of the rows that were expanded
    origin = torch.full((1,), -1, dtype=torch.int64, device=device)  # and which candidates they are
    paths = torch.zeros(1, 0, dtype=torch.bool, device=device)
    sound = torch.ones(1, dtype=torch.bool, device=device)
    tokens, scores, parents, depths = [], [], [], []
    found = 0
    for depth in range(1, shape.depth + 1):
        open_rows = (above > _NOTHING)[:, None]
        log_probs, ids = scored.log_probs.double(), scored.ids.flatten()
        sound = sound & (torch.isfinite(log_probs) | ~open_rows).all()
        count, children = log_probs.shape
        level = (above[:, None] + log_probs).masked_fill(~open_rows, _NOTHING).flatten()
        tokens.append(ids)
        scores.append(level)
        parents.append(origin[:, None].expand(count, children).flatten())
        depths.append(torch.full_like(ids, depth))
        if depth == shape.depth:
            break
        followed = level.masked_fill(stops[ids], _NOTHING)
        above, order = _best(followed, shape.branching)
        rows = order // children
        own = torch.eye(len(order), dtype=torch.bool, device=device)
        paths = torch.cat((paths[rows], own), dim=1)
        origin, found = found + order, found + len(ids)
        scored = step(scored.hidden[rows], ids[order], depth, paths)
    candidates = _Candidates(*(torch.cat(each) for each in (tokens, scores, parents, depths)))
    return _assemble(root, candidates, sound, shape)


def _assemble(root: Tensor, candidates: _Candidates, sound: Tensor, shape: TreeShape) -> DeviceTree:
    """The best candidates below the root. A child never scores above its parent and comes after it: none loses it."""
    kept, best = _best(candidates.scores, shape.nodes)
    row_of = torch.zeros_like(candidates.tokens)
    row_of[best] = torch.arange(1, len(best) + 1, device=root.device)
    parent = candidates.parents[best]
    up = torch.cat((torch.zeros_like(root), row_of[parent.clamp(min=0)].masked_fill(parent < 0, 0)))
    nothing = torch.full_like(root, -1)
    return DeviceTree(
        tokens=torch.cat((root, candidates.tokens[best])),
        parents=torch.cat((nothing, up[1:])),
        depths=torch.cat((nothing + 1, candidates.depths[best])),
        log_probs=torch.cat((torch.zeros_like(kept[:1]), kept)),
        real=torch.cat((torch.ones_like(sound), (kept > _NOTHING) & sound)),
        visible=_ancestors(up, shape.depth),
        is_sound=sound,
        levels=shape.depth,
    )


def _ancestors(up: Tensor, depth: int) -> Tensor:
    """[N, N] bool from each row's parent [N] int64, the root's being the root: a step doubles how far a row sees."""
    visible = torch.eye(len(up), dtype=torch.bool, device=up.device)
    for _ in range(depth.bit_length()):
        visible = visible | visible[up]
        up = up[up]
    return visible


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest `count` of `scores` [C], or all, with their places; of equal ones the earlier comes first."""
    values, places = scores.sort(descending=True, stable=True)
    return values[:count], places[:count]
