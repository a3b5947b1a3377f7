"""The demo model on public prompts: speculation gives the text of plain decoding, token for token, at 32 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.linear import DenseLinear
from treeeagle_edge.runtime import Runtime, load_runtime
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings

PER_FILE = (("mt_bench", 14), ("humaneval", 13), ("alpaca", 13))  # 40 prompts


@pytest.fixture(scope="module")
def runtime(demo_gguf: Path) -> Runtime:
    return load_runtime(
        RunSettings(
            model="smollm2-135m",
            bits=32,
            device="cpu",
            context=2048,
            depth=4,
            branching=3,
            nodes=7,
            threads=2,
        )
    )


@pytest.fixture(scope="module")
def prompts(runtime: Runtime, shared_data: Path) -> list[list[int]]:
    found = []
    for name, count in PER_FILE:
        lines = (shared_data / "questions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        for line in lines:
            messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            found.append(runtime.tokenizer.encode(runtime.tokenizer.render(messages)))
    assert len(found) == 40
    return found


def text(engine: Engine, prompt: list[int], params: SamplingParams, speculate: bool) -> list[int]:
    """Both arms reuse the same prompt's KV: decoding is what is compared."""
    return [token for item in engine.generate(prompt, params, speculate=speculate) for token in item.ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "make"),
    [
        (14, lambda seed: SamplingParams(max_tokens=14)),
        (8, lambda seed: SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=seed)),
        (
            8,
            lambda seed: SamplingParams(
                max_tokens=8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
            ),
        ),
    ],
    ids=["greedy", "sampling", "penalties"],
)
def test_speculation_equals_plain_decoding(
    runtime: Runtime, prompts: list[list[int]], tokens: int, make: Callable[[int], SamplingParams]
) -> None:
    """Expectations rows 10 and 28: 40 public prompts, greedy, seeded sampling, and all three penalties."""
    for seed, prompt in enumerate(prompts):
        params = make(seed)
        tree = text(runtime.engine, prompt, params, speculate=True)
        assert tree == text(runtime.engine, prompt, params, speculate=False)
        assert 0 < len(tree) <= tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_p": 0.95, "seed": 3},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ],
    ids=["greedy", "sampling", "penalties"],
)
def test_rounds_on_the_device_give_the_text_of_the_host(
    runtime: Runtime, prompts: list[list[int]], options: dict[str, float]
) -> None:
    """What a card would run, in the vocabulary of a real model: plain decoding led by the host says the same."""
    engine = runtime.engine
    device = Engine(
        engine.target,
        engine.head,
        context=runtime.context,
        slots=runtime.plan.slots,
        tree=runtime.tree,
        on_device=True,
    )
    params = SamplingParams(max_tokens=12, **options)  # type: ignore[arg-type]
    accepted = 0
    for prompt in prompts[::8]:
        settled = list(device.generate(prompt, params))
        accepted += sum(item.accepted for item in settled)
        tree = [token for item in settled for token in item.ids]
        assert tree == text(engine, prompt, params, speculate=False)
    assert accepted > 5
    engine.reset()  # both write to the rows of one head


@pytest.mark.slow
def test_a_random_head_gives_the_same_text(
    runtime: Runtime, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expectations row 4: garbage from the head costs time, never text."""
    head = runtime.engine.head
    assert head is not None
    generator = torch.Generator().manual_seed(0)
    assert isinstance(head, Head)
    assert isinstance(head._lm_head, DenseLinear)
    weight = torch.randn(head._lm_head.weight.shape, generator=generator)
    monkeypatch.setattr(head._lm_head, "weight", weight)
    runtime.engine.reset()
    params = SamplingParams(max_tokens=5)
    rounds = drafted = 0
    for prompt in prompts:
        settled = list(runtime.engine.generate(prompt, params))
        rounds += len(settled) - 1
        drafted += sum(item.accepted for item in settled)
        tree = [token for item in settled for token in item.ids]
        assert tree == text(runtime.engine, prompt, params, speculate=False)
    assert drafted < rounds / 4  # the head was random indeed
    runtime.engine.reset()
