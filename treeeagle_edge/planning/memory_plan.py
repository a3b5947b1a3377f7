"""The memory plan: weights + head + KV pool + workspace + reserve, from shapes alone, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeeagle_edge.errors import UsageError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.limits import MAX_EXPANSIONS, PREFILL_CHUNK, SHORTEST_CONTEXT
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning import card_shares as split
from treeeagle_edge.planning import native_bytes
from treeeagle_edge.planning.card_shares import Card, CardShare
from treeeagle_edge.planning.graph_bytes import graph_bytes
from treeeagle_edge.planning.torch_bytes import (
    block_bytes,
    embedding_bytes,
    final_norm_bytes,
    head_bytes,
    head_pool_bytes,
    layer_bytes,
    logit_bytes,
    pool_bytes,
    rotary_bytes,
    slot_bytes,
    workspace_bytes,
)
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.widths import LAYER_BITS, Widths, check_choice, choose_widths

_WEIGHT_NAMES = {4: "NF4", 8: "int8", 16: "16-bit", 32: "fp32"}
_NATIVE_THREADS = 16  # threads that buffers are planned for where nothing else is said
# one slot in 32 beyond the context, so that cached prefixes and the live sequence do not compete for the last ones
_SLACK_SHARE = 32


@dataclass(frozen=True)
class PlanLine:
    """One row of the plan. nbytes: bytes; note: what a person may want to know about it."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will hold, in bytes, and whether the budget covers it."""

    lines: tuple[PlanLine, ...]
    budget: int  # bytes
    context: int  # tokens
    slots: int  # rows of the KV pool
    longest_context: int  # tokens; 0 where not even an empty context fits
    widths: Widths
    cards: tuple[CardShare, ...] = ()  # what each holds, where layers are split over several

    @property
    def total(self) -> int:
        """Sum of all lines in bytes."""
        return sum(line.nbytes for line in self.lines)

    @property
    def fits(self) -> bool:
        """True where the total is within the budget, on each card within its own."""
        return self.excess == 0

    @property
    def excess(self) -> int:
        """Bytes that are missing, on all cards together."""
        if self.cards:
            return sum(card.excess for card in self.cards)
        return max(0, self.total - self.budget)

    def line(self, start: str) -> PlanLine:
        """The first line whose name begins with `start`. Raises KeyError where there is none."""
        for line in self.lines:
            if line.name.startswith(start):
                return line
        raise KeyError(start)


def plan_slots(context: int, tree: TreeShape | None) -> int:
    """Rows of the KV pool: the context, room for one tree and its root, and a few per cent of slack."""
    nodes = tree.nodes if tree is not None else 0
    return context + nodes + 1 + context // _SLACK_SHARE


def plan_memory(
    model: ModelConfig,
    head: HeadConfig | None,
    *,
    bits: int,
    context: int,
    tree: TreeShape | None,
    reserve: int,
    budget: int,
    device: str,
    native: bool = False,
    threads: int = _NATIVE_THREADS,
    head_bits: int | None = None,
    lm_head_bits: int | None = None,
    exact: bool = False,
    cards: Sequence[Card] = (),
) -> MemoryPlan:
    """Plan a run of `model` with `head` (None: plain decoding) from shapes alone.

    bits: 4, 8, 16 or 32. context: tokens. reserve, budget: bytes. device: "cpu", "cuda" or "cuda:N". native: whether
    the native kernels run it, with `threads` threads. head_bits, lm_head_bits: as `choose_widths` takes them. exact:
    exact mode, in which the host directs the rounds. cards: the cards that layers are split over; their free memory
    then replaces `budget`.

    Raises UsageError for a width or a context out of range. A plan over budget is returned with `fits` False.
    """
    check_choice("bits", bits, LAYER_BITS)
    if not SHORTEST_CONTEXT <= context <= model.max_position:
        raise UsageError(
            f"context is {context:,}, which is out of range for this model",
            f"use {SHORTEST_CONTEXT} to {model.max_position:,}",
        )
    asked = head_bits if head is not None else None
    widths = choose_widths(bits, device, native=native, head=asked, lm_head=lm_head_bits)
    graphs = device.startswith("cuda") and not exact and not cards
    run = _Run(model, head, widths, tree, reserve, device, threads if native else 0, graphs, tuple(cards))
    budget = sum(card.free for card in cards) if cards else budget
    slots, longest = plan_slots(context, tree), run.longest_context(budget)
    return MemoryPlan(run.lines(context), budget, context, slots, longest, widths, run.shares(context))


@dataclass(frozen=True)
class _Run:
    """Everything that a plan depends on, except the context."""

    model: ModelConfig
    head: HeadConfig | None
    widths: Widths
    tree: TreeShape | None
    reserve: int
    device: str
    threads: int  # of the native kernels, 0 where PyTorch's run
    graphs: bool  # whether rounds may stay on the device
    cards: tuple[Card, ...] = ()  # that layers are split over

    def lines(self, context: int) -> tuple[PlanLine, ...]:
        """The plan for `context` tokens."""
        model, head, widths, tree = self.model, self.head, self.widths, self.tree
        bits = widths.layers
        slots = plan_slots(context, tree)
        layers = native_bytes.layers_bytes(model, bits) if self.threads else block_bytes(model, bits)
        tables = native_bytes.embedding_bytes(model) if self.threads else embedding_bytes(model, widths)
        stored = _WEIGHT_NAMES[bits] if model.stored is None else f"{model.stored.name}, as stored"
        name = f"{bits}-bit blocks" if self.threads else stored
        others = max(len(self.cards) - 1, 0)
        rotary = rotary_bytes(model, context) * (1 + others)
        lines = [
            PlanLine(f"weights ({name})", layers + rotary, f"{model.num_layers} layers"),
            PlanLine("embedding, lm_head", tables, self._output_note()),
        ]
        if head is not None:
            held = head_bytes(head, widths.head, native=self.threads > 0) + rotary_bytes(head, context)
            note = f"{head.draft_vocab_size:,} draft tokens"
            lines.append(PlanLine(f"head ({self._head_kind()})", held, note))
        tail = f"context {context:,}"
        if tree is not None:
            tail += f" and a tree of {'at most ' if tree.adaptive else ''}{tree.nodes} nodes"
        lines.append(PlanLine(f"KV, {slots:,} slots", pool_bytes(model, head, widths, slots), tail))
        workspace = self._workspace(slots) + others * self._layer_workspace(slots)
        lines.append(PlanLine("workspace", workspace, f"chunks of {PREFILL_CHUNK} rows"))
        if self.graphs:
            held = graph_bytes(model, head, widths, tree, self.device)
            lines.append(PlanLine("CUDA graphs", held, "rounds on the device, greedy and sampled"))
        system = "desktop and driver" if self.device.startswith("cuda") else "the program and the desktop"
        if others:
            system += ", on each card"
        return (*lines, PlanLine("reserve", self.reserve * (1 + others), system))

    def shares(self, context: int) -> tuple[CardShare, ...]:
        """The same plan card by card, none where there is one device."""
        if not self.cards:
            return ()
        model, widths, slots = self.model, self.widths, plan_slots(context, self.tree)
        rotary = rotary_bytes(model, context)
        home = embedding_bytes(model, widths) + final_norm_bytes(model) + self._workspace(slots)
        if self.head is not None:
            home += head_bytes(self.head, widths.head) + rotary_bytes(self.head, context)
            home += head_pool_bytes(self.head, widths, slots)
        beside = self._layer_workspace(slots)
        fixed = [self.reserve + rotary + (beside if index else home) for index in range(len(self.cards))]
        rows = (slots + 1) * slot_bytes(model, widths.layers) // model.num_layers
        return split.shares(self.cards, fixed, [held + rows for held in layer_bytes(model, widths.layers)])

    def longest_context(self, budget: int) -> int:
        """Largest context whose total is within the budget: the total never shrinks as the context grows."""
        low, high = 0, self.model.max_position
        while low < high:
            middle = (low + high + 1) // 2
            if self.cards:
                fits = not any(card.excess for card in self.shares(middle))
            else:
                fits = sum(line.nbytes for line in self.lines(middle)) <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _head_kind(self) -> str:
        return f"{self.widths.head}-bit blocks" if self.threads else _WEIGHT_NAMES[self.widths.head]

    def _output_note(self) -> str:
        """The size of the vocabulary, and the width of lm_head where it is not the usual one."""
        tokens, width = f"{self.model.vocab_size:,} tokens", self.widths.lm_head
        if self.threads or width == choose_widths(self.widths.layers, self.device, native=False).lm_head:
            return tokens
        if width == 16:
            return f"{tokens}, lm_head at 16 bits"
        if self.model.tie_word_embeddings:
            return f"{tokens}, lm_head an int8 copy: more memory, less to read"
        return f"{tokens}, lm_head in int8"

    def _workspace(self, slots: int) -> int:
        if not self.threads:
            return workspace_bytes(self.model, self.head, self.widths, slots, self.tree, device=self.device)
        buffers = native_bytes.workspace_bytes(
            self.model,
            self.head,
            rows=PREFILL_CHUNK + 1,
            slots=slots,
            expanded=MAX_EXPANSIONS,
            threads=self.threads,
        )
        return buffers + logit_bytes(self.model, self.tree)

    def _layer_workspace(self, slots: int) -> int:
        """What a pass needs on a card that holds nothing but layers."""
        return workspace_bytes(self.model, None, self.widths, slots, None, device=self.device)
