"""Cross-entropy between the target's distribution and the head's, computed together with the product by `lm_head`.

The logits are by far the largest tensor of training. Here only one block of rows exists at a time: the gradient of a
softmax cross-entropy is known together with its value, so the forward pass computes the gradients of its inputs too,
and keeps nothing else for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 512  # rows whose logits exist at a time


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, lm_head: Tensor, wanted: Tensor, at: Tensor, weight: Tensor
    ) -> Tensor:
        matrix = lm_head.to(states.dtype)
        grad_states, grad_head = torch.empty_like(states), torch.zeros_like(lm_head)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for begin in range(0, len(states), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            share, target = weight[block, None], wanted[at[block]].float()
            logits = (states[block] @ matrix.T).float()
            log_probs = logits.log_softmax(dim=-1)
            total -= ((target * log_probs).sum(-1, keepdim=True) * share).sum()
            grad = log_probs.exp_().sub_(target).mul_(share).to(states.dtype)
            grad_states[block] = grad @ matrix
            grad_head += (grad.T @ states[block]).float()
        ctx.save_for_backward(grad_states, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_head = ctx.saved_tensors
        (scale,) = outputs
        return grad_states * scale.to(grad_states.dtype), grad_head * scale, None, None, None


def soft_cross_entropy(states: Tensor, lm_head: Tensor, wanted: Tensor, at: Tensor, weight: Tensor) -> Tensor:
    """Scalar float32: the sum over rows of weight * H(wanted[at], softmax(states . lm_head^T)).

    states: [N, H]; lm_head: [Vd, H]; wanted: [P, Vd], rows sum to 1; at: [N] int64 rows of `wanted`; weight: [N]
    float32.
    """
    return _SoftCrossEntropy.apply(states, lm_head, wanted, at, weight)
