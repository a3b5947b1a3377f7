"""What the tests of the Triton kernels share: where they can run, and the inputs they are given."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from treeeagle_edge.kernels.triton.availability import interpreting, problem
from treeeagle_edge.kernels.view import AttentionView

REASON = "no CUDA device; test_triton_interpreted.py runs these on the CPU, in a process of their own"
needs_triton = pytest.mark.skipif(problem() is not None, reason=REASON)


def interpreter_problem() -> str | None:
    """Why Triton's interpreter cannot run here; None where it can. Compiled kernels do not meet this.

    Triton 3.6 takes an array of one element for the bound of a loop, which NumPy 2.4 no longer converts to a number;
    Triton 3.7 does not.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of Triton 3.6 needs NumPy below 2.4; Triton 3.7 takes any"
    return None


if interpreting() and (_reason := interpreter_problem()) is not None:
    pytest.skip(_reason, allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter cuts bf16 off where hardware rounds, and sums differ in their order: two roundings of the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(ours: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Equal up to rounding in the dtype of `ours`, of values around 1; NaN where `expected` is NaN."""
    limit = TOLERANCE[ours.dtype] * factor
    torch.testing.assert_close(
        ours.double(), expected.double(), rtol=max(limit, 1e-5), atol=limit, equal_nan=True
    )


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def random_tree(rows: int, seed: int) -> Tensor:
    """[rows, rows] bool: each row sees itself and its ancestors in a random tree."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        visible[row] |= visible[int(torch.randint(0, row, (1,), generator=generator))]
    return visible


def tree_view(prefix: int, rows: int, slots: int, *, seed: int = 0) -> AttentionView:
    """A prefix and a random tree after it, in scattered slots of a pool of `slots`."""
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    taken = order[: prefix + rows]
    return AttentionView(taken[:prefix], taken[prefix:], random_tree(rows, seed).to(DEVICE))
