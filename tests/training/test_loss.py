"""The fused loss is the plain one, and so are its gradients."""

from __future__ import annotations

import torch

from treeeagle_edge.training import loss as module
from treeeagle_edge.training.loss import soft_cross_entropy


def test_equals_the_plain_cross_entropy_over_several_blocks(monkeypatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 5)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(13, 8, generator=generator, requires_grad=True)
    lm_head = torch.randn(20, 8, generator=generator, requires_grad=True)
    wanted = torch.randn(6, 20, generator=generator).softmax(-1)
    at = torch.randint(6, (13,), generator=generator)
    weight = torch.rand(13, generator=generator)
    plain = -(weight * (wanted[at] * (states @ lm_head.T).log_softmax(-1)).sum(-1)).sum()
    expected = torch.autograd.grad(3.0 * plain, (states, lm_head))
    fused = soft_cross_entropy(states, lm_head, wanted, at, weight)
    torch.testing.assert_close(fused, plain)
    got = torch.autograd.grad(3.0 * fused, (states, lm_head))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
