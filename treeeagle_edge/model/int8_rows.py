"""int8 weights with a scale an output channel, as the int8 product of CUDA reads them: see `kernels.reference_int8`."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127  # an int8 code; the scale of a row of weights is that of its largest one
# of a weight while it is quantised, in fp32: that fits the room which the plan keeps for sums
_ROWS_AT_A_TIME = 512


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
        scales = (absmax[piece] / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        codes[piece] = torch.round(wide / scales[:, None]).to(torch.int8)
    return codes, absmax
