"""Answers of tiny engines, and what every answer must leave in their caches."""

from __future__ import annotations

import torch
from tiny_models import tiny_engine

from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.rounds import Round
from treeeagle_edge.sampling_params import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def ids_of(rounds: list[Round]) -> list[int]:
    return [token for item in rounds for token in item.ids]


def answer(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT, **options) -> list[int]:
    return ids_of(list(engine.generate(prompt, params, **options)))


def assert_cache_equals_prefill(engine: Engine) -> None:
    """Every cached prefix holds the KV, head rows included, that a fresh prefill of its tokens gives."""
    for entry in engine._pool.cached:
        fresh = tiny_engine(context=engine.context)
        sequence = fresh._open(list(entry.tokens), with_head=True, reuse=False)
        fresh._passes.prefill(sequence, list(entry.tokens))
        ours, theirs = list(entry.slots), sequence.slots
        for mine, other in ((engine._passes.store, fresh._passes.store),):
            torch.testing.assert_close(mine.keys[:, ours], other.keys[:, theirs], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(mine.values[:, ours], other.values[:, theirs], atol=1e-4, rtol=1e-4)
        mine, other = engine.head.store, fresh.head.store  # type: ignore[union-attr]
        rows = slice(1, entry.head_tokens)  # the first token has no head row
        torch.testing.assert_close(
            mine.keys[:, ours[rows]], other.keys[:, theirs[rows]], atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            mine.values[:, ours[rows]], other.values[:, theirs[rows]], atol=1e-4, rtol=1e-4
        )
