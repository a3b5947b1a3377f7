"""The optimiser: Muon for the matrices of the layer and `fc`, AdamW for `lm_head` and the norms.

Muon (Jordan 2024; Liu et al., arXiv 2502.16982) makes the update of a matrix orthogonal. It is scaled here to the size
of AdamW's updates, so that both take the same learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from treeeagle_edge.training.module import TrainableHead

WARM_UP = 0.02  # share of the steps in which the rate rises
LAST_RATE = 0.02  # learning rate of the last step, as a share of the highest
MOST_GRADIENT = 1.0  # gradients with a larger norm are scaled down to it


class Optimiser:
    """Both optimisers under one schedule: the rate rises for a short while, then falls along a cosine."""

    def __init__(self, head: TrainableHead, learning_rate: float) -> None:
        matrices = [head.fc, head.q, head.k, head.v, head.o, head.gate, head.up, head.down]
        inner = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in head.parameters() if id(parameter) not in inner]
        self._parameters: list[nn.Parameter] = [*matrices, *others]
        self._rate = learning_rate
        self._both: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, step: int, steps: int) -> None:
        """Update the weights, then clear the gradients. The learning rate is that of step `step` of `steps`."""
        nn.utils.clip_grad_norm_(self._parameters, MOST_GRADIENT)
        rate = self._rate * scheduled(step, steps)
        for optimiser in self._both:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def gradients(self) -> Iterable[Tensor]:
        """The gradient of every weight, in the same order in every process."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint stores of both optimisers."""
        return [optimiser.state_dict() for optimiser in self._both]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for optimiser, state in zip(self._both, states, strict=True):
            optimiser.load_state_dict(state)


def scheduled(step: int, steps: int) -> float:
    """Learning rate at step `step` of `steps`, as a share of the highest."""
    rise = max(1, round(steps * WARM_UP))
    if step < rise:
        return (step + 1) / rise
    along = (step - rise) / max(1, steps - rise)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))
