"""Engines whose rounds stay on the device, which here is the CPU, and heads that are right as often as a test wants."""

from __future__ import annotations

import torch
from engine_answers import PROMPT
from tiny_models import CONFIG, VOCAB, tiny_head, tiny_target

from treeeagle_edge.device.cuda_graphs import Capture
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

SHAPE = TreeShape(depth=4, branching=3, nodes=8)
KINDS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampling": SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=7),
    "penalties": SamplingParams(
        max_tokens=40, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "everything": SamplingParams(
        max_tokens=40,
        temperature=1.2,
        top_k=12,
        min_p=0.02,
        seed=1,
        repetition_penalty=1.1,
        banned_ids=frozenset({4, 5}),
    ),
}


def make(
    *,
    shape: TreeShape = SHAPE,
    context: int = 128,
    slack: int = 32,
    on_device: bool = True,
    graphs: bool | Capture | None = None,
    config: ModelConfig = CONFIG,
) -> Engine:
    target = tiny_target(context=context, config=config)
    slots = context + shape.nodes + 1 + slack
    head = tiny_head(target, slots=slots)
    return Engine(target, head, context=context, slots=slots, tree=shape, on_device=on_device, graphs=graphs)


def with_oracle(engine: Engine, text: list[int], right: int) -> None:
    """Let the head score the next `right` tokens of `text`, which goes on after PROMPT, above everything else."""
    whole = torch.tensor(PROMPT + text + [0] * 64)
    head = engine.head
    assert head is not None
    extend, step = type(head).extend, type(head).step

    def helped(output: HeadOutput, positions: torch.Tensor, level: torch.Tensor) -> HeadOutput:
        true = whole[positions + 2][:, None]  # a row of position t holds token t + 1 and scores token t + 2
        wanted = (level < right)[:, None]
        ids = torch.where(wanted, torch.cat((true, output.ids[:, 1:]), dim=1), output.ids)
        ids[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :1], VOCAB - 1)
        best = wanted & (torch.arange(ids.shape[1]) == 0)
        log_probs = (output.log_probs - 1).masked_fill(best, -0.01)
        hidden = output.hidden.clone()
        hidden[:, 0] = level + 1
        return HeadOutput(hidden, log_probs, ids)

    def extend_helped(features, tokens, positions, slots, view, top):  # type: ignore[no-untyped-def]
        output = extend(head, features, tokens, positions, slots, view, top)
        return helped(output, positions[-1:], torch.zeros(1))

    def step_helped(hidden, tokens, positions, slots, view, top):  # type: ignore[no-untyped-def]
        output = step(head, hidden, tokens, positions, slots, view, top)
        on_text = tokens == whole[positions + 1]
        return helped(output, positions, hidden[:, 0].masked_fill(~on_text, 99.0))

    head.extend, head.step = extend_helped, step_helped  # type: ignore[method-assign,assignment]
