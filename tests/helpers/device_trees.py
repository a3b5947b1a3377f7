"""Trees as the device has them, made from the host's."""

from __future__ import annotations

import torch

from treeeagle_edge.device.tree import DeviceTree
from treeeagle_edge.tree import DraftTree


def device_tree(tree: DraftTree, spare: int = 0) -> DeviceTree:
    """`spare` rows that hold no node, with what a node of the root would have."""
    rows = len(tree)
    visible = torch.eye(rows + spare, dtype=torch.bool)
    for row, path in enumerate(tree.ancestors):
        visible[row, list(path)] = True
    extra = torch.zeros(spare, dtype=torch.int64)
    columns = (torch.tensor(column) for column in (tree.tokens, tree.parents, tree.depths))
    tokens, parents, depths = (torch.cat((column, extra)) for column in columns)
    real = torch.arange(rows + spare) < rows
    log_probs = torch.tensor((*tree.log_probs, *[0.0] * spare), dtype=torch.float64)
    sound = torch.ones(1, dtype=torch.bool)
    return DeviceTree(tokens, parents, depths, log_probs, real, visible, sound, max(tree.depths))
