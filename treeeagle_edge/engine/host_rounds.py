"""Rounds led by the host: it decides what is drafted, walks the tree and commits, between passes of the two models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.growth import FixedGrowth, Growth
from treeeagle_edge.drafting.lookup import Lookup, Match
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.engine.protocol import Reading
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling import Sampler
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

MOST_PENDING = 64  # features kept for later head rows while rounds decode plainly


class AnswerRounds(Protocol):
    """One answer in the making, whoever leads its rounds. `limit`: tokens it may still have, at least 1."""

    def first(self, limit: int, reading: Reading) -> Round:
        """Read the prompt and settle one token."""
        ...

    def next(self, root: int, limit: int) -> Round:
        """Draft below `root`, the token settled last, verify, walk and commit."""
        ...

    def close(self, *, clean: bool) -> None:
        """Leave what was settled to the cache. `clean`: no round was broken off."""
        ...


class HostRounds:
    """The rounds of one answer over `sequence`, whose prompt is `prompt_ids`; `shape` None decodes plainly."""

    def __init__(
        self,
        passes: Passes,
        sequence: LiveSequence,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        shape: TreeShape | None,
        controller: Controller | None,
    ) -> None:
        self._passes = passes
        self._sequence = sequence
        self._prompt_ids = prompt_ids
        self._sampler = sampler
        self._shape = shape
        self._controller = controller
        self._lookup: Lookup | None = None  # of the text so far, made when it is first asked

    def first(self, limit: int, reading: Reading) -> Round:
        """See `AnswerRounds.first`."""
        started = time.perf_counter()
        prompt_ids, sampler = self._prompt_ids, self._sampler
        peaks_only = sampler.needs_peaks_only
        output = self._passes.prefill(self._sequence, prompt_ids, peaks_only=peaks_only, reading=reading)
        verified = time.perf_counter()
        walk = sampler.walk(
            DraftTree.root_only(prompt_ids[-1]), output.logits, len(prompt_ids) - 1, output.peaks
        )
        times = verified - started, time.perf_counter() - verified
        return prefill_round(walk.next_token, sampler.params, limit, times, self._sequence.cached_tokens)

    def next(self, root: int, limit: int) -> Round:
        """See `AnswerRounds.next`."""
        started = time.perf_counter()
        sequence, sampler = self._sequence, self._sampler
        root_slot = sequence.borrow(1)
        sequence.announce(root_slot)
        drafted: DraftTree | None = None
        match = self._match(root, limit)
        growth = self._growth(limit, match)
        if growth is not None:
            drafted = self._passes.draft(sequence, root, growth)
        tree = drafted or DraftTree.root_only(root)
        if match is not None:
            tree = self._with_match(tree, match, growth if drafted is not None else None)
        drafted_at = time.perf_counter()
        slots = root_slot + sequence.borrow(tree.num_nodes)
        output = self._passes.verify(sequence, tree, slots, peaks_only=sampler.needs_peaks_only)
        verified_at = time.perf_counter()
        walk = sampler.walk(tree, output.logits, len(sequence), output.peaks)
        ids, reason = cut(
            [*(tree.tokens[row] for row in walk.rows[1:]), walk.next_token], sampler.params, limit
        )
        kept = list(walk.rows[: len(ids) + 1])  # the root, and walked nodes whose token was not cut away
        self._passes.commit(sequence, [tree.tokens[row] for row in kept], slots, output, kept)
        if sequence.pending_rows > MOST_PENDING:
            self._passes.flush_head(sequence)
        settled = Round(
            ids=ids,
            kind="tree" if tree.num_nodes else "plain",
            drafted=tree.num_nodes,
            accepted=len(walk.rows) - 1,
            tree=tree,
            walked=walk.rows,
            next_token=walk.next_token,
            draft_s=drafted_at - started,
            verify_s=verified_at - drafted_at,
            sample_s=time.perf_counter() - verified_at,
            finish_reason=reason,
            draft_failures=int(growth is not None and drafted is None),
        )
        if self._shape is not None and self._shape.adaptive and self._controller is not None:
            self._controller.observe(settled, growth, match)
        if self._lookup is not None:
            self._lookup.extend(ids)
        return settled

    def close(self, *, clean: bool) -> None:
        """See `AnswerRounds.close`. An error inside a pass leaves the committed part whole; only head rows under way
        are given up.
        """
        if clean and self._sequence.with_head:
            self._passes.flush_head(self._sequence)
        self._sequence.close()

    def _match(self, root: int, limit: int) -> Match | None:
        """What the text, which ends with `root`, suggests itself."""
        shape = self._shape
        if shape is None or not (shape.adaptive and shape.lookup) or self._controller is None:
            return None
        if self._lookup is None:
            self._lookup = Lookup([*self._prompt_ids, root])
        return self._lookup.match(min(shape.nodes, limit - 1))

    def _growth(self, limit: int, match: Match | None) -> Growth | None:
        """How this round's tree grows; None where the head does not draft.

        A walk settles its path and one token more, so levels at or past the limit could never be used.
        """
        if self._shape is None or self._passes.head is None or limit < 2:
            return None
        shape = self._shape if self._shape.depth < limit else replace(self._shape, depth=limit - 1)
        if shape.adaptive and self._controller is not None:
            return self._controller.growth(shape, self._sampler.params.stop_ids, match)
        return FixedGrowth(shape, self._sampler.params.stop_ids)

    def _with_match(self, tree: DraftTree, match: Match, growth: Growth | None) -> DraftTree:
        assert self._controller is not None
        assert self._shape is not None
        stop_ids = self._sampler.params.stop_ids
        return self._controller.with_match(tree, match, self._shape, stop_ids, growth)


def prefill_round(
    token: int, params: SamplingParams, limit: int, times: tuple[float, float], cached_tokens: int
) -> Round:
    """The first Round of an answer; `times`: seconds of the passes, and of sampling."""
    ids, reason = cut([token], params, limit)
    return Round(
        ids=ids,
        kind="prefill",
        drafted=0,
        accepted=0,
        tree=None,
        walked=(),
        next_token=token,
        draft_s=0.0,
        verify_s=times[0],
        sample_s=times[1],
        finish_reason=reason,
        cached_tokens=cached_tokens,
    )


def cut(ids: Sequence[int], params: SamplingParams, limit: int) -> tuple[tuple[int, ...], str | None]:
    """The tokens up to the earliest end, and why they end.

    A stop id wins over the limit that it also meets.
    """
    for count, token in enumerate(ids[:limit], start=1):
        if token in params.stop_ids:
            return tuple(ids[:count]), "stop"
    return tuple(ids[:limit]), "length" if len(ids) >= limit else None
