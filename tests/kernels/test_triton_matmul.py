"""The 4-bit product in Triton against the plain PyTorch that defines it, on weights that bitsandbytes packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, TOLERANCE, needs_triton, normal

from treeeagle_edge.kernels.triton import fallback, reference

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton.matmul_4bit import matmul_4bit

pytestmark = needs_triton


def packed_weight(out_size: int, in_size: int, kind: str, nested: bool = False) -> tuple[Tensor, ...]:
    """Bytes, fp32 scales and table of a weight that bitsandbytes quantised, and the weight it unpacks them to."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(out_size, in_size, seed=4)
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type=kind, compress_statistics=nested
    )
    unpacked = functional.dequantize_4bit(packed, state)
    absmax = state.absmax
    if nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2).float() + state.offset
    return packed, absmax, state.code.float(), unpacked


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_reference_unpacks_as_bitsandbytes_does(kind: str, nested: bool) -> None:
    packed, absmax, code, unpacked = packed_weight(24, 192, kind, nested)
    ours = reference.unpack_4bit(packed, absmax, code, 192, torch.float32)
    assert torch.equal(ours, unpacked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("rows", "out_size", "in_size"), [(1, 33, 64), (2, 16, 128), (7, 50, 192), (64, 40, 320)]
)
def test_equals_the_reference(rows: int, out_size: int, in_size: int, kind: str, dtype: torch.dtype) -> None:
    """One row and sixty-four; channels and inputs that fill no tile."""
    packed, absmax, code, _ = packed_weight(out_size, in_size, kind)
    x = normal(rows, in_size, seed=1, dtype=dtype)
    bias = normal(out_size, seed=2, dtype=dtype) if rows > 1 else None
    ours = matmul_4bit(x, packed, absmax, code, bias)
    expected = reference.matmul_4bit(x, packed, absmax, code, bias)
    assert ours.shape == (rows, out_size) and ours.dtype == dtype
    error = float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())
    assert error < max(TOLERANCE[dtype], 2e-6)


def test_a_bad_row_spoils_no_other() -> None:
    packed, absmax, code, _ = packed_weight(16, 64, "nf4")
    x = normal(3, 64, seed=1)
    x[1, 5] = float("nan")
    ours = matmul_4bit(x, packed, absmax, code)
    assert ours[1].isnan().all() and ours[[0, 2]].isfinite().all()


def test_stands_in_where_bitsandbytes_would_unpack() -> None:
    """Its rule is asked by shape; it is not asked where our product cannot serve."""
    asked: list[tuple[int, int, int]] = []

    def fused_to_16(device: int, dtype: torch.dtype, rows: int, out_size: int, in_size: int) -> bool:
        asked.append((rows, out_size, in_size))
        return rows <= 16

    def chosen(rows: int, in_size: int = 128) -> bool:
        x = torch.zeros(rows, in_size, device=DEVICE)
        return fallback.reads_less_than_bitsandbytes(x, 256, fused_to_16)

    assert [chosen(rows) for rows in (2, 16, 17, 64)] == [False, False, True, True]
    assert asked == [(2, 256, 128), (16, 256, 128), (17, 256, 128), (64, 256, 128)]
    assert not any((chosen(1), chosen(65), chosen(17, in_size=100)))
    assert len(asked) == 4


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a rule to ask")
def test_without_cuda_there_is_nothing_to_stand_in_for() -> None:
    assert not fallback.reads_less_than_bitsandbytes(torch.zeros(17, 128), 256)
