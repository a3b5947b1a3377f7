"""The 4-bit product in Triton against the plain PyTorch that defines it, on weights that bitsandbytes packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, TOLERANCE, needs_triton, normal

from treeeagle_edge.checkpoint.bnb import Stored4bit
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton import fallback, reference
from treeeagle_edge.model import linear
from treeeagle_edge.model.linear import Nf4Linear, PackedLinear
from treeeagle_edge.model.target_stored import Stored4bitLinear

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton import launch
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


@pytest.fixture
def unpacks_beyond_8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bitsandbytes that multiplies packed weights for up to 8 rows; nothing is left out afterwards."""
    monkeypatch.setattr(linear, "installed_rule", lambda: lambda device, dtype, rows, out, size: rows <= 8)
    yield
    dispatch.leave_out(())


def a_linear(kind: str, dtype: torch.dtype, *, nested: bool = False) -> PackedLinear:
    """[40, 192] with a bias; 40 channels are not repacked for the CPU."""
    bias = normal(40, seed=2)
    if kind == "quantised here":
        return Nf4Linear(normal(40, 192, seed=4), bias, DEVICE, dtype)
    packed, absmax, code, _ = packed_weight(40, 192, kind, nested)
    matrix = Stored4bit(packed.flatten().cpu(), absmax.cpu(), code.cpu(), 64, kind, (40, 192))
    return Stored4bitLinear(matrix, bias, DEVICE, dtype)


def product_of(layer: PackedLinear, x: Tensor) -> tuple[Tensor, int]:
    """What it gives with Triton's kernels in force, and how often ours was launched."""
    with dispatch.use_backend("triton"), launch.counted() as counter:
        return layer(x), counter["matmul_4bit_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "nested"), [("quantised here", False), ("nf4", False), ("nf4", True), ("fp4", False)]
)
def test_a_linear_is_ours_where_bitsandbytes_would_unpack(
    kind: str, nested: bool, dtype: torch.dtype, unpacks_beyond_8: None
) -> None:
    """Equal to the product of bitsandbytes but for the order of the sums and, at 16 bits, one rounding less."""
    layer = a_linear(kind, dtype, nested=nested)
    for rows, launched in ((1, 0), (8, 0), (9, 1), (64, 1), (65, 0)):
        x = normal(rows, 192, seed=1, dtype=dtype)
        expected = layer(x)
        ours, times = product_of(layer, x)
        assert times == launched and ours.dtype == dtype and ours.shape == (rows, 40)
        if not launched:
            assert torch.equal(ours, expected)
        error = float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())
        assert error < max(TOLERANCE[dtype], 2e-6)


def test_a_linear_stays_with_bitsandbytes_where_ours_is_left_out_or_cannot_read_it(
    unpacks_beyond_8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = a_linear("nf4", torch.float32), normal(9, 192, seed=1)
    assert product_of(layer, x)[1] == 1
    dispatch.leave_out({"matmul_4bit"})
    assert product_of(layer, x)[1] == 0
    dispatch.leave_out(())
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(normal(40, 192, seed=4), blocksize=128, quant_type="nf4")
    assert product_of(PackedLinear(packed, state, None), x)[1] == 0
    monkeypatch.setattr(linear, "installed_rule", lambda: None)
    assert product_of(a_linear("nf4", torch.float32), x)[1] == 0
