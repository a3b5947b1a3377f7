"""The rows of one pass as Python numbers: what a round knows before any tensor is made.

Native kernels take the numbers as they are. For models whose passes take tensors, `TensorTarget` and `TensorHead` make
the tensors from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treeeagle_edge.kernels.tree_view import TreeView
from treeeagle_edge.model.small_tensors import int64_tensor, take_rows

if TYPE_CHECKING:
    from treeeagle_edge.kernels.view import AttentionView, BatchView
    from treeeagle_edge.kv.store import KVStore
    from treeeagle_edge.model.head import HeadOutput
    from treeeagle_edge.model.target import TargetOutput


@dataclass(slots=True)
class PassRows:
    """The M rows of a pass, and what each reads: all slots of the prefix, then its ancestors in `tree`, then itself.

    The rows of the pass are the last M of `tree`.
    """

    ids: Sequence[int]  # [M]
    positions: Sequence[int]  # [M] rotary
    slots: Sequence[int]  # [M] where their keys and values go
    table: Tensor  # int64 slots of the sequence, in reading order
    prefix: range  # the entries of `table` that every row reads
    tree: Sequence[int]  # [R] slots
    parents: Sequence[int]  # [R] indices into `tree`, smaller than the row's own, -1 for none

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, TreeView]:
        """ids, positions, slots [M] int64 and the view, on the table's device."""
        device = self.table.device
        rows = int64_tensor((self.ids, self.positions, self.slots), device)
        tree = rows[2] if self.tree is self.slots else int64_tensor(self.tree, device)
        prefix = self.table[self.prefix.start : self.prefix.stop]
        return rows[0], rows[1], rows[2], TreeView(prefix, tree, self.parents, len(self.ids))


@dataclass(slots=True)
class FeatureRows:
    """The target's features of a few rows, in the place where its pass left them."""

    table: Tensor  # [N, taps * Ht]; the target's next pass may overwrite it
    rows: Sequence[int] | None = None  # [P] rows of the table; None: all of them

    def __len__(self) -> int:
        return len(self.table if self.rows is None else self.rows)

    def tensor(self) -> Tensor:
        """[P, taps * Ht]; a copy where rows were chosen."""
        return self.table if self.rows is None else take_rows(self.table, self.rows)


class TensorTarget(ABC):
    """A target whose `forward` takes tensors."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView | BatchView,
        store: KVStore,
        taps: tuple[int, ...],
        scored: slice = slice(None),
    ) -> TargetOutput:
        """See `model.target.Target.forward`."""

    def forward_rows(
        self,
        rows: PassRows,
        store: KVStore,
        taps: tuple[int, ...],
        scored: slice = slice(None),
        *,
        peaks_only: bool = False,
    ) -> TargetOutput:
        """`forward` over `rows`.

        `peaks_only`: only the largest logit of each scored row will be looked at. A target that finds it during the
        pass may leave all logits out; others give the logits.
        """
        return self.forward(*rows.tensors(), store, taps, scored)


class TensorHead(ABC):
    """A head whose `extend` and `step` take tensors."""

    @abstractmethod
    def extend(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView,
        top: int,
    ) -> HeadOutput:
        """See `model.head.Head.extend`."""

    @abstractmethod
    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """See `model.head.Head.step`."""

    def extend_rows(self, features: Tensor, rows: PassRows, top: int) -> HeadOutput:
        """`extend` over `rows`."""
        return self.extend(features, *rows.tensors(), top)

    def step_rows(self, states: Tensor, chosen: Sequence[int], rows: PassRows, top: int) -> HeadOutput:
        """`step` over `rows`, fed with the `chosen` ones of `states` [S, H]."""
        with torch.inference_mode():
            hidden = take_rows(states, chosen)
        return self.step(hidden, *rows.tensors(), top)
