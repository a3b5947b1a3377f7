"""Passes of target and head over a live sequence: prefill, draft, verify, and the bookkeeping of head rows.

A head row is *true* once it is written from the target's feature, not from the head's own guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from treeeagle_edge.drafting.drafter import drafter_for
from treeeagle_edge.drafting.growth import Growth
from treeeagle_edge.engine.protocol import Reading, unwatched
from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.limits import MAX_EXPANSIONS, PREFILL_CHUNK
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.model.target import TargetOutput
from treeeagle_edge.tree import DraftTree


class Passes:
    """The two models, and the store of the target's keys and values. The head has its own store, by the same slots."""

    def __init__(
        self, target: TargetModel, head: DraftHead | None, *, slots: int, fixed_rows: int | None
    ) -> None:
        """With `fixed_rows`, every target pass has that many rows and attention reads by position (exact mode)."""
        self.target = target
        self.head = head
        self.chunk = fixed_rows or PREFILL_CHUNK
        self._device = target.device
        self._fixed_rows = fixed_rows
        self._pad_slot = slots  # one slot more than the pool knows: written by padding rows, read by no other
        config = target.config
        self.store = KVStore.allocate_over(
            target.layer_devices, slots + 1, config.num_kv_heads, config.head_dim, target.kv_dtype
        )
        self._taps = head.config.taps if head is not None else ()
        scratch = range(slots, slots + MAX_EXPANSIONS)
        self._drafter = drafter_for(head, scratch) if head is not None else None
        self._lent_to: LiveSequence | None = None  # whose features lie in the last pass's output

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values, target and head together."""
        return self.store.nbytes + (self.head.store.nbytes if self.head else 0)

    def prefill(
        self,
        sequence: LiveSequence,
        prompt: Sequence[int],
        *,
        peaks_only: bool = False,
        reading: Reading = unwatched,
    ) -> TargetOutput:
        """Read the prompt and commit it, with its head rows where there is a head; logits [1, V] of its last token.

        Tokens found in the cache are not read again, except the last of them, whose feature and logits are needed. It
        writes to a throwaway slot, so that its own KV and head row stay as they are. `peaks_only`: see
        `model.pass_rows.TensorTarget.forward_rows`.
        """
        again = 1 if sequence.cached_tokens else 0
        begin = start = sequence.cached_tokens - again
        reading(0, len(prompt) - begin)
        output: TargetOutput | None = None
        while start < len(prompt):
            stop = min(start + self.chunk, len(prompt))
            slots, ids = sequence.borrow(stop - start), prompt[start:stop]
            scored = slice(len(ids) - 1 if stop == len(prompt) else len(ids), len(ids))
            rows = PassRows(
                ids,
                range(start, stop),
                slots,
                sequence.slot_table,
                range(start),
                slots,
                range(-1, len(ids) - 1),
            )
            output = self._run(rows, scored, peaks_only)
            sequence.commit(ids[again:], slots[again:])
            if sequence.with_head:
                sequence.pending.append(output.features)
                self.flush_head(sequence)
            start, again = stop, 0
            reading(stop - begin, len(prompt) - begin)
        assert output is not None
        return output

    def draft(self, sequence: LiveSequence, root: int, growth: Growth) -> DraftTree | None:
        """Write the head rows whose features wait, the root's row last, then grow a tree from there.

        The root's slot must be announced. None where the head's scores are not finite.
        """
        assert self.head is not None
        assert self._drafter is not None
        position = len(sequence)
        tokens = [*sequence.tokens[sequence.head_tokens :], root]
        with self._kernels():
            tree = self._drafter.draft(_features(sequence), _true_rows(sequence, tokens), growth)
            sequence.pending, sequence.lent = [], None
            sequence.head_tokens = position  # the root's row counts once the root is committed
            if tree is None:
                self.head.clean_rows(sequence.table(1, position + 1))
        return tree

    def verify(
        self, sequence: LiveSequence, tree: DraftTree, slots: Sequence[int], *, peaks_only: bool = False
    ) -> TargetOutput:
        """Logits [N, V] float32 and features [N, taps * Ht] of the tree's rows, until the next pass overwrites them.

        Their KV goes to `slots`, one a row. `peaks_only`: see `model.pass_rows.TensorTarget.forward_rows`.
        """
        position = len(sequence)
        positions = [position + depth for depth in tree.depths]
        table, prefix = sequence.slot_table, range(position)
        rows = PassRows(tree.tokens, positions, slots, table, prefix, slots, tree.parents)
        return self._run(rows, slice(0, len(tree)), peaks_only)

    def commit(
        self,
        sequence: LiveSequence,
        tokens: Sequence[int],
        slots: Sequence[int],
        verified: TargetOutput,
        rows: Sequence[int],
    ) -> None:
        """Settle the walked `rows` of a tree; `tokens` are theirs, `slots` those of the whole tree.

        Their features stay in `verified` until they are drafted from, or until the next pass needs their place.
        """
        features = FeatureRows(verified.features, rows) if sequence.with_head else None
        self._lent_to = sequence
        sequence.commit(tokens, [slots[row] for row in rows], features)

    def flush_head(self, sequence: LiveSequence) -> None:
        """Write the head rows of all committed tokens. The last feature goes on waiting, for the token after it: as a
        copy, since the next pass may overwrite it, and a view would keep the features of a whole pass.
        """
        sequence.head_tokens = max(sequence.head_tokens, 1)  # the first token has no head row
        rows = len(sequence) - sequence.head_tokens
        if rows < 1:
            sequence.pending = [features.clone() for features in sequence.pending]
            return
        assert self.head is not None
        features = _features(sequence).tensor()
        with self._kernels():
            self.head.extend_rows(features[:rows], _true_rows(sequence, sequence.tokens[-rows:]), top=1)
        sequence.head_tokens = len(sequence)
        sequence.pending, sequence.lent = [features[rows:].clone()], None

    def _run(self, rows: PassRows, scored: slice, peaks_only: bool) -> TargetOutput:
        if self._lent_to is not None:
            self._lent_to.keep_lent()
            self._lent_to = None
        count = len(rows.ids)
        missing = self._fixed_rows - count if self._fixed_rows is not None else 0
        if missing:
            # padding rows repeat the first row, write to a slot of their own, and no other row reads them
            slots = [*rows.slots, *[self._pad_slot] * missing]
            rows = PassRows(
                [*rows.ids, *[rows.ids[0]] * missing],
                [*rows.positions, *[rows.positions[0]] * missing],
                slots,
                rows.table,
                rows.prefix,
                slots,
                [*rows.parents, *[-1] * missing],
            )
        with self._kernels():
            output = self.target.forward_rows(rows, self.store, self._taps, scored, peaks_only=peaks_only)
        if self._device.type == "cuda":
            # the caller reads its clock next; without waiting here, the walk would wait, and be charged for the pass
            torch.cuda.synchronize(self._device)
        return replace(output, features=output.features[:count]) if missing else output

    def _kernels(self) -> AbstractContextManager[None]:
        return use_backend("exact") if self._fixed_rows is not None else nullcontext()


def _features(sequence: LiveSequence) -> FeatureRows:
    """All features whose head rows are not written yet."""
    if not sequence.pending and sequence.lent is not None:
        return sequence.lent
    sequence.keep_lent()
    pending = sequence.pending
    return FeatureRows(pending[0] if len(pending) == 1 else torch.cat(pending))


def _true_rows(sequence: LiveSequence, tokens: Sequence[int]) -> PassRows:
    """The head rows of `tokens`, from the first token that has none yet; each row reads all rows before it."""
    first, count = sequence.head_tokens, len(tokens)
    slots, parents = sequence.slots_from(first, count), range(-1, count - 1)
    positions = range(first - 1, first - 1 + count)
    return PassRows(tokens, positions, slots, sequence.slot_table, range(1, first), slots, parents)
