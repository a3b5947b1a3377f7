"""One round of draft, verify, walk and commit in tensor operations on fixed buffers: nothing in it waits for the host.

Before a round the host writes one line of numbers, the `order`; after it, it reads one line, the `result`. In between
lengths, slots and tokens are read from the device, so that the same operations, captured once, serve every round. Slots
stay the host's to hand out (`kv/pool.py`): an order names those that the round may write to. What the text repeats is
looked up by the host, too: it knows the whole text before it gives an order, which takes the tokens along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.device.branch import with_branch
from treeeagle_edge.device.tree import DeviceTree, grow, num_rows
from treeeagle_edge.device.walk import DeviceSampler, DeviceWalk
from treeeagle_edge.drafting.round_shapes import RoundShape
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.limits import FEATURES_KEPT
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.rounds import MAX_NODES, TreeShape
from treeeagle_edge.tree import DraftTree

_MAX_LEVELS = 33  # of a walk: the deepest tree, or the longest branch, and its root
_NUMBERS = 4  # of an order, before its slots
_FLAGS = 3  # of a result, before the rows of its walk
_COLUMNS = 4  # of a tree in a result


@dataclass(frozen=True)
class Order:
    """What the host tells a round."""

    length: int  # tokens committed, hence the root's place
    root: int  # token id
    head_tokens: int  # leading tokens whose head rows are true
    slots: Sequence[int]  # one for each row of the round, the root's first
    looked_up: Sequence[int] = ()  # tokens that may follow the root, at most as many as the branch has rows


@dataclass(frozen=True)
class Result:
    """What a round tells the host."""

    tree: DraftTree
    places: tuple[int, ...]  # of the tree's rows among those of the round, some of which may hold no node
    walked: tuple[int, ...]  # rows of the tree, the root first
    next_token: int
    is_sound: bool  # False where the head's scores were not finite: nothing was drafted then
    root_is_finite: bool  # False where the target's logits were not: the walk means nothing then


class DeviceRound:
    """The buffers of one answer, and what a round does with them. The models write KV to the same slots as ever."""

    def __init__(
        self, target: TargetModel, head: DraftHead | None, store: KVStore, scratch: Tensor, *, context: int
    ) -> None:
        """store: with one slot more than are handed out. scratch: [R] int64, rows of the head's store that hold the
        expansions of a draft; padding writes to the last of them. context: tokens, at most.
        """
        self.target = target
        self.head = head
        self.store = store
        self._device = device = target.device
        self._scratch = scratch
        self._taps = head.config.taps if head is not None else ()
        self._nowhere = context + _MAX_LEVELS  # a place that is written and never read
        self.table = torch.zeros(self._nowhere + 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros_like(self.table)
        self.sampler = DeviceSampler(target.config.vocab_size, device)
        self._features: Tensor | None = (
            None  # [FEATURES_KEPT + 1, taps * Ht], of place p in line p % FEATURES_KEPT
        )
        if head is not None:
            shape = (FEATURES_KEPT + 1, head.config.num_taps * head.config.target_hidden_size)
            self._features = torch.zeros(shape, dtype=target.kv_dtype, device=device)
        self._order = torch.zeros(_NUMBERS + MAX_NODES + _MAX_LEVELS, dtype=torch.int64, device=device)
        self._result = torch.zeros(
            _FLAGS + _MAX_LEVELS + _COLUMNS * (MAX_NODES + 1), dtype=torch.int64, device=device
        )
        pins = device.type == "cuda"
        self._order_here = torch.zeros(self._order.shape, dtype=torch.int64, pin_memory=pins)
        self._result_here = torch.zeros(self._result.shape, dtype=torch.int64, pin_memory=pins)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Buffers that a round changes and a later one reads, but for keys and values."""
        kept = () if self._features is None else (self._features,)
        return (self.table, self._tokens, *self.sampler.history, *kept)

    def rows(self, shape: RoundShape) -> int:
        """Rows of a round's verify pass, the root included."""
        return self._rows_of_tree(shape.tree) + shape.branch

    def load(self, tokens: Sequence[int], features: Tensor | None) -> None:
        """Begin with committed `tokens`, whose slots are in the table; `features` [1, taps * Ht] of the last one."""
        self._tokens[: len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64, device=self._device)
        if features is not None:
            assert self._features is not None
            self._features[(len(tokens) - 1) % FEATURES_KEPT] = features[0]

    def waiting_features(self, first: int, stop: int) -> Tensor:
        """[stop - first, taps * Ht] features of the tokens at places first .. stop - 1."""
        assert self._features is not None
        places = torch.arange(first, stop, device=self._device)
        return self._features[places % FEATURES_KEPT]

    def tell(self, order: Order) -> None:
        """Send an order ahead of its round; nothing waits."""
        numbers = (order.length, order.root, order.head_tokens, len(order.looked_up))
        line = (*numbers, *order.slots, *order.looked_up)
        self._order_here.numpy()[: len(line)] = line
        self._order.copy_(self._order_here, non_blocking=True)

    def run(self, shape: RoundShape, extend_rows: int) -> None:
        """The whole round for the order that was told: what a graph holds. `extend_rows`: features that may wait."""
        with torch.inference_mode():
            length, root, head_tokens, found = self._order[:_NUMBERS].split(1)
            rows = self.rows(shape)
            slots = self._order[_NUMBERS : _NUMBERS + rows]
            self.table.index_copy_(0, length, slots[:1])
            self._tokens.index_copy_(0, length, root)
            if shape.tree is None:
                tree = DeviceTree.root_only(root)
            else:
                tree = self._draft(length, root, head_tokens, shape.tree, extend_rows)
            if shape.branch:
                looked_up = self._order[_NUMBERS + rows : _NUMBERS + rows + shape.branch]
                tree = with_branch(tree, looked_up, found)
            view = AttentionView(self.table, slots, tree.visible, length)
            output = self.target.forward(
                tree.tokens, length + tree.depths, slots, view, self.store, self._taps
            )
            walk = self.sampler.walk(tree, output.logits, length)
            self._commit(tree, walk, length, slots, output.features)
            self._report(tree, walk)

    def read(self, shape: RoundShape) -> Result:
        """Wait for the round and copy what it found: the one moment at which the host waits."""
        rows, levels = self.rows(shape), shape.levels + 1
        count = _FLAGS + levels + _COLUMNS * rows
        here = self._result_here[:count]
        here.copy_(self._result[:count], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        next_token, sound, finite = here[:_FLAGS].tolist()
        columns = here[_FLAGS + levels :].view(_COLUMNS, rows)
        tree, places = _real_rows(columns, rows - shape.branch)
        row_at = {place: row for row, place in enumerate(places)}
        walked = tuple(row_at[place] for place in here[_FLAGS : _FLAGS + levels].tolist() if place >= 0)
        return Result(tree, places, walked, next_token, bool(sound), bool(finite))

    def _rows_of_tree(self, tree: TreeShape | None) -> int:
        if tree is None or self.head is None:
            return 1
        return num_rows(tree, min(tree.branching, self.head.config.draft_vocab_size))

    def _draft(
        self, length: Tensor, root: Tensor, head_tokens: Tensor, shape: TreeShape, extend_rows: int
    ) -> DeviceTree:
        """Write the head rows that wait, the root's last, then grow the tree. Rows of no need pad the front."""
        assert self.head is not None
        assert self._features is not None
        head = self.head
        place = length - extend_rows + 1 + torch.arange(extend_rows, device=self._device)
        waits = place >= head_tokens
        place = place.clamp(min=1)
        at = torch.where(waits, self.table[place], self._scratch[-1])
        below = torch.ones(extend_rows, extend_rows, dtype=torch.bool, device=self._device).tril()
        alone = torch.eye(extend_rows, dtype=torch.bool, device=self._device)
        prefix = self.table[1:]
        view = AttentionView(prefix, at, (below & waits) | alone, head_tokens - 1)
        features = self._features[(place - 1) % FEATURES_KEPT]
        scored = head.extend(features, self._tokens[place], place - 1, at, view, shape.branching)

        def step(hidden: Tensor, tokens: Tensor, level: int, paths: Tensor) -> HeadOutput:
            count, used = paths.shape
            rows = self._scratch[:used]
            # a row's rotary position is one less than its token's place: row t pairs feature t with token t + 1
            positions = (length + (level - 1)).repeat(count)
            seen = AttentionView(prefix, rows, paths, length)
            return head.step(hidden, tokens, positions, rows[used - count :], seen, shape.branching)

        return grow(scored, root, shape, self.sampler.stops, step)

    def _commit(
        self, tree: DeviceTree, walk: DeviceWalk, length: Tensor, slots: Tensor, features: Tensor
    ) -> None:
        """Append the walked rows; what comes after the walk's end goes nowhere."""
        walked = walk.rows >= 0
        rows = walk.rows.clamp(min=0)
        place = length + torch.arange(len(rows), device=self._device)
        to = place.masked_fill(~walked, self._nowhere)
        self.table.index_copy_(0, to, slots[rows])
        self._tokens.index_copy_(0, to, tree.tokens[rows])
        if self._features is not None:
            line = (place % FEATURES_KEPT).masked_fill(~walked, FEATURES_KEPT)
            self._features.index_copy_(0, line, features[rows])

    def _report(self, tree: DeviceTree, walk: DeviceWalk) -> None:
        flags = (walk.next_token, tree.is_sound.long(), walk.root_is_finite.long())
        parents = tree.parents.masked_fill(~tree.real, -2)
        found = (*flags, walk.rows, tree.tokens, parents, tree.depths, tree.log_probs.view(torch.int64))
        line = torch.cat(found)
        self._result[: len(line)].copy_(line)


def _real_rows(columns: Tensor, of_tree: int) -> tuple[DraftTree, tuple[int, ...]]:
    """The rows that hold nodes as a tree of their own, and their places among all.

    columns: [4, N] int64 tokens, parents, depths and log-probabilities, the parent of a row without a node being -2.
    of_tree: how many rows come before those of the branch.
    """
    tokens, parents, depths, _ = columns.tolist()
    log_probs = columns[3].view(torch.float64).tolist()
    places = tuple(place for place, parent in enumerate(parents) if parent >= -1)
    row_at = {place: row for row, place in enumerate(places)} | {-1: -1}
    tree = DraftTree(
        tuple(tokens[place] for place in places),
        tuple(row_at[parents[place]] for place in places),
        tuple(depths[place] for place in places),
        tuple(log_probs[place] for place in places),
        looked_up=sum(place >= of_tree for place in places),
    )
    return tree, places
