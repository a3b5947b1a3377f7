"""From logits to tokens: one rule for greedy and sampling, walked along the draft tree.

At a node the target's processed distribution is computed given prompt and path, one token is sampled with the
noise that belongs to that position, and the walk steps to the child that carries it. Sampling is Gumbel-max
(Gumbel 1954; see Maddison et al., arXiv 1411.0030): argmax of log-probability plus noise, the noise a pure
function of (seed, position, token id). Hence the text depends on neither the tree's shape nor on whether
there is a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

# A sort of the whole vocabulary costs more than a target row; nearly every nucleus fits into this many
# tokens.
_NUCLEUS_GUESS = 512
_LIKELIEST = 2.0**40  # the share of the likeliest token; 2^22 such tokens can be added


def random_numbers(seed: int, position: int, count: int) -> NDArray[np.uint32]:
    """[count] uint32 that belong to `position` under `seed`.

    The lower, then the upper halves of the words of Philox 4x64 (Salmon et al., SC 2011), keyed by the seed, with the
    position in the counter's highest word: streams of different positions never overlap, and entry i never depends on
    the vocabulary's size.
    """
    words = np.random.Philox(key=seed, counter=[0, 0, 0, position]).random_raw(-(-count // 2))
    return words.astype("<u8", copy=False).view("<u4")[:count]


def gumbel(numbers: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Float64 Gumbel noise of random uint32; the greater the number, the greater the noise."""
    uniform = (numbers.astype(np.float64) + 0.5) * 2.0**-32  # inside (0, 1), never 0 or 1
    return -np.log(-np.log(uniform))


def draw(scores: NDArray[np.float32], seed: int, position: int) -> int:
    """Where `scores` [vocab_size] float32 plus the noise of `position` is largest; -inf is never drawn.

    The noise of a token is worked out only where its score leaves it a chance: what the greatest noise of all does not
    lift above the likeliest token with its own cannot win. This changes no result, and of fifty thousand logarithms
    leaves some dozens.
    """
    numbers = random_numbers(seed, position, len(scores))
    likeliest = scores.argmax()
    floor = float(scores[likeliest]) + float(gumbel(numbers[likeliest]))
    least = np.nextafter(np.float32(floor - float(gumbel(numbers.max()))), np.float32("-inf"))
    contenders = np.flatnonzero(scores >= least)
    return int(contenders[np.argmax(scores[contenders].astype(np.float64) + gumbel(numbers[contenders]))])


def choose_token(scores: Tensor, params: SamplingParams, position: int) -> int:
    """The token that belongs to `position`, of `scores` [V] float32 after penalties; the temperature is above 0."""
    scores = _kept(scores / _beside(scores, params.temperature), params)
    return draw(scores.cpu().numpy(), params.seed, position)


def _beside(scores: Tensor, value: float) -> Tensor:
    """`value` as a tensor [] on the device of `scores`, to divide by as `device.walk` does: instead of dividing by a
    number of the host, CUDA multiplies with its reciprocal, which may differ in the last bit.
    """
    return torch.full((), value, dtype=scores.dtype, device=scores.device)


def _kept(scores: Tensor, params: SamplingParams) -> Tensor:
    """[V] with -inf for what top-k, top-p or min-p exclude. Equal scores are kept, or excluded, together."""
    if 0 < params.top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], float("-inf"))
    if params.top_p < 1.0:
        scores = scores.masked_fill(scores < _least_of_nucleus(scores, params.top_p), float("-inf"))
    if params.min_p > 0.0:
        scores = scores.masked_fill(scores < scores.max() + math.log(params.min_p), float("-inf"))
    return scores


def _least_of_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """The least score of the smallest set of likeliest tokens whose probability reaches `top_p` (Holtzman et al.,
    arXiv 1904.09751).
    """
    peak = scores.max()
    wanted = wanted_mass(shares(scores, peak).sum(), top_p)
    guess = min(_NUCLEUS_GUESS, scores.shape[0])
    for count in (guess, scores.shape[0]):
        values = scores.topk(count).values
        mass = shares(values, peak).cumsum(0)
        if count == scores.shape[0] or bool(mass[-1] >= wanted):
            break
    return values[min(int((mass < wanted).sum()), count - 1)]


def shares(scores: Tensor, peak: Tensor) -> Tensor:
    """[V] int64: how likely the tokens with `scores` [V] float32 are, the likeliest, with the score `peak`, being 2^40.

    Whole numbers, whose sums are the same in any order. A card adds floats in an order of its own: that of
    `torch.cumsum` differs from run to run over one row, and with their number over several.
    """
    return (scores - peak).double().exp_().mul_(_LIKELIEST).long()


def wanted_mass(total: Tensor, top_p: float | Tensor) -> Tensor:
    """The least sum of shares, int64, that is `top_p` (a tensor: float64) of all, whose sum `total` int64 is."""
    return (total.double() * top_p).ceil().long()


Choose = Callable[[Tensor, SamplingParams, int], int]


class Peaks(NamedTuple):
    """The largest logit of each of R rows: of NumPy, which makes lists several times as fast while caches are cold."""

    logits: NDArray[np.float32]  # [R], not finite where one of the row is not
    ids: NDArray[np.int64]  # [R], where they are


@dataclass(frozen=True)
class Walk:
    """Where the walk through one tree went."""

    rows: tuple[int, ...]  # rows of the tree, the root first
    next_token: int  # sampled at the last row


class Sampler:
    """Chooses tokens for one answer. Tokens that were chosen are observed, so that penalties see them."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        choose: Choose = choose_token,
    ) -> None:
        """`choose`: the target's own way to do what `choose_token` does.

        Raises UsageError through `params`, InputError for a biased or banned id outside the vocabulary.
        """
        self.params = params
        self._choose = choose
        self._bias = bias_vector(params, vocab_size, device)
        self._history = _History(params, prompt_ids, device) if params.uses_history else None

    @property
    def needs_peaks_only(self) -> bool:
        """Whether the largest logit of a row decides alone, so that walks look at no other."""
        return self.params.greedy and self._bias is None and self._history is None

    def walk(
        self,
        tree: DraftTree,
        logits: Tensor,
        root_position: int,
        peaks: Peaks | None = None,
    ) -> Walk:
        """Sample along `tree` until the sampled token is not among the drafted children.

        `logits` [N, V] float32, row i for tree row i; `root_position` is the root's place in the sequence, so
        the token sampled at a row of depth d belongs to position root_position + 1 + d. `peaks` of the N rows
        are looked for unless given; with them and `needs_peaks_only` the logits may be [0, V].

        A row that is not finite is not entered: the token that led to it stands, and the next round computes it
        again on its own. Raises CannotRunError if the root's is not.
        """
        largest, best = peaks or _largest(logits)
        finite = [math.isfinite(peak) for peak in largest.tolist()]  # NaN and +inf surface in the maximum
        if not finite[0]:
            raise non_finite_logits()
        greedy = best.tolist() if self.needs_peaks_only else None
        rows = [0]
        while True:
            row = rows[-1]
            position = root_position + 1 + tree.depths[row]
            token = greedy[row] if greedy is not None else self._sample(logits[row], position)
            self._observe(token)
            child = tree.child(row, token)
            if child is None or not finite[child]:
                return Walk(tuple(rows), token)
            rows.append(child)

    def _sample(self, logits: Tensor, position: int) -> int:
        scores = self._scores(logits)
        return int(scores.argmax()) if self.params.greedy else self._choose(scores, self.params, position)

    def _scores(self, logits: Tensor) -> Tensor:
        """[V] float32: logits after bias, bans and penalties."""
        scores = logits if self._bias is None else logits + self._bias
        return scores if self._history is None else self._history.penalised(scores)

    def _observe(self, token: int) -> None:
        if self._history is not None:
            self._history.add(token)


class _History:
    """The tokens seen so far, each once: only their logits are penalised."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], device: torch.device) -> None:
        self._params = params
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = torch.tensor(list(self._places), dtype=torch.int64, device=device)
        counts = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._counts = torch.zeros(len(self._places), device=device) if counts else None  # in the answer

    def add(self, token: int) -> None:
        """The answer has `token` once more."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, self._ids.new_tensor([token])))
            if self._counts is not None:
                self._counts = torch.cat((self._counts, self._counts.new_zeros(1)))
        if self._counts is not None:
            self._counts[place] += 1

    def penalised(self, scores: Tensor) -> Tensor:
        """[V] after the penalties. Repetition (Keskar et al., arXiv 1909.05858) divides positive and multiplies
        negative logits of tokens in prompt and answer.
        """
        params, seen = self._params, scores[self._ids]
        if params.repetition_penalty != 1.0:
            factor = _beside(seen, params.repetition_penalty)
            seen = torch.where(seen > 0, seen / factor, seen * factor)
        if self._counts is not None:
            seen = (
                seen - params.frequency_penalty * self._counts - params.presence_penalty * (self._counts > 0)
            )
        return scores.index_copy(0, self._ids, seen)


def _largest(logits: Tensor) -> Peaks:
    """Maximum of each row [N] and its id; NaN counts as the largest. On a CPU NumPy searches several times as fast."""
    if logits.device.type != "cpu":
        peaks, best = logits.max(dim=-1)
        return Peaks(peaks.cpu().numpy(), best.cpu().numpy())
    rows = logits.numpy()
    best = rows.argmax(axis=-1)
    return Peaks(np.take_along_axis(rows, best[:, None], axis=-1)[:, 0], best)


def non_finite_logits() -> CannotRunError:
    """The error of a target whose logits choose no token."""
    return CannotRunError(
        "the target gave non-finite logits",
        "try --bits 32, or another copy of the model: this one may be damaged",
    )


def bias_vector(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    """[V] float32 to add to every row of logits, or None where there is nothing to add."""
    if not params.logit_bias and not params.banned_ids:
        return None
    outside = [i for i in (*params.logit_bias, *params.banned_ids) if not 0 <= i < vocab_size]
    if outside:
        raise InputError(
            f"token id {outside[0]} is not in the vocabulary", f"use ids from 0 to {vocab_size - 1}"
        )
    if len(params.banned_ids) >= vocab_size:
        raise InputError("every token is banned, so nothing can be answered", "ban fewer ids")
    bias = torch.zeros(vocab_size, device=device)
    for token, value in params.logit_bias.items():
        bias[token] = value
    bias[list(params.banned_ids)] = float("-inf")
    return bias
