"""int8 weights with a scale an output channel, as the int8 product of CUDA reads them: see `kernels.reference_int8`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.kernels.triton.operands import INT8_MOST

# of a weight while it is quantised, in fp32: that fits the room which the plan keeps for sums
_ROWS_AT_A_TIME = 512
_CHANNELS = 4  # output channels come in so many: cuBLASLt has no product of int8 for other numbers (its documentation)


def quantise_rows(weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[out, in] of any floating dtype -> (codes [out, in] int8, absmax [out] float32) on `device`.

    A weight is codes * absmax / 127. Goes by pieces, so that little more than the result is held.
    """
    rows = weight.shape[0]
    codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
    absmax = torch.empty(rows, dtype=torch.float32, device=device)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        piece = slice(start, start + _ROWS_AT_A_TIME)
        wide = weight[piece].to(device).float()
        absmax[piece] = wide.abs().amax(dim=1)
        scales = (absmax[piece] / INT8_MOST).clamp_(min=torch.finfo(torch.float32).tiny)
        codes[piece] = torch.round(wide / scales[:, None]).to(torch.int8)
    return codes, absmax


def whole_channels(
    codes: Tensor, absmax: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weight [out, in], its scales and its bias [out] with channels of zeros behind them, up to a multiple of four:
    a vocabulary may be odd. Callers cut them off the product.
    """
    missing = -len(codes) % _CHANNELS
    if not missing:
        return codes, absmax, bias
    behind = (0, missing)
    return F.pad(codes, (0, 0, *behind)), F.pad(absmax, behind), None if bias is None else F.pad(bias, behind)
