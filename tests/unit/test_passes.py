"""Passes over a live sequence: what is kept between them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU, VOCAB, tiny_engine, tiny_head, tiny_target

from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.limits import PREFILL_CHUNK
from treeeagle_edge.sampling_params import SamplingParams

SLOTS = 64


def test_reading_is_told_in_steps_without_what_the_cache_holds() -> None:
    engine = tiny_engine(context=700)
    told: list[tuple[int, int]] = []
    prompt = [i % VOCAB for i in range(600)]

    def read(ids: list[int]) -> list[tuple[int, int]]:
        told.clear()
        params = SamplingParams(max_tokens=1)
        list(engine.generate(ids, params, reading=lambda read, of: told.append((read, of))))
        return told

    assert read(prompt) == [(0, 600), (PREFILL_CHUNK, 600), (2 * PREFILL_CHUNK, 600), (600, 600)]
    assert read([*prompt, 1, 2, 3]) == [(0, 4), (4, 4)]  # the last token of a cached prefix is read once more


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
