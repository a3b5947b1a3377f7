"""The loop: prefill a prompt, then rounds of draft, verify, walk, commit. It knows token ids only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from treeeagle_edge.calibrate import measure_costs
from treeeagle_edge.controller import Controller
from treeeagle_edge.costs import CostTable
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.growth import FixedGrowth, Growth
from treeeagle_edge.kv_pool import KVPool, PoolUsage
from treeeagle_edge.model_protocols import DraftHead, TargetModel
from treeeagle_edge.passes import MAX_EXPANSIONS, Passes
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling import Sampler
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.sequence import LiveSequence
from treeeagle_edge.target import exact_rows
from treeeagle_edge.tree import DraftTree

_MOST_PENDING = 64  # features kept for later head rows while rounds decode plainly


class Engine:
    """A target, an optional head, and the slots both write to. One answer is generated at a time."""

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead | None,
        *,
        context: int,
        slots: int,
        tree: TreeShape | None,
        exact: bool = False,
        costs: CostTable | None = None,
    ) -> None:
        """`slots` hold the whole context, one tree with its root, and a throwaway row: context + nodes + 2 or
        more.

        With `exact`, every pass has the same number of rows and attention reads by position, so that even
        kernels whose rounding depends on the shape give the same text with and without a tree.
        """
        self.target = target
        self.head = head
        self.context = context
        self.tree = tree if head is not None else None
        pads = exact and not target.batch_invariant
        self._fixed_rows = exact_rows(tree.nodes + 1 if tree else 1) if pads else None
        self._pool = KVPool(slots)
        self._passes = Passes(target, head, slots=slots, fixed_rows=self._fixed_rows)
        self._controller: Controller | None = None
        if self.tree is not None and self.tree.adaptive:
            costs = costs or measure_costs(self._passes, self._pool, context, self.tree)
            self._controller = Controller(costs)

    @property
    def has_head(self) -> bool:
        """Whether this engine can speculate."""
        return self.head is not None

    @property
    def costs(self) -> CostTable | None:
        """What passes cost here, where an adaptive tree asked for it."""
        return self._controller.costs.table if self._controller else None

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values, target and head together."""
        return self._passes.kv_nbytes

    def usage(self) -> PoolUsage:
        """Slots in all and in use."""
        return self._pool.usage()

    def reset(self) -> None:
        """Forget every cached prefix."""
        self._pool.clear_cache()

    def check_shape(self, shape: TreeShape) -> None:
        """Raise UsageError for a tree that the reserved slots cannot hold."""
        room = self._pool.num_slots - self.context - 1
        if shape.nodes > room:
            raise UsageError(
                f"{shape.nodes} nodes need more slots than the {room} reserved",
                f"use at most {room}, or start with --nodes {shape.nodes}",
            )
        if self._fixed_rows is not None and shape.nodes + 1 > self._fixed_rows:
            raise UsageError(
                f"--exact keeps {self._fixed_rows} rows a pass, too few for {shape.nodes} nodes",
                f"use at most {self._fixed_rows - 1}, or start with --nodes {shape.nodes}",
            )
        if (shape.depth - 1) * shape.branching > MAX_EXPANSIONS:
            raise UsageError(
                f"depth {shape.depth} with branching {shape.branching} is too large a draft",
                f"keep (depth - 1) x branching at most {MAX_EXPANSIONS}",
            )

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculate: bool = True,
        reuse_prefix: bool = True,
        tree: TreeShape | None = None,
    ) -> Iterator[Round]:
        """Yield the prefill's Round, then one a verify pass, until a stop id, max_tokens or the context's
        end.

        Closing the iterator at any time keeps what was settled for the next prompt. `tree` overrides the
        engine's shape. Raises InputError for an empty prompt or one that leaves no room in the context.
        """
        shape = (tree or self.tree) if speculate and self.head else None
        if shape is not None:
            self.check_shape(shape)
        self._check_prompt(prompt_ids)
        sampler = Sampler(params, prompt_ids, self.target.config.vocab_size, self.target.device)
        limit = min(params.max_tokens or self.context, self.context - len(prompt_ids))
        sequence = self._open(prompt_ids, with_head=shape is not None, reuse=reuse_prefix)
        clean = False
        try:
            last = self._first_round(sequence, prompt_ids, sampler, limit)
            emitted, clean = len(last.ids), True
            yield last
            while last.finish_reason is None:
                clean = False
                last = self._round(sequence, last.next_token, sampler, shape, limit - emitted)
                emitted, clean = emitted + len(last.ids), True
                yield last
        finally:
            # an error inside a pass leaves the committed part whole; only head rows under way are given up
            if clean and shape is not None:
                self._passes.flush_head(sequence)
            sequence.close()

    def tie_margin(self, ids: Sequence[int], a: int, b: int) -> float:
        """|logit(a) - logit(b)| for the token after `ids`, from a plain pass.

        How near two texts were when they parted.
        """
        self._check_prompt(ids)
        sequence = self._open(ids, with_head=False, reuse=True)
        try:
            logits = self._passes.prefill(sequence, ids).logits[0]
        finally:
            sequence.close()
        return abs(float(logits[a] - logits[b]))

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise InputError("the prompt is empty", "type something to answer")
        if len(prompt_ids) >= self.context:
            raise InputError(
                f"the prompt has {len(prompt_ids):,} tokens, too many for a context of {self.context:,}",
                "shorten it, or start with a larger --context",
            )
        vocab = self.target.config.vocab_size
        outside = next((i for i in prompt_ids if not 0 <= i < vocab), None)
        if outside is not None:
            raise InputError(
                f"token id {outside} is not in the target's vocabulary of {vocab:,}",
                "the tokenizer belongs to another model",
            )

    def _open(self, prompt_ids: Sequence[int], *, with_head: bool, reuse: bool) -> LiveSequence:
        return LiveSequence(
            self._pool,
            prompt_ids,
            with_head=with_head,
            reuse=reuse,
            capacity=self.context + 1,  # the root's slot is announced before it is committed
            device=self.target.device,
        )

    def _first_round(
        self, sequence: LiveSequence, prompt_ids: Sequence[int], sampler: Sampler, limit: int
    ) -> Round:
        started = time.perf_counter()
        output = self._passes.prefill(sequence, prompt_ids)
        verified = time.perf_counter()
        walk = sampler.walk(
            DraftTree.root_only(prompt_ids[-1]), output.logits, len(prompt_ids) - 1, output.peaks
        )
        ids, reason = _cut([walk.next_token], sampler.params, limit)
        return Round(
            ids=ids,
            kind="prefill",
            drafted=0,
            accepted=0,
            tree=None,
            walked=(),
            next_token=walk.next_token,
            draft_s=0.0,
            verify_s=verified - started,
            sample_s=time.perf_counter() - verified,
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens,
        )

    def _round(
        self, sequence: LiveSequence, root: int, sampler: Sampler, shape: TreeShape | None, limit: int
    ) -> Round:
        """Draft, verify, walk, commit. `limit` is how many more tokens the answer may have (at least 1)."""
        started = time.perf_counter()
        root_slot = sequence.borrow(1)
        sequence.announce(root_slot)
        drafted: DraftTree | None = None
        # a walk settles its path and one token more, so levels at or past the limit could never be used
        growth = self._growth(shape, limit, sampler.params.stop_ids)
        if growth is not None:
            drafted = self._passes.draft(sequence, root, growth)
        tree = drafted or DraftTree.root_only(root)
        drafted_at = time.perf_counter()
        slots = root_slot + sequence.borrow(tree.num_nodes)
        output = self._passes.verify(sequence, tree, slots)
        verified_at = time.perf_counter()
        walk = sampler.walk(tree, output.logits, len(sequence), output.peaks)
        ids, reason = _cut(
            [*(tree.tokens[row] for row in walk.rows[1:]), walk.next_token], sampler.params, limit
        )
        kept = list(walk.rows[: len(ids) + 1])  # the root, and walked nodes whose token was not cut away
        sequence.commit(
            [tree.tokens[row] for row in kept], [slots[row] for row in kept], output.features[kept]
        )
        if sequence.pending_rows > _MOST_PENDING:
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
        if shape is not None and shape.adaptive and self._controller is not None:
            self._controller.observe(settled, growth)
        return settled

    def _growth(self, shape: TreeShape | None, limit: int, stop_ids: frozenset[int]) -> Growth | None:
        """How this round's tree grows; None where the round decodes plainly."""
        if shape is None or limit < 2:
            return None
        shape = replace(shape, depth=min(shape.depth, limit - 1))
        if shape.adaptive and self._controller is not None:
            return self._controller.growth(shape, stop_ids)
        return FixedGrowth(shape, stop_ids)


def _cut(ids: Sequence[int], params: SamplingParams, limit: int) -> tuple[tuple[int, ...], str | None]:
    """The tokens up to the earliest end, and why they end.

    A stop id wins over the limit that it also meets.
    """
    for count, token in enumerate(ids[:limit], start=1):
        if token in params.stop_ids:
            return tuple(ids[:count]), "stop"
    return tuple(ids[:limit]), "length" if len(ids) >= limit else None
