"""The loop: prefill a prompt, then rounds of draft, verify, walk and commit. It knows token ids only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from threading import RLock

import torch

from treeeagle_edge.device.cuda_graphs import Capture
from treeeagle_edge.device.rounds import DeviceAnswer, DeviceRounds
from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.drafting.shape_choice import Choice
from treeeagle_edge.engine.calibrate import measure_costs
from treeeagle_edge.engine.device_start import can_stay_on_device, device_rounds, try_shapes
from treeeagle_edge.engine.host_rounds import AnswerRounds, HostRounds
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.engine.protocol import Reading, unwatched
from treeeagle_edge.engine.refusals import check_prompt, check_shape
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kv.pool import KVPool, PoolUsage
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.model.protocols import ChoosingTarget, DraftHead, TargetModel
from treeeagle_edge.model.target import exact_rows
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling import Sampler, choose_token
from treeeagle_edge.sampling_params import SamplingParams


class Engine:
    """A target, an optional head, and the slots both write to.

    Answers may take turns, also those of several threads: one round runs at a time.
    """

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
        on_device: bool | None = None,
        graphs: bool | Capture | None = None,
    ) -> None:
        """slots: at least context + nodes + 2: the whole context, one tree with its root, and a throwaway row.

        exact: every pass has the same number of rows, and attention reads by position. So even kernels whose rounding
        depends on the shape of a pass give the same text with and without a tree.

        costs: what passes cost, for an adaptive tree; None measures it now.

        on_device: whether rounds are led by the device (`device/rounds.py`). None: where `can_stay_on_device` says so,
        but not in exact mode, whose attention needs every length on the host.

        graphs: whether rounds on the device are captured as CUDA graphs, or what captures them. None: on CUDA.
        """
        self.target = target
        self.head = head
        self.context = context
        self.tree = tree
        pads = exact and not target.batch_invariant
        self._fixed_rows = exact_rows(tree.nodes + 1 if tree else 1) if pads else None
        # the same thread may come again: an answer that nobody keeps may end in the midst of a round
        self._turn = RLock()
        self._pool = KVPool(slots)
        self._passes = Passes(target, head, slots=slots, fixed_rows=self._fixed_rows)
        self._controller: Controller | None = None
        self._device: DeviceRounds | None = None
        if on_device is None:
            on_device = not pads and can_stay_on_device(target)
        if head is None and (on_device or not may_look_up(target, tree)):
            self.tree = None
        if on_device:
            self._device = device_rounds(self._passes, self.tree, slots=slots, context=context, graphs=graphs)
            try_shapes(
                self._device,
                self.tree,
                lambda ids, choice: self.generate(ids, SamplingParams(), choice=choice),
                vocab=target.config.vocab_size,
                context=context,
            )
            self.reset()
        elif self.tree is not None and self.tree.adaptive:
            costs = costs or measure_costs(self._passes, self._pool, context, self.tree)
            self._controller = Controller(costs)

    @property
    def has_head(self) -> bool:
        """See `TokenEngine.has_head`."""
        return self.head is not None

    @property
    def speculates(self) -> bool:
        """See `TokenEngine.speculates`."""
        return self.tree is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what runs, but not as well as it should."""
        problem = None if self._device is None else self._device.runs.problem
        if problem is None:
            return ()
        return (f"rounds run without CUDA graphs, which is slower, because capturing one failed: {problem}",)

    @property
    def costs(self) -> CostTable | None:
        """What passes cost on this machine; None where the host sizes no trees."""
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
        with self._turn:
            self._pool.clear_cache()

    def check_shape(self, shape: TreeShape) -> None:
        """Raise UsageError for a tree that the reserved slots, or the rows of exact mode, cannot hold."""
        check_shape(shape, room=self._pool.num_slots - self.context - 1, fixed_rows=self._fixed_rows)

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculate: bool = True,
        reuse_prefix: bool = True,
        tree: TreeShape | None = None,
        reading: Reading = unwatched,
        choice: Choice | None = None,
    ) -> Generator[Round]:
        """See `TokenEngine.generate`. An answer ends at a stop id, at max_tokens, or at the end of the context.

        choice: of the shapes of rounds on the device, in place of its own, for trials and checks. No shape may have
        more nodes than the tree.

        What was settled is kept for the next prompt. Raises InputError for an empty prompt or one that leaves no room
        in the context, UsageError for a `tree` that does not fit, CannotRunError where a card's memory runs out.
        """
        shape = self._shape(tree) if speculate else None
        if shape is not None:
            self.check_shape(shape)
        check_prompt(prompt_ids, context=self.context, vocab=self.target.config.vocab_size)
        limit = min(params.max_tokens or self.context, self.context - len(prompt_ids))
        with self._turn:
            rounds = self._begin(prompt_ids, params, shape, choice, reuse=reuse_prefix)
        clean = False
        try:
            with self._turn:
                last = rounds.first(limit, reading)
            emitted, clean = len(last.ids), True
            yield last
            while last.finish_reason is None:
                clean = False
                with self._turn:
                    last = rounds.next(last.next_token, limit - emitted)
                emitted, clean = emitted + len(last.ids), True
                yield last
        except torch.OutOfMemoryError as error:
            raise CannotRunError(
                f"the memory of {self.target.device} ran out while answering",
                "close what else uses the card, or start with a shorter --context",
            ) from error
        finally:
            with self._turn:
                rounds.close(clean=clean)

    def tie_margin(self, ids: Sequence[int], a: int, b: int) -> float:
        """See `TokenEngine.tie_margin`."""
        check_prompt(ids, context=self.context, vocab=self.target.config.vocab_size)
        with self._turn:
            sequence = self._open(ids, with_head=False, reuse=True)
            try:
                logits = self._passes.prefill(sequence, ids).logits[0]
            finally:
                sequence.close()
        return abs(float(logits[a] - logits[b]))

    def _shape(self, wanted: TreeShape | None) -> TreeShape | None:
        """The shape of an answer's trees; None where rounds decode plainly."""
        shape = (wanted or self.tree) if self.speculates else None
        return shape if self.has_head or may_look_up(self.target, shape) else None

    def _begin(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        shape: TreeShape | None,
        choice: Choice | None,
        *,
        reuse: bool,
    ) -> AnswerRounds:
        """One answer's rounds: led by the device where its buffers are free, else by the host. Errors as `Sampler`."""
        with_head, device = shape is not None and self.has_head, self._device
        if device is not None and not device.is_lent:
            device.round.sampler.load(params, prompt_ids)
            sequence = self._open(prompt_ids, with_head=with_head, reuse=reuse, table=device.round.table)
            device.is_lent = True
            return DeviceAnswer(device, sequence, prompt_ids, params, shape, choice or device.choice(shape))
        target = self.target
        choose = target.choose_token if isinstance(target, ChoosingTarget) else choose_token
        sampler = Sampler(params, prompt_ids, target.config.vocab_size, target.device, choose)
        sequence = self._open(prompt_ids, with_head=with_head, reuse=reuse)
        return HostRounds(self._passes, sequence, prompt_ids, sampler, shape, self._controller)

    def _open(
        self, prompt_ids: Sequence[int], *, with_head: bool, reuse: bool, table: torch.Tensor | None = None
    ) -> LiveSequence:
        return LiveSequence(
            self._pool,
            prompt_ids,
            with_head=with_head,
            reuse=reuse,
            capacity=self.context + 1,  # the root's slot is announced before it is committed
            device=self.target.device,
            table=table,
        )


def may_look_up(target: TargetModel, tree: TreeShape | None) -> bool:
    """Whether trees may be of what the text repeats alone, without a head: where the size is chosen each round, and
    the text stays that of plain decoding to the last bit.
    """
    return tree is not None and tree.adaptive and tree.lookup and target.batch_invariant
