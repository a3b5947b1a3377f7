"""RMSNorm and SiLU gating in Triton against the plain PyTorch that defines them."""

from __future__ import annotations

import pytest
import torch
from triton_cases import assert_near, needs_triton, normal

from treeeagle_edge.kernels.triton import reference

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton import rowwise

pytestmark = needs_triton
SHAPES = [(1, 576), (5, 100), (64, 64), (3, 4096)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_norm_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    """The residual stream in fp32, as the target keeps it; weight and result in `dtype`."""
    x, weight = normal(rows, width, seed=1), normal(width, seed=2, dtype=dtype)
    ours = rowwise.rms_norm(x, weight, 1e-5, dtype)
    assert ours.dtype == dtype
    assert_near(ours, reference.rms_norm(x, weight, 1e-5, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_norm_after_the_residual_sum_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    stream, branch = normal(rows, width, seed=1), normal(rows, width, seed=3, dtype=dtype)
    weight, expected = normal(width, seed=2, dtype=dtype), stream.clone()
    ours = rowwise.add_rms_norm(stream, branch, weight, 1e-5, dtype, scale=0.25)
    assert_near(ours, reference.add_rms_norm(expected, branch, weight, 1e-5, dtype, scale=0.25))
    assert_near(stream, expected)


def test_a_16_bit_stream_is_normalised_as_it_was_stored() -> None:
    stream, branch = (normal(4, 100, seed=seed, dtype=torch.float16) for seed in (1, 3))
    weight, expected = normal(100, seed=2, dtype=torch.float16), stream.clone()
    ours = rowwise.add_rms_norm(stream, branch, weight, 1e-5, torch.float16)
    assert_near(ours, reference.add_rms_norm(expected, branch, weight, 1e-5, torch.float16))
    assert torch.equal(stream, expected)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, weight = normal(3, 64, seed=1), normal(64, seed=2)
    x[1, 5] = float("nan")
    ours = rowwise.rms_norm(x, weight, 1e-5, torch.float32)
    assert ours[1].isnan().all() and ours[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 100), (64, 32)])
def test_gate_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    wide = normal(rows, 2 * width, seed=1, dtype=dtype)
    assert_near(rowwise.silu_gate(wide), reference.silu_gate(wide), 2)


def test_gate_of_large_values_is_finite() -> None:
    """exp of -88 and beyond: SiLU goes to 0 on one side and to its argument on the other."""
    wide = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], device=normal(1, seed=0).device)
    assert rowwise.silu_gate(wide).tolist() == [[0.0, 1e4]]
