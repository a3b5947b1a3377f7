"""What the rows of a draft tree read, given by their parents. A mask is made only for kernels that ask for one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.kernels.view import AttentionView


class TreeView(AttentionView):
    """An `AttentionView` whose query rows are the last of `rows`; each reads its ancestors among them, then itself."""

    def __init__(self, prefix: Tensor, rows: Tensor, parents: Sequence[int], queries: int) -> None:
        """`prefix` [T], `rows` [R]: int64 slots. `parents` [R]: indices into `rows`, smaller than the row's own, -1 for
        none. The last `queries` of `rows` are the query rows.
        """
        for name, value in (("prefix", prefix), ("rows", rows), ("parents", parents), ("queries", queries)):
            object.__setattr__(self, name, value)  # the class is frozen

    parents: Sequence[int]
    queries: int

    @cached_property
    def visible(self) -> Tensor:
        """[queries, R] bool, as in `AttentionView`."""
        if isinstance(self.parents, range):  # parents that are a range are a chain
            chain = torch.ones(
                len(self.parents), len(self.parents), dtype=torch.bool, device=self.rows.device
            )
            return chain.tril()[len(self.parents) - self.queries :]
        mask = np.zeros((len(self.parents), len(self.parents)), dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                mask[row] = mask[parent]
            mask[row, row] = True
        return torch.from_numpy(mask[len(mask) - self.queries :]).to(self.rows.device)
