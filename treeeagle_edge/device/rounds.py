"""Rounds that stay on the device: the host hands out slots, starts a round by one call, and reads one line of numbers.

What a round does is `device/round.py`; here it is told, run, as a CUDA graph where that works, and booked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from treeeagle_edge.device.cuda_graphs import Runs
from treeeagle_edge.device.round import DeviceRound, Order, Result
from treeeagle_edge.device.tree import DeviceTree
from treeeagle_edge.drafting.shape_choice import ShapeChoice
from treeeagle_edge.engine.host_rounds import MOST_PENDING, cut, prefill_round
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.engine.protocol import Reading
from treeeagle_edge.kernels.dispatch import current_backend
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling import non_finite_logits
from treeeagle_edge.sampling_params import SamplingParams


class DeviceRounds:
    """Buffers, captured rounds and what was learnt about shapes: one a loaded model, lent to one answer at a time."""

    def __init__(self, passes: Passes, round_: DeviceRound, runs: Runs, bounds: TreeShape | None) -> None:
        """`bounds`: the engine's own tree, which later ones are seldom deeper than."""
        self.passes = passes
        self.round = round_
        self.runs = runs
        self.is_lent = False
        self._choices: dict[TreeShape, ShapeChoice] = {}
        self._depth = bounds.depth if bounds is not None else 1

    def choice(self, bounds: TreeShape) -> ShapeChoice | None:
        """What chooses shapes within `bounds`; None where they are one shape."""
        if not bounds.adaptive:
            return None
        return self._choices.setdefault(bounds, ShapeChoice(bounds))

    def extend_rows(self, shape: TreeShape | None) -> int:
        """Features that may wait at the beginning of a round: as many as the round before it may have settled."""
        return 1 + max(self._depth, 0 if shape is None else shape.depth)


class DeviceAnswer:
    """One answer's rounds on the device. See `engine.host_rounds.AnswerRounds`."""

    def __init__(
        self,
        rounds: DeviceRounds,
        sequence: LiveSequence,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        shape: TreeShape | None,
    ) -> None:
        """`sequence` uses the device's own table; `shape` None decodes plainly. Errors as `DeviceSampler.load`."""
        self._rounds = rounds
        self._round = rounds.round
        self._sequence = sequence
        self._prompt_ids = prompt_ids
        self._params = params
        self._shape = shape
        self._choice = None if shape is None else rounds.choice(shape)
        self._extend_rows = rounds.extend_rows(shape)

    def first(self, limit: int, reading: Reading) -> Round:
        """See `AnswerRounds.first`."""
        started = time.perf_counter()
        sequence = self._sequence
        output = self._rounds.passes.prefill(sequence, self._prompt_ids, reading=reading)
        verified = time.perf_counter()
        waiting = torch.cat(sequence.pending)[-1:] if sequence.with_head else None
        self._round.load(sequence.tokens, waiting)
        sequence.pending = []  # from now on features wait on the device
        here = torch.tensor([self._prompt_ids[-1], len(sequence) - 1]).to(output.logits.device)
        with torch.inference_mode():
            walk = self._round.sampler.walk(DeviceTree.root_only(here[:1]), output.logits, here[1:])
        if not bool(walk.root_is_finite):
            raise non_finite_logits()
        times = verified - started, time.perf_counter() - verified
        return prefill_round(int(walk.next_token), self._params, limit, times, sequence.cached_tokens)

    def next(self, root: int, limit: int) -> Round:
        """See `AnswerRounds.next`. Levels past the limit are drafted for nothing: a captured shape stays as it is."""
        shape = self._choose() if limit > 1 else None
        sequence, position = self._sequence, len(self._sequence)
        if shape is not None and self._waiting() > self._extend_rows:
            self._flush_head()
        started = time.perf_counter()
        slots = sequence.borrow(self._round.rows(shape))
        self._round.tell(Order(position, root, sequence.head_tokens, slots))
        prepared = self._run(shape)
        result = self._round.read(shape)
        seconds = time.perf_counter() - started
        if not result.root_is_finite:
            raise non_finite_logits()
        tree, walked = result.tree, result.walked
        ids, reason = cut([*(tree.tokens[row] for row in walked[1:]), result.next_token], self._params, limit)
        kept = walked[: len(ids) + 1]  # the root, and walked nodes whose token was not cut away
        sequence.settle([tree.tokens[row] for row in kept], [slots[row] for row in kept])
        self._book_head(shape, result, position)
        settled = Round(
            ids=ids,
            kind="tree" if tree.num_nodes else "plain",
            drafted=tree.num_nodes,
            accepted=len(walked) - 1,
            tree=tree,
            walked=walked,
            next_token=result.next_token,
            draft_s=0.0,
            verify_s=seconds,
            sample_s=0.0,
            finish_reason=reason,
            draft_failures=int(not result.is_sound),
        )
        if self._choice is not None and limit > 1:  # the last token is never drafted for, whatever that costs
            self._choice.learn(shape, settled)
            if not prepared:
                self._choice.time(shape, seconds)
        return settled

    def close(self, *, clean: bool) -> None:
        """See `AnswerRounds.close`."""
        if clean and self._shape is not None:
            self._flush_head()
        self._sequence.close()
        self._rounds.is_lent = False

    def _run(self, shape: TreeShape | None) -> bool:
        key = (shape, self._extend_rows, self._round.sampler.kind, current_backend())
        return self._rounds.runs.run(
            key, lambda: self._round.run(shape, self._extend_rows), self._round.state
        )

    def _choose(self) -> TreeShape | None:
        return self._shape if self._choice is None else self._choice.choose()

    def _book_head(self, shape: TreeShape | None, result: Result, position: int) -> None:
        """Which head rows are true now: drafting wrote those that waited, the root's, at `position`, the last."""
        sequence = self._sequence
        if shape is not None:
            sequence.head_tokens = position + 1
            if not result.is_sound:
                assert self._round.head is not None
                self._round.head.clean_rows(sequence.table(1, position + 1))
        elif sequence.with_head and self._waiting() > MOST_PENDING:
            self._flush_head()

    def _waiting(self) -> int:
        """Features whose head rows are not written yet."""
        return len(self._sequence) - self._sequence.head_tokens + 1

    def _flush_head(self) -> None:
        """Write the head rows of all committed tokens; the last feature goes on waiting."""
        sequence = self._sequence
        if self._waiting() > 1:
            sequence.pending = [self._round.waiting_features(sequence.head_tokens - 1, len(sequence))]
            self._rounds.passes.flush_head(sequence)
            sequence.pending = []
