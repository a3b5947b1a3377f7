"""What rounds on the device hold beside everything else, and when a plan has a line for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_cases import LLAMA

from treeeagle_edge.drafting.round_shapes import rounds_within
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.planning import graph_bytes
from treeeagle_edge.planning.card_shares import Card
from treeeagle_edge.planning.memory_plan import MemoryPlan, plan_memory
from treeeagle_edge.planning.torch_bytes import unpacked_bytes
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.units import GB
from treeeagle_edge.widths import choose_widths

TREE = TreeShape(4, 4, 24)
MB = 10**6


@pytest.fixture(autouse=True)
def _with_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "problem", lambda: None)


def plan(tree: TreeShape | None = TREE, *, bits: int = 4, device: str = "cuda:0", **other: Any) -> MemoryPlan:
    head = LLAMA.head if tree is not None else None
    return plan_memory(
        LLAMA.config, head, bits=bits, context=8192, tree=tree, reserve=0, budget=24 * GB, device=device, **other
    )  # fmt: skip


def has_line(made: MemoryPlan) -> bool:
    return any(line.name == "CUDA graphs" for line in made.lines)


def test_only_rounds_that_may_stay_on_a_card_have_a_line() -> None:
    """Not on a CPU, not in exact mode, not over several cards: there the host leads."""
    cards = (Card("cuda:0", 12 * GB), Card("cuda:1", 12 * GB))
    assert has_line(plan()) and has_line(plan(None)) and has_line(plan(bits=16))
    assert not has_line(plan(exact=True)) and not has_line(plan(cards=cards))
    assert not has_line(plan(device="cpu")) and not has_line(plan(device="cpu", native=True))
    assert plan().longest_context < plan(exact=True).longest_context


def test_it_grows_with_the_tree_and_with_the_shapes_that_are_captured() -> None:
    held = [
        plan(tree).line("CUDA graphs").nbytes
        for tree in (None, TREE, replace(TREE, adaptive=True), TreeShape(4, 4, 200))
    ]
    assert held == sorted(held) and held[0] > 50 * MB and held[-1] < GB
    logits = 4 * LLAMA.config.vocab_size
    assert held[1] > 25 * logits and held[3] > 201 * logits  # at least the logits of every row


def test_a_pass_that_unpacks_its_weights_has_room_for_the_largest() -> None:
    """A chunk of a prompt, and trees beyond the rows of our own 4-bit product; other widths unpack nothing."""
    gate_up = 2 * (2 * 14_336) * 4096
    widths = choose_widths(4, "cuda", native=False)
    assert unpacked_bytes(LLAMA.config, LLAMA.head, widths) == gate_up
    assert unpacked_bytes(LLAMA.config, LLAMA.head, replace(widths, layers=8)) == 0
    assert unpacked_bytes(LLAMA.config, LLAMA.head, replace(widths, layers=16, head=4)) == gate_up
    assert plan(bits=4).line("workspace").nbytes > gate_up
    room = [plan(TreeShape(4, 4, nodes)).line("CUDA graphs").nbytes for nodes in (63, 64)]
    assert room[1] - room[0] > gate_up - 2 * 192 * 128 * 128 * 4


def test_a_branch_adds_graphs_and_levels_but_no_rows() -> None:
    """Nor slots: a shape with a branch has at most as many nodes as the largest tree."""
    adaptive = TreeShape(4, 4, 32, adaptive=True)
    without = replace(adaptive, lookup=False)
    more = plan(adaptive).line("CUDA graphs").nbytes - plan(without).line("CUDA graphs").nbytes
    shapes, levels = len(rounds_within(adaptive)) - len(rounds_within(without)), 15 - 4
    assert shapes == 2
    assert more == 2 * shapes * 12 * MB + levels * 3 * 8 * LLAMA.config.vocab_size
    for name in ("KV", "workspace", "weights"):
        assert plan(adaptive).line(name) == plan(without).line(name)
    with_room_for_none = [plan(TreeShape(8, 1, 1, adaptive=True, lookup=look)) for look in (True, False)]
    graphs = [made.line("CUDA graphs").nbytes for made in with_room_for_none]
    assert graphs[0] - graphs[1] == 2 * 12 * MB  # one for a branch of a single token


def test_it_counts_what_the_code_allocates() -> None:
    """Numbers repeated there, so that planning imports no torch, are those of the code that allocates."""
    from treeeagle_edge.kernels.triton import attention, operands

    assert operands.MAX_ROWS == graph_bytes.PACKED_ROWS
    assert attention.MAX_TILE == graph_bytes._TILE_ROWS
