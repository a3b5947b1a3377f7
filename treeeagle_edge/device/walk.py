"""The walk of `sampling.py` in tensor operations: tokens are chosen and tree rows stepped through on the device.

Which steps of processing are on is known beforehand: a `WalkKind` decides which operations there are. Everything else,
numbers included, is read from buffers that stay where they are, so one captured walk serves any answer of its kind.
Penalties change after each token that is taken, hence one step after another, as many as the tree is deep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.device.noise import gumbel_noise
from treeeagle_edge.device.tree import DeviceTree
from treeeagle_edge.sampling import bias_vector, shares, wanted_mass
from treeeagle_edge.sampling_params import SamplingParams

_OFF = 2.0  # a top-p that no probability reaches


@dataclass(frozen=True)
class WalkKind:
    """The steps of processing that are on."""

    greedy: bool
    biased: bool  # a bias, or bans
    remembers: bool  # a penalty
    sorts: bool  # top-k or top-p
    has_min_p: bool

    @classmethod
    def of(cls, params: SamplingParams) -> WalkKind:
        """What `params` switch on. Greedy choices ask for neither top-k, top-p nor min-p."""
        sampled = not params.greedy
        return cls(
            greedy=params.greedy,
            biased=bool(params.logit_bias or params.banned_ids),
            remembers=params.uses_history,
            sorts=sampled and (params.top_k > 0 or params.top_p < 1.0),
            has_min_p=sampled and params.min_p > 0.0,
        )

    @property
    def takes_the_largest(self) -> bool:
        """Whether the largest logit is the choice, so that all rows are settled at once."""
        return self.greedy and not self.biased and not self.remembers


@dataclass(frozen=True)
class DeviceWalk:
    """Where the walk went, as tensors. L is one more than the tree is deep."""

    rows: Tensor  # [L] int64: rows of the tree, the root first, -1 after the end
    next_token: Tensor  # [1] int64: chosen at the last row
    root_is_finite: Tensor  # [1] bool


class DeviceSampler:
    """Chooses tokens for one answer at a time, which `load` sets it up for."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Buffers of a few numbers for each token of the vocabulary, at addresses that stay."""
        self.kind = WalkKind.of(SamplingParams())
        self.stops = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # ends that nothing follows
        self._vocab = vocab_size
        self._device = device
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._top_k = torch.zeros(1, dtype=torch.int64, device=device)
        self._top_p = torch.zeros(1, dtype=torch.float64, device=device)
        self._numbers = torch.zeros(5, device=device)
        self._bias = torch.zeros(vocab_size, device=device)
        self._seen = torch.zeros(vocab_size, device=device)  # how often, in prompt and answer
        self._counts = torch.zeros(vocab_size, device=device)  # how often, in the answer

    @property
    def history(self) -> tuple[Tensor, ...]:
        """Buffers that a walk changes."""
        return self._seen, self._counts

    def load(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Set up for an answer. Raises InputError for a biased or banned id outside the vocabulary."""
        self.kind = WalkKind.of(params)
        bias = bias_vector(params, self._vocab, self._device)
        if bias is not None:
            self._bias.copy_(bias)
        self._seed.fill_(params.seed)
        self._top_k.fill_(min(params.top_k or self._vocab, self._vocab))
        self._top_p.fill_(params.top_p if params.top_p < 1.0 else _OFF)
        numbers = (
            *(params.temperature, params.repetition_penalty, params.frequency_penalty),
            params.presence_penalty,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        )
        self._numbers.copy_(torch.tensor(numbers))
        self.stops.zero_()
        self.stops[[token for token in params.stop_ids if 0 <= token < self._vocab]] = True
        if self.kind.remembers:
            self._counts.zero_()
            prompt = torch.tensor(list(prompt_ids), dtype=torch.int64)
            self._seen.copy_(torch.bincount(prompt, minlength=self._vocab))

    def walk(self, tree: DeviceTree, logits: Tensor, root_position: Tensor) -> DeviceWalk:
        """The same rule as `sampling.Sampler.walk`. logits: [N, V] float32; root_position: [1] int64.

        Tokens of the walk count as seen from then on.
        """
        peaks, best = logits.max(dim=-1)
        finite = torch.isfinite(peaks)  # NaN and +inf both surface in the maximum
        enterable = tree.real & finite
        if self.kind.takes_the_largest:
            return _walk_at_once(tree, best, enterable, finite[:1])
        steps = tree.levels + 1
        noise: Tensor | None = None
        if not self.kind.greedy:
            positions = root_position + 1 + torch.arange(steps, device=self._device)
            noise = gumbel_noise(self._seed, positions, self._vocab)
        index = torch.arange(len(tree.tokens), device=self._device)
        row, alive = torch.zeros_like(root_position), torch.ones_like(finite[:1])
        next_token = torch.zeros_like(root_position)
        rows = []
        for step in range(steps):
            token = self._choose(logits[row][0], None if noise is None else noise[step])
            self._observe(token, alive)
            next_token = torch.where(alive, token, next_token)
            rows.append(row.masked_fill(~alive, -1))
            child = (tree.parents == row) & (tree.tokens == token) & enterable
            alive = alive & child.any()
            row = torch.where(alive, index.masked_fill(~child, len(index)).amin(), row)
        return DeviceWalk(torch.cat(rows), next_token, finite[:1])

    def _choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """[1] int64: the token for one row of logits [V], with the noise [V] of its position."""
        scores = self._penalised(logits)
        if noise is None:
            return scores.argmax().reshape(1)
        scores = scores / self._numbers[0]
        ids: Tensor | None = None
        if self.kind.sorts:
            scores, ids = self._nucleus(scores)
            noise = noise[ids]
        if self.kind.has_min_p:
            scores = scores.masked_fill(scores < scores.max() + self._numbers[4], float("-inf"))
        at = (scores.double() + noise).argmax().reshape(1)
        return at if ids is None else ids[at]

    def _penalised(self, scores: Tensor) -> Tensor:
        """[V] after bias, bans and penalties; a penalty that is off changes no bit."""
        if self.kind.biased:
            scores = scores + self._bias
        if not self.kind.remembers:
            return scores
        repetition, frequency, presence = self._numbers[1], self._numbers[2], self._numbers[3]
        fewer = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(self._seen > 0, fewer, scores)
        return scores - frequency * self._counts - presence * (self._counts > 0)

    def _nucleus(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[V] scores, best first, -inf where top-k or top-p leaves them out; [V] their ids."""
        values, ids = scores.sort(descending=True, stable=True)
        values = values.masked_fill(values < values[self._top_k - 1], float("-inf"))
        mass = shares(values, values[0]).cumsum(0)
        # [1] and not a number, which would be waited for
        last = (mass < wanted_mass(mass[-1], self._top_p)).sum().clamp(max=self._vocab - 1).reshape(1)
        return values.masked_fill(values < values[last], float("-inf")), ids

    def _observe(self, token: Tensor, alive: Tensor) -> None:
        if self.kind.remembers:
            for counts in self.history:
                counts.index_add_(0, token, alive.float())


def _walk_at_once(tree: DeviceTree, chosen: Tensor, enterable: Tensor, root_is_finite: Tensor) -> DeviceWalk:
    """The walk where every row's choice is known beforehand: as many operations for a deep tree as for a flat one.

    chosen: [N] int64, the token of each row's choice; enterable: [N] bool. A row is walked where it and all its
    ancestors are what their parents chose; of twins the first one is.
    """
    count = len(tree.tokens)
    index = torch.arange(count, device=tree.tokens.device)
    follows = enterable & (tree.tokens == chosen[tree.parents.clamp(min=0)])
    earlier = (index[:, None] > index) & (tree.parents[:, None] == tree.parents)
    follows = (follows & ~(earlier & follows).any(dim=1)) | (index == 0)
    walked = ~(tree.visible & ~follows).any(dim=1)
    # one row a level is walked; the others go to a line of their own
    line = tree.depths.masked_fill(~walked, tree.levels + 1)
    rows = torch.full((tree.levels + 2,), -1, dtype=torch.int64, device=index.device)
    rows.index_copy_(0, line, index)
    last = (tree.depths * count + index).masked_fill(~walked, 0).amax(dim=0, keepdim=True) % count
    return DeviceWalk(rows[:-1], chosen[last], root_is_finite)
