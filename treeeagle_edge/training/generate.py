"""Writes many dialogues at once with one target, and keeps the features that the target computed while writing.

Every forward pass takes one token of each dialogue, and each dialogue has its own slots in the KV cache. A token's
features come from the pass that writes it, so they need no pass of their own. Where the target is batch invariant (a
row's result does not depend on the other rows), a dialogue does not depend on those written beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.kernels.view import BatchView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.protocols import TargetModel
from treeeagle_edge.training.dialogues import DialogueToken, Script, Wish
from treeeagle_edge.training.shards import Dialogue

_CANDIDATES = 64  # tokens are sampled among this many of the most likely


@dataclass
class _Unfinished:
    """A dialogue that is being written."""

    script: Script
    rng: np.random.Generator
    current: DialogueToken  # the token that the next pass takes
    row: int  # which part of the buffers and of the KV store is this dialogue's
    said: list[DialogueToken] = field(default_factory=list)


class DialogueWriter:
    """Writes up to `dialogues` dialogues of up to `length` tokens at the same time."""

    def __init__(self, target: TargetModel, taps: Sequence[int], dialogues: int, length: int) -> None:
        """`taps`: which hidden states are kept as features (indices into hidden_states)."""
        config = target.config
        self._target = target
        self._length = length
        self._taps = (*taps, config.num_layers)
        self._feature_width = len(taps) * config.hidden_size
        self._store = KVStore.allocate(
            config.num_layers, dialogues * length, config.num_kv_heads, config.head_dim,
            target.kv_dtype, target.device,
        )  # fmt: skip
        self._kept = torch.empty(
            dialogues, length, self._feature_width + config.hidden_size, dtype=torch.bfloat16
        )
        self._best = torch.empty(dialogues, length, dtype=torch.int32)
        self._stop_ids: list[int] = []

    @torch.inference_mode()
    def write(
        self, scripts: Sequence[Script], rngs: Sequence[np.random.Generator], stop_ids: frozenset[int]
    ) -> list[Dialogue]:
        """Run every script to its end or to the full length. `rngs`: one random generator for each script."""
        self._stop_ids = sorted(stop_ids)
        dialogues = [
            _Unfinished(script, rng, next(script), row)
            for row, (script, rng) in enumerate(zip(scripts, rngs, strict=True))
        ]
        unfinished = dialogues
        while unfinished:
            chosen = self._step(unfinished)
            unfinished = [
                one for one, token in zip(unfinished, chosen, strict=True) if self._advance(one, token)
            ]
        return [self._written(one) for one in dialogues]

    def _step(self, unfinished: Sequence[_Unfinished]) -> list[int | None]:
        """One pass over the current token of each dialogue. Returns its next token, None where none is wished for."""
        rows = torch.tensor([one.row for one in unfinished])
        lengths = torch.tensor([len(one.said) for one in unfinished])
        ids = torch.tensor([one.current.token for one in unfinished])
        first = rows * self._length
        device = self._target.device
        output = self._target.forward(
            ids.to(device),
            lengths.to(device),
            (first + lengths).to(device),
            BatchView(first.to(device), lengths.to(device) + 1),
            self._store,
            self._taps,
        )
        self._kept[rows, lengths] = output.features.to(device="cpu", dtype=torch.bfloat16)
        best = output.logits.argmax(dim=-1)
        self._best[rows, lengths] = best.to(device="cpu", dtype=torch.int32)
        return self._choose(unfinished, output.logits, best)

    def _choose(self, unfinished: Sequence[_Unfinished], logits: Tensor, best: Tensor) -> list[int | None]:
        wishes = [one.current.wish for one in unfinished]
        chosen: list[int | None] = [
            None if wish is None else token for wish, token in zip(wishes, best.tolist(), strict=True)
        ]
        sampled = [i for i, wish in enumerate(wishes) if wish is not None and not _is_best(wish)]
        if not sampled:
            return chosen
        top = logits[torch.tensor(sampled, device=logits.device)].topk(min(_CANDIDATES, logits.shape[-1]))
        for i, scores, ids in zip(sampled, top.values.cpu().numpy(), top.indices.cpu().numpy(), strict=True):
            chosen[i] = self._sample(unfinished[i], scores, ids)
        return chosen

    def _sample(self, one: _Unfinished, scores: np.ndarray, ids: np.ndarray) -> int:
        """Sample one of the candidates (Gumbel-max). An end token is left out while it is not wanted yet."""
        wish = one.current.wish
        assert wish is not None
        if not wish.may_stop:
            allowed = ~np.isin(ids, self._stop_ids)
            if allowed.any():
                scores, ids = scores[allowed], ids[allowed]
        if wish.temperature == 0.0:
            return int(ids[0])
        noise = -np.log(-np.log(one.rng.random(len(ids))))
        return int(ids[np.argmax(scores / wish.temperature + noise)])

    def _advance(self, one: _Unfinished, token: int | None) -> bool:
        """Keep the current token and ask the script for the one after it; False where the dialogue has ended."""
        one.said.append(one.current)
        if len(one.said) == self._length:
            one.script.close()
            return False
        try:
            one.current = one.script.send(token)
        except StopIteration:
            return False
        return True

    def _written(self, one: _Unfinished) -> Dialogue:
        kept = self._kept[one.row, : len(one.said)]
        features, hidden = kept.split((self._feature_width, kept.shape[1] - self._feature_width), dim=-1)
        return Dialogue(
            tokens=torch.tensor([said.token for said in one.said], dtype=torch.int32),
            in_answer=torch.tensor([said.in_answer for said in one.said]),
            best=self._best[one.row, : len(one.said)].clone(),
            features=features.clone(),
            hidden=hidden.clone(),
        )


def _is_best(wish: Wish) -> bool:
    return wish.temperature == 0.0 and wish.may_stop
