"""Stored weights at each width: right products, right sizes, and clear words where a machine cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.model import linear as linear_module
from treeeagle_edge.model.linear import Int8Linear, Nf4Linear, check_bits, make_linear

CPU = torch.device("cpu")
DTYPES = {32: torch.float32, 16: torch.bfloat16, 8: torch.bfloat16, 4: torch.bfloat16}
# largest error of y over its standard deviation, for gaussian weights: rounding of bf16, of 8 and of 4 bits
BOUNDS = {32: 1e-5, 16: 0.03, 8: 0.06, 4: 0.6}


def problem(rows: int, out: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out + size)
    weight = torch.randn(out, size, generator=generator) / size**0.5
    return torch.randn(rows, size, generator=generator), weight, torch.randn(out, generator=generator)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("rows", [1, 8, 17])
@pytest.mark.parametrize(("out", "size"), [(96, 128), (576, 1536), (50, 48)])
def test_products_are_right(bits: int, rows: int, out: int, size: int) -> None:
    """Against fp32, with a bias; shapes that fit the fused 4-bit product and shapes that do not."""
    x, weight, bias = problem(rows, out, size)
    linear = make_linear(weight, bias, bits=bits, device=CPU, dtype=DTYPES[bits])
    y = linear(x.to(DTYPES[bits]))
    expected = F.linear(x, weight, bias)
    assert y.dtype == DTYPES[bits] and y.shape == expected.shape
    assert float((y.float() - expected).abs().max() / expected.std()) < BOUNDS[bits]
    plain = make_linear(weight, None, bits=bits, device=CPU, dtype=DTYPES[bits])
    torch.testing.assert_close(plain(x.to(DTYPES[bits])).float(), y.float() - bias, atol=0.05, rtol=0.05)


def test_sizes_shrink_with_the_width() -> None:
    """Bytes held: 4, 2, 1 and about half a byte a weight, and what scales and bias take."""
    _, weight, bias = problem(1, 576, 1536)
    count = weight.numel()
    sizes = {b: make_linear(weight, bias, bits=b, device=CPU, dtype=DTYPES[b]).nbytes for b in DTYPES}
    assert sizes[32] == 4 * count + 4 * 576
    assert sizes[16] == 2 * count + 2 * 576
    assert sizes[8] == count + 2 * 576 + 2 * 576
    assert count // 2 < sizes[4] <= count // 2 + 4 * count // 64 + 2 * 576


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_rows_do_not_depend_on_the_number_of_rows(bits: int) -> None:
    """Both quantised products of the CPU give a row the same bits alone and among others."""
    x, weight, _ = problem(17, 576, 1536)
    linear = make_linear(weight, None, bits=bits, device=CPU, dtype=torch.bfloat16)
    if isinstance(linear, Nf4Linear) and not linear.is_fused:
        pytest.skip("no fused 4-bit product on this CPU: it multiplies with a dequantised weight")
    x = x.to(torch.bfloat16)
    together = linear(x)
    for row in range(17):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_the_bias_goes_into_the_4_bit_product() -> None:
    """bitsandbytes' fused product adds it before it rounds, and without a launch of its own."""
    x, weight, bias = problem(2, 64, 64)
    linear = make_linear(weight, bias, bits=4, device=CPU, dtype=torch.bfloat16)
    assert isinstance(linear, Nf4Linear)
    given: list[object] = []
    linear._product = lambda x, weight, *, quant_state, bias: given.append(bias) or x
    assert linear(x) is x and given == [linear.bias] and torch.equal(given[0], bias.to(torch.bfloat16))


def test_int8_uses_the_whole_range_and_survives_a_zero_channel() -> None:
    """Each channel's largest weight becomes 127 up to the rounding of its scale; a channel of zeros stays zero."""
    weight = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]).repeat(1, 16)
    linear = Int8Linear(weight, None)
    assert linear.weight[0].min() in (-127, -126) and not linear.weight[1].any()
    y = linear(torch.ones(1, 48, dtype=torch.bfloat16))
    assert torch.isfinite(y).all() and y[0, 1] == 0


def test_a_missing_device_or_product_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3 with a hint: CUDA asked for without CUDA, an unknown device, a PyTorch without the int8 product."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "meta"):
        with pytest.raises(CannotRunError) as caught:
            check_bits(16, torch.device(device))
        assert caught.value.hint
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    with pytest.raises(CannotRunError) as caught:
        check_bits(8, CPU)
    assert "int8" in caught.value.message and "--bits 16" in (caught.value.hint or "")
    check_bits(16, CPU)


def test_bitsandbytes_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bits need it; the other widths of the CPU do not."""
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(CannotRunError, match="bitsandbytes"):
        check_bits(4, CPU)
    check_bits(8, CPU)


def test_a_bitsandbytes_that_has_no_library_for_the_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectations row 36: it imports all the same, and would fail at its first call with a page of text."""
    library = SimpleNamespace(compiled_with_cuda=False)
    module = SimpleNamespace(__version__="0.50.0", cextension=SimpleNamespace(lib=library))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(linear_module, "bitsandbytes_module", lambda: module)
    for bits in (4, 8):
        with pytest.raises(
            CannotRunError, match=r"bitsandbytes 0.50.0 has no library .* CUDA 13.0 of"
        ) as caught:
            check_bits(bits, torch.device("cuda:0"))
        assert "--bits 16" in str(caught.value.hint)
        check_bits(bits, CPU)
    check_bits(16, torch.device("cuda:0"))
    library.compiled_with_cuda = True
    check_bits(4, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("version", "served"),
    [("0.49.2", False), ("0.9.1", False), ("0.50.0", True), ("0.50.0.dev0", True), ("1.0", True)],
)
def test_a_bitsandbytes_without_a_fused_product_is_refused_with_the_reason(
    version: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it unpacks whole weights for every tree, plain decoding would be the faster of the two."""
    library = SimpleNamespace(compiled_with_cuda=True)
    module = SimpleNamespace(__version__=version, cextension=SimpleNamespace(lib=library))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_module, "bitsandbytes_module", lambda: module)
    for bits, device in ((8, torch.device("cuda:0")), (4, CPU)):
        check_bits(bits, device)
    if served:
        check_bits(4, torch.device("cuda:0"))
        return
    with pytest.raises(CannotRunError, match=f"bitsandbytes {version} unpacks the whole") as caught:
        check_bits(4, torch.device("cuda:0"))
    assert "bitsandbytes>=0.50" in str(caught.value.hint)


def test_the_real_library_says_what_it_was_compiled_with() -> None:
    """What the check asks exists in the bitsandbytes that is installed."""
    library = linear_module.bitsandbytes_module().cextension.lib
    assert library.compiled_with_cuda == (torch.version.cuda is not None)
