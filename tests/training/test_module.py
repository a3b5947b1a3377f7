"""A head that is trained computes what a head that drafts computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import CPU, VOCAB, head_tensors, tiny_head, tiny_target

from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model.head import Head
from treeeagle_edge.training.module import Inputs, TrainableHead

TOKENS, STEPS = 14, 4


def _trainable(head: Head) -> TrainableHead:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head_tensors().items()}
    return TrainableHead(head.config, tensors, length=TOKENS + STEPS, dtype=torch.float32)


def _drafted(head: Head, features: torch.Tensor, tokens: torch.Tensor, anchor: int) -> list[torch.Tensor]:
    """States of the chain at `anchor` as the drafter makes them: true rows, then the head's own, one at a time."""
    count = anchor + 1
    slots = torch.arange(count)
    view = AttentionView(slots[:0], slots, torch.ones(count, count, dtype=torch.bool).tril())
    out = head.extend(features[:count], tokens[1 : count + 1], slots, slots, view, VOCAB)
    states, hidden = [_log_probs(out)], out.hidden
    for step in range(1, STEPS):
        at = anchor + 1 + step
        if at >= len(tokens):
            break
        slot = torch.tensor([count - 1 + step])
        view = AttentionView(slots, torch.arange(count, count + step), torch.ones(1, step, dtype=torch.bool))
        out = head.step(hidden, tokens[at : at + 1], slot, slot, view, VOCAB)
        states.append(_log_probs(out))
        hidden = out.hidden
    return states


def _log_probs(out) -> torch.Tensor:
    return out.log_probs[0].gather(0, out.ids[0].argsort())


@pytest.fixture(
    params=[{}, {"norm_before_residual": True}, {"norm_output": True}], ids=["plain", "residual", "output"]
)
def head(request: pytest.FixtureRequest) -> Head:
    head = tiny_head(tiny_target(), slots=64)
    head.config = replace(head.config, **request.param)
    return head


def test_every_step_of_every_chain_is_what_drafting_computes(head: Head) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (TOKENS,), generator=generator)
    features = torch.randn(TOKENS, head.config.num_taps * head.config.target_hidden_size, generator=generator)
    trainable = _trainable(head)
    anchors = torch.tensor([0, 3, 7, 10, TOKENS - 2])
    inputs = Inputs(features[None], head._embed(tokens)[None], anchors[None])
    unrolled = [(state @ trainable.lm_head.T).log_softmax(-1)[0] for state in trainable.unroll(inputs, STEPS)]
    compared = 0
    for row, anchor in enumerate(anchors.tolist()):
        for step, expected in enumerate(_drafted(head, features, tokens, anchor)):
            torch.testing.assert_close(unrolled[step][row], expected, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared == 3 * STEPS + 3 + 1  # the last two chains reach the end of the dialogue


def test_a_row_does_not_depend_on_later_tokens_or_on_its_neighbours(head: Head) -> None:
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(
        2, TOKENS, head.config.num_taps * head.config.target_hidden_size, generator=generator
    )
    embeddings = torch.randn(2, TOKENS, head.config.hidden_size, generator=generator)
    trainable, anchors = _trainable(head), torch.tensor([[2, 5], [1, 6]])
    whole = [state.detach() for state in trainable.unroll(Inputs(features, embeddings, anchors), 2)]
    later = replace(Inputs(features.clone(), embeddings.clone(), anchors))
    later.features[0, 6:] += 1.0  # after both anchors of the first dialogue
    later.embeddings[0, 8:] += 1.0
    changed = list(trainable.unroll(later, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, changed, strict=True))
    alone = list(trainable.unroll(Inputs(features[1:], embeddings[1:], anchors[1:]), 2))
    for a, b in zip(whole, alone, strict=True):
        torch.testing.assert_close(a[1], b[0], rtol=1e-5, atol=1e-5)


def test_weights_come_back_by_the_names_they_had(head: Head) -> None:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head_tensors().items()}
    again = _trainable(head).tensors()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert again["fc.weight"].device == CPU
