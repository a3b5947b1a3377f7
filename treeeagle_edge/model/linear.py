"""Matrix products with stored weights at 4, 8, 16 or 32 bits, behind one factory.

On the CPU 8 bits is PyTorch's weight-only int8 product and 4 bits the NF4 of bitsandbytes (QLoRA, arXiv 2305.14314);
on CUDA both are bitsandbytes, at 8 bits its product of integers alone. It is imported only where it is used. At 4 bits
a product of our own may stand in for it on CUDA.
"""

from __future__ import annotations

import logging
import re
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton.fallback import installed_rule, reads_less_than_bitsandbytes
from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE
from treeeagle_edge.model.int8_rows import quantise_rows, whole_channels

_FUSED = (0, 50)  # the first bitsandbytes whose 4-bit product takes several rows as it takes one
_NF4_CPU_ROWS = 32  # output channels that the fused CPU product takes at a time


class Linear(Protocol):
    """y = x W^T + b for `x` [M, in] in the compute dtype; y is [M, out] in the same dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight, its scales and its bias."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        ...


class DenseLinear:
    """Weights in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in]; bias [out] or None; both in the compute dtype."""
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        return F.linear(x, self.weight, self.bias)


class Int8Linear:
    """int8 weights with one scale an output channel, activations in bf16.

    A row has the same bits alone and among others (measured for 1 to 64 rows). fp32 activations would keep more of
    them, and take ten times as long.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise weight [out, in] of any floating dtype, symmetrically; bias [out] or None."""
        wide = weight.float()
        # the product takes bf16 scales: rounding them first keeps that error out of the weights
        scales = (
            wide.abs().amax(dim=1).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
        )
        self.weight = torch.round(wide / scales[:, None].float()).clamp_(-127, 127).to(torch.int8)
        self.scales = scales
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] bf16 -> [M, out] bf16."""
        y = torch._weight_int8pack_mm(x, self.weight, self.scales)
        return y if self.bias is None else y.add_(self.bias)


class PackedLinear:
    """A weight that bitsandbytes packed to 4 bits, with fp32 scales that are not nested.

    bitsandbytes multiplies. Where Triton's kernels are in force, our product stands in for it at those numbers of rows
    at which it would unpack the whole weight; the results differ by the order of the sums.
    """

    def __init__(self, weight: Tensor, state: Any, bias: Tensor | None) -> None:
        """weight: packed bytes; state: their `QuantState`; bias [out] or None, in the dtype of products."""
        self.weight = weight
        self.state = state
        self.bias = bias
        self._product = bitsandbytes_module().matmul_4bit
        readable = state.blocksize == BLOCK_SIZE and not self.is_fused
        self._rule = installed_rule() if readable else None

    @property
    def is_fused(self) -> bool:
        """Whether the weight was repacked for the fused product of CPUs with bf16."""
        return bool(getattr(self.state, "packing_format_for_cpu", False))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + self.state.absmax.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out] in the dtype of x."""
        if self._rule is not None and dispatch.serving("matmul_4bit") == dispatch.TRITON:
            out_size, _ = self.state.shape
            if reads_less_than_bitsandbytes(x, out_size, self._rule):
                return dispatch.matmul_4bit(x, self.weight, self.state.absmax, self.state.code, self.bias)
        y: Tensor = self._product(x, self.weight, quant_state=self.state, bias=self.bias)
        return y


class Nf4Linear(PackedLinear):
    """NF4 weights in blocks of 64, on the CPU or a CUDA device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        """Quantise weight [out, in] and move it to `device`; products run in `dtype`."""
        bnb = bitsandbytes_module()
        out_size, in_size = weight.shape
        # on no device: the layer would otherwise draw random weights of its own first, in fp32
        layer = bnb.nn.Linear4bit(
            in_size,
            out_size,
            bias=False,
            compute_dtype=dtype,
            compress_statistics=False,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bnb.nn.Params4bit(
            weight.to(dtype),
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=False,
            blocksize=BLOCK_SIZE,
        )
        layer = layer.to(device).eval()
        repackable = out_size % _NF4_CPU_ROWS == 0 and in_size % BLOCK_SIZE == 0
        if device.type == "cpu" and repackable:
            # the first call repacks the weight for the fused product where the CPU has it
            layer(torch.zeros(1, in_size, dtype=dtype))
        moved = None if bias is None else bias.to(device=device, dtype=dtype)
        super().__init__(layer.weight.data, layer.weight.quant_state, moved)


class CudaInt8Linear:
    """int8 weights with an fp32 scale an output channel, activations in two codes: see `kernels.reference_int8`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        """Quantise weight [out, in] while it moves to `device`; products run in `dtype`."""
        bitsandbytes_module()  # registers the product of integers
        self._out = len(weight)
        moved = None if bias is None else bias.to(device=device, dtype=dtype)
        self.weight, self.absmax, self.bias = whole_channels(*quantise_rows(weight, device), moved)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + self.absmax.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out] in the dtype of x."""
        return dispatch.int8_product(x, self.weight, self.absmax, self.bias)[:, : self._out]


def make_linear(
    weight: Tensor, bias: Tensor | None, *, bits: int, device: torch.device, dtype: torch.dtype
) -> Linear:
    """Store `weight` [out, in] (CPU, any floating dtype) and `bias` [out] on `device`; products run in `dtype`.

    Raises CannotRunError where this machine lacks what the width needs.
    """
    check_bits(bits, device)
    if bits == 8 and device.type == "cpu":
        return Int8Linear(weight, bias)
    if bits == 8:
        return CudaInt8Linear(weight, bias, device, dtype)
    if bits == 4:
        return Nf4Linear(weight, bias, device, dtype)
    moved = None if bias is None else bias.to(device=device, dtype=dtype)
    return DenseLinear(weight.to(device=device, dtype=dtype).contiguous(), moved)


def check_bits(bits: int, device: torch.device) -> None:
    """Raise CannotRunError unless `device` exists here and can multiply weights of `bits` (4, 8, 16 or 32)."""
    if device.type not in ("cpu", "cuda"):
        raise CannotRunError(f"device {device} is not supported", "use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotRunError(
            "PyTorch finds no CUDA device on this machine", "use --device cpu; treeeagle profile says why"
        )
    if bits == 8 and device.type == "cpu" and not hasattr(torch, "_weight_int8pack_mm"):
        raise CannotRunError(
            f"PyTorch {torch.__version__} has no int8 product for the CPU", "update torch, or use --bits 16"
        )
    if bits == 4 or (bits == 8 and device.type == "cuda"):
        module = bitsandbytes_module()
        numbers = tuple(int(number) for number in re.findall(r"\d+", module.__version__)[:2])
        if device.type == "cuda" and bits == 4 and numbers < _FUSED:
            raise CannotRunError(
                f"bitsandbytes {module.__version__} unpacks the whole of a 4-bit weight for more than one row, so that "
                "checking a tree would take longer than decoding without one",
                "pip install 'bitsandbytes>=0.50', or use --bits 16",
            )
        if device.type == "cuda" and not module.cextension.lib.compiled_with_cuda:
            raise CannotRunError(
                f"bitsandbytes {module.__version__} has no library that loads for the CUDA {torch.version.cuda} of "
                "PyTorch",
                "python -m bitsandbytes says why; install it again, or use --bits 16",
            )


def bitsandbytes_module() -> ModuleType:
    """The module, imported on first use; without its notice that an optional download was not found."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise CannotRunError(
            f"bitsandbytes cannot be imported: {error}", "install it again, or use --bits 16"
        ) from error
    finally:
        logger.setLevel(level)
    return bitsandbytes
