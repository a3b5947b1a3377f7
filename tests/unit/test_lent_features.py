"""Features wait where the target's pass left them: passes in between, of any answer, must not spoil them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from native_toys import needs_native
from plain_head import random_head
from tiny_models import CONFIG, RandomCheckpoint

from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.drafting.growth import FixedGrowth
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.kernels.native.team import Team
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.model.native_head import NativeHead
from treeeagle_edge.model.native_target import load_native_target
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

WIDE = replace(CONFIG, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32)
CONTEXT, SLOTS = 128, 320
SHAPE = TreeShape(4, 3, 8, adaptive=True)


def native_engine() -> Engine:
    target = load_native_target(RandomCheckpoint(WIDE), Team(1), bits=8, context=CONTEXT, max_rows=257)
    head = NativeHead(
        random_head(WIDE), target, bits=8, slots=SLOTS + MAX_EXPANSIONS, context=CONTEXT, max_rows=257, max_scored=8,
        max_expanded=MAX_EXPANSIONS,
    )  # fmt: skip
    costs = CostTable((1, 32), (0.010, 0.011), 0.0005, 0.0005)
    return Engine(target, head, context=CONTEXT, slots=SLOTS, tree=SHAPE, costs=costs)


@needs_native
def test_head_rows_are_true_after_plain_rounds_and_answers_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They equal a fresh prefill's, bit for bit."""
    engine, draw = native_engine(), random.Random(2)
    assert engine._controller is not None
    monkeypatch.setattr(
        engine._controller, "growth",
        lambda bounds, stop_ids, match: FixedGrowth(SHAPE) if draw.random() < 0.5 else None,
    )  # fmt: skip
    prompts = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]
    answers = [engine.generate(prompt, SamplingParams(max_tokens=50)) for prompt in prompts]
    kinds = set()
    while answers:
        answer = draw.choice(answers)
        settled = next(answer, None)
        if settled is None:
            answers.remove(answer)
        else:
            kinds.add(settled.kind)
    assert kinds == {"prefill", "plain", "tree"}
    assert len(engine._pool.cached) == len(prompts)
    for entry in engine._pool.cached:
        assert entry.head_tokens == len(entry.tokens) > 50
        fresh = native_engine()
        sequence = fresh._open(list(entry.tokens), with_head=True, reuse=False)
        fresh._passes.prefill(sequence, list(entry.tokens))
        ours, theirs = list(entry.slots)[1:], sequence.slots[1:]
        assert engine.head is not None
        assert fresh.head is not None
        assert torch.equal(engine.head.store.keys[:, ours], fresh.head.store.keys[:, theirs])
        assert torch.equal(engine.head.store.values[:, ours], fresh.head.store.values[:, theirs])
