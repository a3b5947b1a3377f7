"""Ways to push tokens through a target that several tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.kernels.dispatch import use_backend
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.target import Target, TargetOutput
from treeeagle_edge.tree import DraftTree


def new_store(target: Target, slots: int) -> KVStore:
    """A store of `slots` rows that fits the target."""
    config = target.config
    return KVStore.allocate(
        config.num_layers, slots, config.num_kv_heads, config.head_dim, target.kv_dtype, target.device
    )


def causal_pass(
    target: Target, store: KVStore, ids: Tensor, start: int, order: Tensor, taps: tuple[int, ...] = ()
) -> TargetOutput:
    """Run `ids` as the tokens start, start + 1, ...; `order[i]` is the slot of token i."""
    stop = start + len(ids)
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    view = AttentionView(order[:start], order[start:stop], visible)
    return target.forward(ids, torch.arange(start, stop), order[start:stop], view, store, taps)


def in_pieces(
    target: Target, ids: Tensor, piece: int, order: Tensor | None = None, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and features [N, taps * H] of `ids`, run `piece` rows at a time."""
    order = torch.arange(len(ids)) if order is None else order
    store = new_store(target, int(order.max()) + 1)
    logits, features = [], []
    for start in range(0, len(ids), piece):
        output = causal_pass(target, store, ids[start : start + piece], start, order, taps)
        logits.append(output.logits.clone())  # a native target overwrites them in its next pass
        features.append(output.features)
    return torch.cat(logits), torch.cat(features)


def tree_in_exact_passes(
    target: Target, prompt: Tensor, tree: DraftTree, rows: int, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits of every row of `tree` after `prompt`, twice: [N, V] from one tree pass, and [N, V] each token alone.

    Every pass has `rows` rows, filled up with repeats of its first that write to a slot of their own. Alone means: the
    ancestors were run one by one and sit in the prefix. `order`: slots, at least len(prompt) + 2 * len(tree) of them.
    """
    pad_slot = int(order.max()) + 1
    length, nodes = len(prompt), len(tree)

    def run(ids: list[int], positions: list[int], slots: Tensor, prefix: Tensor, visible: Tensor) -> Tensor:
        missing = rows - len(ids)
        padded = torch.cat((slots, torch.full((missing,), pad_slot)))
        seen = torch.block_diag(visible.float(), torch.ones(missing, missing)).bool()
        view = AttentionView(prefix, padded, seen)
        output = target.forward(
            torch.tensor(ids + ids[:1] * missing),
            torch.tensor(positions + positions[:1] * missing),
            padded,
            view,
            store,
            (),
        )
        return output.logits[: len(ids)]

    store = new_store(target, pad_slot + 1)
    with use_backend("exact"):
        for start in range(0, length, rows):
            chunk = prompt[start : start + rows].tolist()
            stop = start + len(chunk)
            causal = torch.ones(len(chunk), len(chunk)).tril()
            run(chunk, list(range(start, stop)), order[start:stop], order[:start], causal)
        visible = torch.zeros(nodes, nodes)
        for row, path in enumerate(tree.ancestors):
            visible[row, list(path)] = 1
        positions = [length + depth for depth in tree.depths]
        drawn = order[length : length + nodes]
        together = run(list(tree.tokens), positions, drawn, order[:length], visible)
        own = order[length + nodes : length + 2 * nodes]
        alone = [
            run(
                [tree.tokens[row]],
                [positions[row]],
                own[row : row + 1],
                torch.cat((order[:length], own[list(path[:-1])])),
                torch.ones(1, 1),
            )
            for row, path in enumerate(tree.ancestors)
        ]
    return together, torch.cat(alone)
