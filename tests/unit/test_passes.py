"""Passes over a live sequence: what is kept between them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU, tiny_head, tiny_target

from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.kv.sequence import LiveSequence

SLOTS = 64


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_prompt_leaves_one_feature_in_memory_of_its_own(tokens: int) -> None:
    """A view would keep the features of a whole chunk, and native targets overwrite them in their next pass."""
    target = tiny_target()
    passes = Passes(target, tiny_head(target, slots=SLOTS), slots=SLOTS, fixed_rows=None)
    prompt = [*range(tokens)]
    sequence = LiveSequence(KVPool(SLOTS), prompt, with_head=True, reuse=False, capacity=SLOTS, device=CPU)
    output = passes.prefill(sequence, prompt)
    expected = output.features[-1].clone()
    with torch.inference_mode():
        output.features.fill_(float("nan"))
    [feature] = sequence.pending
    assert feature.shape == (1, len(expected)) and feature[0].equal(expected)
    assert feature.untyped_storage().nbytes() == feature.nbytes
