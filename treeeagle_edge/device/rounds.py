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
from treeeagle_edge.drafting.lookup import Lookup, Match
from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape
from treeeagle_edge.drafting.shape_choice import Choice, OneShape, ShapeChoice
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

    def choice(self, bounds: TreeShape | None) -> Choice:
        """What chooses the shapes of rounds within `bounds`, None for plain decoding."""
        if bounds is None or not bounds.adaptive:
            return OneShape(RoundShape(bounds))
        return self._choices.setdefault(bounds, ShapeChoice(bounds))

    def extend_rows(self, shape: TreeShape | None) -> int:
        """Features that may wait at the beginning of a round with a tree: as many as one before it usually settled.
        Where more wait, after a branch or plain rounds, their head rows are written before it.
        """
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
        choice: Choice,
    ) -> None:
        """`sequence` uses the device's own table; `choice` is of shapes within `shape`, None for plain decoding."""
        self._rounds = rounds
        self._round = rounds.round
        self._sequence = sequence
        self._prompt_ids = prompt_ids
        self._params = params
        self._choice = choice
        self._extend_rows = rounds.extend_rows(shape)
        self._lookup: Lookup | None = None  # of the text so far, made when it is first asked

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
        match = self._match(root, limit)
        shape = self._choice.choose(match) if limit > 1 else PLAIN
        sequence, position = self._sequence, len(self._sequence)
        if shape.tree is not None and self._waiting() > self._extend_rows:
            self._flush_head()
        started = time.perf_counter()
        slots = sequence.borrow(self._round.rows(shape))
        looked_up = match.tokens[: shape.branch] if match is not None else ()
        self._round.tell(Order(position, root, sequence.head_tokens, slots, looked_up))
        prepared = self._run(shape)
        result = self._round.read(shape)
        seconds = time.perf_counter() - started
        if not result.root_is_finite:
            raise non_finite_logits()
        tree, walked = result.tree, result.walked
        ids, reason = cut([*(tree.tokens[row] for row in walked[1:]), result.next_token], self._params, limit)
        kept = walked[: len(ids) + 1]  # the root, and walked nodes whose token was not cut away
        sequence.settle([tree.tokens[row] for row in kept], [slots[result.places[row]] for row in kept])
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
        if limit > 1:  # the last token is never drafted for, whatever that costs
            self._choice.learn(shape, settled, match)
            if not prepared:
                self._choice.time(shape, seconds)
        if self._lookup is not None:
            self._lookup.extend(ids)
        return settled

    def close(self, *, clean: bool) -> None:
        """See `AnswerRounds.close`."""
        if clean and self._sequence.with_head:
            self._flush_head()
        self._sequence.close()
        self._rounds.is_lent = False

    def _match(self, root: int, limit: int) -> Match | None:
        """What the text, which ends with `root`, suggests itself, up to a token that would end the answer."""
        most = min(self._choice.most_looked_up, limit - 1)
        if most < 1:
            return None
        if self._lookup is None:
            self._lookup = Lookup([*self._prompt_ids, root])
        match = self._lookup.match(most)
        if match is None:
            return None
        stops = (place for place, token in enumerate(match.tokens) if token in self._params.stop_ids)
        return Match(match.length, match.tokens[: next(stops, most) + 1])

    def _run(self, shape: RoundShape) -> bool:
        key = (shape, self._extend_rows, self._round.sampler.kind, current_backend())
        return self._rounds.runs.run(
            key, lambda: self._round.run(shape, self._extend_rows), self._round.state
        )

    def _book_head(self, shape: RoundShape, result: Result, position: int) -> None:
        """Which head rows are true now: drafting wrote those that waited, the root's, at `position`, the last."""
        sequence = self._sequence
        if shape.tree is not None:
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
