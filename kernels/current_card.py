"""Which card is the current one: Triton launches there, wherever the tensors lie."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_card(device: torch.device) -> AbstractContextManager[object]:
    """Makes a card the current one within the block; does nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def use_card(device: torch.device) -> None:
    """Make a card the current one from now on, and its products of fp32 those of fp32.

    Images with PyTorch for CUDA set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which would give them ten bits of mantissa: to
    scores of attention, and to what kernels are compared with.
    """
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")
