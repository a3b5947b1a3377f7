"""A branch of what the text repeats, in tensor operations: `drafting.lookup_branch` in rows of a fixed number.

How many tokens there are is a number on the device, so the rows are always there, and those of no token are marked as
not real. They cost the same as the others, so what a branch is worth is weighed before the round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.device.tree import DeviceTree


def with_branch(tree: DeviceTree, tokens: Tensor, count: Tensor) -> DeviceTree:
    """`tree` with as many rows more as `tokens` [K] int64 has, for the first `count` [1] int64 of them, a path below
    the root. Where the tree has the beginning of that path, its own rows serve, and the branch begins below them. It is
    given the log-probability of the row that it hangs from.
    """
    rows, most = len(tree.tokens), len(tokens)
    device = tokens.device
    index = torch.arange(rows, device=device)
    wanted = tokens[(tree.depths - 1).clamp(min=0, max=most - 1)]
    agrees = tree.real & (tree.tokens == wanted) & (tree.depths <= count)
    shares = ~(tree.visible & ~(agrees | (index == 0))).any(dim=1)  # rows whose whole path agrees
    # the deepest of them; of twins the first, as in a walk
    order = tree.depths * rows + (rows - 1 - index)
    deepest = order.masked_fill(~shares, 0).amax(dim=0, keepdim=True)
    shared, row = deepest // rows, rows - 1 - deepest % rows
    step = torch.arange(most, device=device)
    place = shared + step
    real = place < count
    return DeviceTree(
        tokens=torch.cat(
            (tree.tokens, torch.where(real, tokens[place.clamp(max=most - 1)], tree.tokens[:1]))
        ),
        parents=torch.cat((tree.parents, torch.where(step == 0, row, rows - 1 + step))),
        depths=torch.cat((tree.depths, (place + 1).clamp(max=most))),
        log_probs=torch.cat((tree.log_probs, tree.log_probs[row].expand(most))),
        real=torch.cat((tree.real, real)),
        visible=_visible(tree.visible, row, most),
        is_sound=tree.is_sound,
        levels=max(tree.levels, most),
    )


def _visible(visible: Tensor, row: Tensor, more: int) -> Tensor:
    """[N + more, N + more] bool: a path of `more` rows below `row` [1] int64 sees that row's ancestors and itself."""
    unseen = torch.zeros(len(visible), more, dtype=torch.bool, device=visible.device)
    path = torch.ones(more, more, dtype=torch.bool, device=visible.device).tril()
    above = visible[row].expand(more, -1)
    return torch.cat((torch.cat((visible, unseen), dim=1), torch.cat((above, path), dim=1)))
