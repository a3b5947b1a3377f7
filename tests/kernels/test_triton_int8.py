"""What surrounds the int8 product's integers, in Triton, against the plain PyTorch that defines it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, TOLERANCE, needs_triton, normal

from treeeagle_edge.kernels import reference_int8
from treeeagle_edge.model.int8_rows import quantise_rows
from treeeagle_edge.model.linear import CudaInt8Linear, bitsandbytes_module

pytest.importorskip("triton")
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton import int8_rows, launch

pytestmark = needs_triton
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 64), (5, 100), (33, 576), (3, 8200)]  # narrower than a block, and three of them


@pytest.fixture(scope="module", autouse=True)
def _integers() -> None:
    bitsandbytes_module()  # registers their product


def weight(out: int, size: int) -> tuple[Tensor, Tensor]:
    return quantise_rows(normal(out, size, seed=7) / size**0.5, DEVICE)


def distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_two_codes_stand_for_each_number(rows: int, width: int, dtype: torch.dtype) -> None:
    """Within half a step, as the reference's do, whose halves are rounded the other way."""
    x = normal(rows, width, seed=1, dtype=dtype)
    x[0, 3] = 1000.0
    codes, steps = (
        torch.full((2 * rows, width), 99, dtype=torch.int8, device=DEVICE),
        x.new_zeros(rows).float(),
    )
    int8_rows.split_launch(x, codes, steps).run()
    torch.testing.assert_close(steps[:, None], reference_int8.split_rows(x)[1], rtol=1e-6, atol=0)
    back = (128.0 * codes[:rows].float() + codes[rows:].float()) * steps[:, None]
    assert ((back - x.float()).abs() <= 0.501 * steps[:, None]).all()
    assert (codes[:rows].abs().amax(dim=1) == 127).all() and int(codes[rows:].abs().amax()) <= 64


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_product_equals_the_reference(rows: int, width: int, dtype: torch.dtype, biased: bool) -> None:
    x, bias = normal(rows, width, seed=1, dtype=dtype), normal(40, seed=2, dtype=dtype) if biased else None
    codes, absmax = weight(40, width)
    ours = int8_rows.int8_product(x, codes, absmax, bias)
    assert ours.dtype == dtype and ours.shape == (rows, 40)
    assert distance(ours, reference_int8.int8_product(x, codes, absmax, bias)) < max(TOLERANCE[dtype], 1e-4)


def test_more_channels_than_a_block_and_numbers_beyond_fp16() -> None:
    codes, absmax = weight(2100, 64)
    x = normal(2, 64, seed=1, dtype=torch.bfloat16)
    x[1, 5] = 1e7
    ours = int8_rows.int8_product(x, codes, absmax)
    assert torch.isfinite(ours).all() and float(ours.abs().max()) > torch.finfo(torch.float16).max
    assert distance(ours, reference_int8.int8_product(x, codes, absmax)) < TOLERANCE[torch.bfloat16]


def test_a_row_has_the_same_bits_alone_and_beside_one_that_is_not_finite() -> None:
    codes, absmax = weight(24, 100)
    x = normal(4, 100, seed=1, dtype=torch.bfloat16)
    x[1, 99], x[2, 0] = float("nan"), float("-inf")
    together = int8_rows.int8_product(x, codes, absmax)
    assert not torch.isfinite(together[1:3]).any()
    for row in (0, 3):
        assert torch.equal(int8_rows.int8_product(x[row : row + 1], codes, absmax)[0], together[row])
    assert not int8_rows.int8_product(torch.zeros_like(x), codes, absmax).any()


def test_a_linear_of_8_bits_is_three_launches() -> None:
    """And one of them is the product of integers."""
    linear = CudaInt8Linear(normal(24, 100, seed=7), normal(24, seed=2), DEVICE, torch.bfloat16)
    x = normal(4, 100, seed=1, dtype=torch.bfloat16)
    expected = linear(x)
    with dispatch.use_backend("triton"), launch.counted() as counter:
        ours = linear(x)
    assert counter == {"split_kernel": 1, "scale_kernel": 1}
    assert distance(ours, expected) < TOLERANCE[torch.bfloat16]
