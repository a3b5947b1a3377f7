"""What the engine asks of a target and of a draft head, whichever kernels are behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from treeeagle_edge.drafting.growth_rule import GrowthRule
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows
from treeeagle_edge.model.target import TargetOutput
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree


class TargetModel(Protocol):
    """A loaded target."""

    config: ModelConfig
    device: torch.device

    @property
    def batch_invariant(self) -> bool:
        """Whether a row gets the same bits in any pass. If not, exact mode gives all passes the same number of rows."""
        ...

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """Where each layer lies, and its keys and values beside it; everything else is on `device`."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype that keys and values are stored in."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of weights and tables."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[M] int64 -> [M, H]: unscaled rows of embed_tokens."""
        ...

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
        ...

    def forward_rows(
        self,
        rows: PassRows,
        store: KVStore,
        taps: tuple[int, ...],
        scored: slice = slice(None),
        *,
        peaks_only: bool = False,
    ) -> TargetOutput:
        """See `model.pass_rows.TensorTarget.forward_rows`."""
        ...


@runtime_checkable
class ChoosingTarget(Protocol):
    """A target that has a way of its own to draw tokens from its logits."""

    def choose_token(self, scores: Tensor, params: SamplingParams, position: int) -> int:
        """See `sampling.choose_token`."""
        ...


class DraftHead(Protocol):
    """A loaded EAGLE-3 head with its own KV rows."""

    config: HeadConfig
    notes: tuple[str, ...]
    store: KVStore

    @property
    def nbytes(self) -> int:
        """Bytes of weights, without the KV rows."""
        ...

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
        ...

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """See `model.head.Head.step`."""
        ...

    def extend_rows(self, features: Tensor, rows: PassRows, top: int) -> HeadOutput:
        """See `model.pass_rows.TensorHead.extend_rows`."""
        ...

    def step_rows(self, states: Tensor, chosen: Sequence[int], rows: PassRows, top: int) -> HeadOutput:
        """See `model.pass_rows.TensorHead.step_rows`."""
        ...

    def clean_rows(self, slots: Tensor) -> None:
        """See `model.head.Head.clean_rows`."""
        ...


@runtime_checkable
class TreeHead(Protocol):
    """A head that grows a whole tree in one call."""

    def draft_tree(
        self, features: FeatureRows, rows: PassRows, scratch: range, rule: GrowthRule
    ) -> tuple[DraftTree | None, int]:
        """The tree of `drafting.drafter.TreeDrafter.draft` by `rule`, and the levels that were scored.

        `scratch`: rows of the store for the head's own, at least (depth - 1) * branching.
        """
        ...
