"""The int8 product of CUDA, on the CPU: bitsandbytes has its product of integers there too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from treeeagle_edge.checkpoint.bnb import StoredInt8
from treeeagle_edge.gpu_check.models import FREE, RandomCheckpoint, RandomModel
from treeeagle_edge.gpu_check.passes import FixedPass, filled_store
from treeeagle_edge.gpu_check.sizes import SIZES
from treeeagle_edge.kernels import reference_int8
from treeeagle_edge.kernels.reference_int8 import int8_product, split_rows
from treeeagle_edge.model import linear as linears
from treeeagle_edge.model.int8_rows import quantise_rows
from treeeagle_edge.model.linear import CudaInt8Linear, Linear, bitsandbytes_module
from treeeagle_edge.model.target_stored import StoredInt8CudaLinear

CPU = torch.device("cpu")
FP16_MAX = torch.finfo(torch.float16).max


def weights(out: int = 96, size: int = 256) -> Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(out)) / size**0.5


def activations(rows: int = 17, size: int = 256) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


def quantised(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return CudaInt8Linear(weight, bias, CPU, torch.bfloat16)


def stored(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return StoredInt8CudaLinear(StoredInt8(*quantise_rows(weight, CPU)), bias, CPU, torch.bfloat16)


def held(weight: Tensor) -> Tensor:
    """What the codes of a weight stand for."""
    codes, absmax = quantise_rows(weight, CPU)
    return codes.float() * (absmax / 127)[:, None]


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("made", [quantised, stored])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_beyond_fp16_stay_finite(made: Callable[..., Linear], dtype: torch.dtype) -> None:
    """Expectations row 5: NaN logits on Qwen2 from overflow of fp16. 1e5 goes in, more than 65,504 comes out."""
    weight, x = weights(), activations()
    weight[7, 3] = 2.0
    x[4, 3] = 1e5
    x = x.to(dtype)
    through_fp16, _, _ = bitsandbytes_module().functional.int8_vectorwise_quant(x.to(torch.float16))
    assert torch.isinf(x.to(torch.float16)).any() and not through_fp16[4, :3].any(), "the case is none"
    y = made(weight)(x)
    assert y.dtype == dtype and torch.isfinite(y).all()
    assert float(y[4, 7]) > FP16_MAX
    for row in range(17):
        assert distance(y[row], x[row].float() @ held(weight).T) < 0.004  # bf16 rounds the result by 0.0014


@pytest.mark.parametrize("made", [quantised, stored])
@pytest.mark.parametrize("out", [96, 97, 98, 99])
def test_an_odd_vocabulary_is_multiplied_in_whole_fours(
    made: Callable[..., Linear], out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers of output channels are an error of cuBLASLt."""
    channels: list[int] = []
    whole = reference_int8.integer_product

    def watched(x: Tensor, codes: Tensor) -> Tensor:
        channels.append(len(codes))
        return whole(x, codes)

    monkeypatch.setattr(reference_int8, "integer_product", watched)
    weight, bias, x = weights(out), torch.arange(out).float(), activations().bfloat16()
    linear = made(weight, bias)
    y = linear(x)
    assert y.shape == (17, out) and channels == [-(-out // 4) * 4]
    assert distance(y, x.float() @ held(weight).T + bias) < 0.004


def test_a_qwen2_whose_mlp_leaves_fp16_runs_at_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectations row 5, through a whole target: its logits are finite and near those of fp32."""
    peaks: list[float] = []

    class Watched(CudaInt8Linear):
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            super().__init__(weight, bias, CPU, torch.bfloat16)

        def __call__(self, x: Tensor) -> Tensor:
            peaks.append(float(x.abs().max()))
            return super().__call__(x)

    def loud(self: RandomCheckpoint, name: str) -> Tensor:
        factor = 400.0 if name.endswith(("gate_proj.weight", "up_proj.weight")) else 1.0
        return drawn(self, name) * factor

    drawn = RandomCheckpoint.tensor
    monkeypatch.setattr(RandomCheckpoint, "tensor", loud)
    monkeypatch.setattr(linears, "Int8Linear", Watched)
    config = SIZES["test"].second.config
    logits = []
    for bits in (8, 32):
        target = RandomModel.load(config, bits=bits, device=CPU).target(FREE, 64)
        logits.append(FixedPass(target, filled_store(target, 16), 5, 8, ())())
    assert max(peaks) > FP16_MAX, "nothing overflows"
    assert torch.isfinite(logits[0]).all() and distance(logits[0], logits[1]) < 0.05


@pytest.mark.parametrize("made", [quantised, stored])
def test_a_row_has_the_same_bits_alone_and_among_others(made: Callable[..., Linear]) -> None:
    """Also beside a row of outliers and one that is not finite, which stays so and harms no other."""
    linear = made(weights(), torch.arange(96.0))
    x = activations().to(torch.bfloat16)
    x[3] *= 1e4
    x[5, 0], x[6, 1] = float("nan"), float("inf")
    together = linear(x)
    finite = [row for row in range(17) if row not in (5, 6)]
    assert torch.isfinite(together[finite]).all()
    assert not torch.isfinite(together[5]).any() and not torch.isfinite(together[6]).any()
    for row in finite:
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_an_outlier_does_not_drown_the_others() -> None:
    """What one code a number would round to nothing keeps its part in the result."""
    weight, x = weights(), activations()
    x[:, 9] = 1000.0
    quiet = x.clone()
    quiet[:, 9] = 0.0
    expected = quiet @ held(weight).T
    outlier = x[:, 9:10] @ held(weight)[:, 9:10].T
    two = int8_product(x, *quantise_rows(weight, CPU)) - outlier
    codes = torch.round(x / (1000.0 / 127)) * (1000.0 / 127)
    one = codes @ held(weight).T - outlier
    assert distance(one, expected) > 0.9, "one code would do"
    assert distance(two, expected) < 0.02


def test_two_codes_stand_for_the_number() -> None:
    x = activations().to(torch.bfloat16)
    codes, step = split_rows(x)
    assert codes.dtype == torch.int8 and codes.shape == (34, 256) and step.shape == (17, 1)
    back = (128.0 * codes[:17].float() + codes[17:].float()) * step
    assert ((back - x.float()).abs() <= 0.5001 * step).all()
    assert (codes[:17].abs().amax(dim=1) == 127).all() and int(codes[17:].abs().max()) <= 64


def test_a_weight_is_quantised_by_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel's largest weight is 127 steps; a channel of zeros stays zero."""
    weight = weights(50, 64)
    weight[7] = 0.0
    whole = quantise_rows(weight, CPU)
    monkeypatch.setattr("treeeagle_edge.model.int8_rows._ROWS_AT_A_TIME", 16)
    pieces = quantise_rows(weight.to(torch.float64), CPU)
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])
    assert whole[0].abs().amax(dim=1).tolist() == [0 if row == 7 else 127 for row in range(50)]
    assert distance(held(weight), weight) < 0.01
    assert not int8_product(activations(2, 64), *whole)[:, 7].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 17, 64])
def test_the_product_on_cuda_is_the_one_of_the_cpu(rows: int) -> None:
    """Integers are exact everywhere; beyond fp16 in both."""
    device = torch.device("cuda")
    x = activations(rows).to(torch.bfloat16)
    x[0, 3] = 1e5
    here, there = (CudaInt8Linear(weights(), None, on, torch.bfloat16) for on in (CPU, device))
    assert torch.equal(here.weight, there.weight.cpu())
    torch.testing.assert_close(there(x.to(device)).cpu(), here(x), rtol=0.01, atol=0)
