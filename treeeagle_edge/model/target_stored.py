"""Matrix products with weights that bitsandbytes stored: their codes and scales are used as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.bnb import Stored4bit, StoredInt8, StoredMatrix
from treeeagle_edge.errors import InputError
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton.operands import INT8_MOST
from treeeagle_edge.model.int8_rows import whole_channels
from treeeagle_edge.model.linear import Linear, PackedLinear, bitsandbytes_module, make_linear


class Stored4bitLinear(PackedLinear):
    """NF4 or FP4 codes with fp32 scales.

    On the CPU they are not repacked for the fused product, which would round the scales to bf16.
    """

    def __init__(
        self, matrix: Stored4bit, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Move `matrix` and bias [out] to `device`; products run in `dtype`.

        Raises InputError where the file maps codes to other values than those the product knows.
        """
        bnb = bitsandbytes_module()
        known = bnb.functional.get_4bit_type(matrix.kind, device="cpu")
        if not torch.allclose(matrix.quant_map, known, rtol=0, atol=1e-6):
            raise InputError(
                f"a 4-bit matrix maps its codes to other values than {matrix.kind}",
                "use the unquantised repository of the model and --bits 4",
            )
        state = bnb.functional.QuantState(
            absmax=matrix.absmax.to(device),
            shape=torch.Size(matrix.shape),
            code=matrix.quant_map.to(device),
            blocksize=matrix.block,
            quant_type=matrix.kind,
            dtype=dtype,
        )
        moved = None if bias is None else bias.to(device=device, dtype=dtype)
        super().__init__(matrix.codes.to(device).view(-1, 1), state, moved)


class StoredInt8Linear:
    """LLM.int8 codes with fp32 scales, activations in bf16. A row has the same bits alone and among others."""

    def __init__(
        self, matrix: StoredInt8, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Move `matrix` and bias [out] to `device`; results come in `dtype`."""
        self.weight = matrix.codes.to(device)
        self.absmax = matrix.absmax.to(device)
        self.bias = None if bias is None else bias.to(device=device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + self.absmax.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out] in the dtype of x."""
        # the product's own scales are bf16 and would round the stored ones: it gets ones
        rows = x.to(torch.bfloat16)
        y = torch._weight_int8pack_mm(rows, self.weight, rows.new_ones(len(self.absmax)))
        y = y.float().mul_(self.absmax / INT8_MOST).to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)


class StoredInt8CudaLinear(StoredInt8Linear):
    """The same with activations in two int8 codes: see `kernels.reference_int8`."""

    def __init__(
        self, matrix: StoredInt8, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """As for the CPU."""
        bitsandbytes_module()  # registers the product of integers
        super().__init__(matrix, bias, device, dtype)
        self._out = len(self.weight)
        self.weight, self.absmax, self.bias = whole_channels(self.weight, self.absmax, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out] in the dtype of x."""
        return dispatch.int8_product(x, self.weight, self.absmax, self.bias)[:, : self._out]


class JoinedLinear:
    """Several products of the same rows, side by side: parts that cannot share one matrix."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, sum of out] in the dtype of x."""
        return torch.cat([part(x) for part in self.parts], dim=1)


def stored_linear(
    matrices: Sequence[StoredMatrix | Tensor],
    biases: Sequence[Tensor | None],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Linear:
    """One product with `matrices` [out, in] stacked along their output channels, each with its bias [out] or None.

    Matrices are joined where no rounding changes by it: rows of int8, floats, and 4-bit codes of one kind whose
    blocks end where a matrix ends. Others are multiplied part by part. Floats are held in the compute dtype.
    """
    joined = _joined(matrices)
    if joined is not None:
        bias = None if biases[0] is None else torch.cat([part for part in biases if part is not None])
        matrices, biases = [joined], [bias]
    parts = [_single(*pair, device, dtype) for pair in zip(matrices, biases, strict=True)]
    return parts[0] if len(parts) == 1 else JoinedLinear(parts)


def _single(
    matrix: StoredMatrix | Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype
) -> Linear:
    if isinstance(matrix, Stored4bit):
        return Stored4bitLinear(matrix, bias, device, dtype)
    if isinstance(matrix, StoredInt8):
        kind = StoredInt8Linear if device.type == "cpu" else StoredInt8CudaLinear
        return kind(matrix, bias, device, dtype)
    return make_linear(matrix, bias, bits=16, device=device, dtype=dtype)


def _joined(matrices: Sequence[StoredMatrix | Tensor]) -> StoredMatrix | Tensor | None:
    """The matrices as one, None where their blocks would straddle two or they are of different kinds."""
    rows, columns = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    floats = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    eight = [matrix for matrix in matrices if isinstance(matrix, StoredInt8)]
    four = [matrix for matrix in matrices if isinstance(matrix, Stored4bit)]
    if len(floats) == len(matrices):
        return torch.cat(floats)
    if len(eight) == len(matrices):
        return StoredInt8(
            torch.cat([part.codes for part in eight]), torch.cat([part.absmax for part in eight])
        )
    if len(four) < len(matrices) or len({(part.kind, part.block) for part in four}) > 1:
        return None
    block = four[0].block
    if any(part.shape[0] * columns % block for part in four[:-1]):
        return None
    return Stored4bit(
        torch.cat([part.codes for part in four]),
        torch.cat([part.absmax for part in four]),
        four[0].quant_map,
        block,
        four[0].kind,
        (rows, columns),
    )
