"""The flags that change a head's arithmetic: obeyed by both implementations, as a plain one says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_toys import needs_native
from plain_head import PlainHead, random_head
from tiny_models import CONFIG, CPU, RandomCheckpoint
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model.head import Head, HeadOutput
from treeeagle_edge.model.protocols import DraftHead

FLAGS = [(False, False), (True, False), (False, True), (True, True)]
WIDE = replace(CONFIG, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32)
ROWS, SLOTS = 7, 32


def flagged(before_residual: bool, norm_output: bool, target=CONFIG) -> HeadCheckpoint:
    return random_head(target, norm_before_residual=before_residual, norm_output=norm_output)


def inputs(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(ROWS, 3 * width, generator=generator)
    return features, torch.randint(0, CONFIG.vocab_size, (ROWS + 2,), generator=generator)


def draft(head: DraftHead, features: Tensor, tokens: Tensor) -> tuple[HeadOutput, HeadOutput, HeadOutput]:
    """A prompt of ROWS rows, then a chain of two: from its last row, and from the row drafted there."""
    slots = torch.arange(ROWS + 2)
    prompt, top = slots[:ROWS], head.config.draft_vocab_size
    view = AttentionView(slots[:0], prompt, torch.ones(ROWS, ROWS, dtype=torch.bool).tril())
    outputs = [head.extend(features, tokens[:ROWS], prompt, prompt, view, top)]
    for place in (ROWS, ROWS + 1):
        own = slots[place : place + 1]
        view = AttentionView(slots[:place], own, torch.ones(1, 1, dtype=torch.bool))
        outputs.append(head.step(outputs[-1].hidden, tokens[place : place + 1], own, own, view, top))
    return outputs[0], outputs[1], outputs[2]


def by_id(output: HeadOutput) -> Tensor:
    """Log-probabilities in the order of the ids, whatever the ranking."""
    return output.log_probs[0][output.ids[0].argsort()]


def torch_head(checkpoint: HeadCheckpoint, embedding: Tensor) -> Head:
    return Head(
        checkpoint, lambda ids: embedding[ids], slots=SLOTS, context=64, dtype=torch.float32, device=CPU
    )


@pytest.mark.parametrize(("before_residual", "norm_output"), FLAGS)
def test_a_head_computes_what_its_flags_say(before_residual: bool, norm_output: bool) -> None:
    checkpoint = flagged(before_residual, norm_output)
    embedding = RandomCheckpoint().tensor("model.embed_tokens.weight")
    features, tokens = inputs(CONFIG.hidden_size)
    plain = PlainHead(checkpoint, embedding)
    states = [
        plain.feature_row(feature, int(token)) for feature, token in zip(features, tokens, strict=False)
    ]
    expected = [states[-1]]
    for token in tokens[ROWS:].tolist():
        expected.append(plain.row(expected[-1][0], token))
    for ours, (state, log_probs) in zip(
        draft(torch_head(checkpoint, embedding), features, tokens), expected, strict=True
    ):
        torch.testing.assert_close(ours.hidden[0], state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(by_id(ours), log_probs, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize(("before_residual", "norm_output"), FLAGS)
def test_native_heads_obey_them_too(before_residual: bool, norm_output: bool) -> None:
    """Within what 8 bits round away; the head without the flags is far from it."""
    from treeeagle_edge.kernels.native.team import Team
    from treeeagle_edge.model.native_head import NativeHead
    from treeeagle_edge.model.native_target import load_native_target

    checkpoint = flagged(before_residual, norm_output, WIDE)
    target = load_native_target(RandomCheckpoint(WIDE), Team(1), bits=8, context=64, max_rows=32)
    native = NativeHead(
        checkpoint, target, bits=8, slots=SLOTS, context=64, max_rows=32, max_scored=8, max_expanded=16
    )
    embedding = target.embed(torch.arange(WIDE.vocab_size)).clone()
    features, tokens = inputs(WIDE.hidden_size)
    outputs = [
        draft(head, features, tokens)
        for head in (
            native,
            torch_head(checkpoint, embedding),
            torch_head(flagged(False, False, WIDE), embedding),
        )
    ]
    for step, (ours, same, plain) in enumerate(zip(*outputs, strict=True)):
        scale = same.hidden.norm()
        assert (ours.hidden - same.hidden).norm() < 0.15 * scale
        torch.testing.assert_close(by_id(ours), by_id(same), rtol=0, atol=0.4)
        if before_residual or norm_output:
            assert (plain.hidden - same.hidden).norm() > 0.3 * scale
        if before_residual or (norm_output and step > 0):
            assert (by_id(plain) - by_id(same)).abs().max() > 2.0
