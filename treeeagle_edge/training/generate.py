"""Plays many dialogues at once on one target, and keeps what the target computed on the way.

Every pass takes one token of each dialogue, each in slots of its own. Features cost nothing extra: they are taken as
the dialogue is written. Where the target is batch invariant, a dialogue does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.kernels.view import BatchView
from treeeagle_edge.kv_store import KVStore
from treeeagle_edge.model_protocols import TargetModel
from treeeagle_edge.training.dialogues import Say, Script, Wish
from treeeagle_edge.training.shards import Dialogue

_CANDIDATES = 64  # a token is sampled among that many of the most likely


@dataclass
class _Playing:
    """A dialogue that is being written."""

    script: Script
    rng: np.random.Generator
    say: Say
    row: int  # of the buffers, and of the store
    said: list[Say] = field(default_factory=list)


class Stage:
    """Room for `dialogues` of `length` tokens: keys and values, and what is kept of every token."""

    def __init__(self, target: TargetModel, taps: Sequence[int], dialogues: int, length: int) -> None:
        """`taps`: the features wanted, indices into hidden_states."""
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
    def play(
        self, scripts: Sequence[Script], rngs: Sequence[np.random.Generator], stop_ids: frozenset[int]
    ) -> list[Dialogue]:
        """Play every script to its end, or to the full length. `rngs` choose the sampled tokens, one a script."""
        self._stop_ids = sorted(stop_ids)
        playing = [
            _Playing(script, rng, next(script), row)
            for row, (script, rng) in enumerate(zip(scripts, rngs, strict=True))
        ]
        everyone = list(playing)
        while playing:
            chosen = self._step(playing)
            playing = [one for one, token in zip(playing, chosen, strict=True) if self._advance(one, token)]
        return [self._written(one) for one in everyone]

    def _step(self, playing: Sequence[_Playing]) -> list[int | None]:
        """One pass over a token of each dialogue; the next token where one was wished for."""
        rows = torch.tensor([one.row for one in playing])
        lengths = torch.tensor([len(one.said) for one in playing])
        ids = torch.tensor([one.say.token for one in playing])
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
        return self._choose(playing, output.logits, best)

    def _choose(self, playing: Sequence[_Playing], logits: Tensor, best: Tensor) -> list[int | None]:
        wishes = [one.say.wish for one in playing]
        chosen: list[int | None] = [
            None if wish is None else token for wish, token in zip(wishes, best.tolist(), strict=True)
        ]
        sampled = [i for i, wish in enumerate(wishes) if wish is not None and not _is_best(wish)]
        if not sampled:
            return chosen
        top = logits[torch.tensor(sampled, device=logits.device)].topk(min(_CANDIDATES, logits.shape[-1]))
        for i, scores, ids in zip(sampled, top.values.cpu().numpy(), top.indices.cpu().numpy(), strict=True):
            chosen[i] = self._sample(playing[i], scores, ids)
        return chosen

    def _sample(self, one: _Playing, scores: np.ndarray, ids: np.ndarray) -> int:
        """Gumbel-max over the candidates. An end token that is not wanted yet is no candidate."""
        wish = one.say.wish
        assert wish is not None
        if not wish.may_stop:
            allowed = ~np.isin(ids, self._stop_ids)
            if allowed.any():
                scores, ids = scores[allowed], ids[allowed]
        if wish.temperature == 0.0:
            return int(ids[0])
        noise = -np.log(-np.log(one.rng.random(len(ids))))
        return int(ids[np.argmax(scores / wish.temperature + noise)])

    def _advance(self, one: _Playing, token: int | None) -> bool:
        """Write down what was said and go on; False at the end."""
        one.said.append(one.say)
        if len(one.said) == self._length:
            one.script.close()
            return False
        try:
            one.say = one.script.send(token)
        except StopIteration:
            return False
        return True

    def _written(self, one: _Playing) -> Dialogue:
        kept = self._kept[one.row, : len(one.said)]
        features, hidden = kept.split((self._feature_width, kept.shape[1] - self._feature_width), dim=-1)
        return Dialogue(
            tokens=torch.tensor([say.token for say in one.said], dtype=torch.int32),
            in_answer=torch.tensor([say.in_answer for say in one.said]),
            best=self._best[one.row, : len(one.said)].clone(),
            features=features.clone(),
            hidden=hidden.clone(),
        )


def _is_best(wish: Wish) -> bool:
    return wish.temperature == 0.0 and wish.may_stop
