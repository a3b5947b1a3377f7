"""Where a target's layers lie: all on one device, or runs of consecutive layers on several cards.

The first device is home to everything else that a round reads: embedding, final norm, lm_head, logits, features and the
draft head. So a pass sends only the residual stream from card to card, and home again at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from treeeagle_edge.kernels.tree_view import TreeView
from treeeagle_edge.kernels.view import AttentionView, BatchView


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers that lie on one device."""

    device: torch.device
    layers: range


def layer_runs(places: Sequence[torch.device]) -> tuple[LayerRun, ...]:
    """The runs of layers whose devices are `places`, one a layer."""
    runs: list[LayerRun] = []
    for device, group in groupby(places):
        first = runs[-1].layers.stop if runs else 0
        runs.append(LayerRun(device, range(first, first + len(list(group)))))
    return tuple(runs)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`: itself where it is there already."""
    return tensor.to(device)


def moved_view(view: AttentionView | BatchView, device: torch.device) -> AttentionView | BatchView:
    """`view` with its slots on `device`. The mask of a tree is made anew there, from the tree's parents."""
    if (view.first if isinstance(view, BatchView) else view.rows).device == device:
        return view
    if isinstance(view, BatchView):
        return BatchView(moved(view.first, device), moved(view.lengths, device))
    prefix, rows = moved(view.prefix, device), moved(view.rows, device)
    if isinstance(view, TreeView):
        return TreeView(prefix, rows, view.parents, view.queries)
    length = None if view.length is None else moved(view.length, device)
    return AttentionView(prefix, rows, moved(view.visible, device), length)
