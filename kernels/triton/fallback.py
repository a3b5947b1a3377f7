"""When our 4-bit product stands in for that of bitsandbytes on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE, MAX_ROWS, MIN_ROWS

# (device index, dtype, rows, out, in) -> whether bitsandbytes multiplies without unpacking the weight
FusedRule = Callable[[int, torch.dtype, int, int, int], bool]


def reads_less_than_bitsandbytes(x: Tensor, out_size: int, rule: FusedRule | None = None) -> bool:
    """Whether bitsandbytes would unpack the whole weight [out_size, in] for `x` [M, in], and our product would not.

    Bytes, not seconds: which of the two is faster is for a measurement on the card to say. `rule`: that of the
    bitsandbytes that is installed, looked up here where it is not given.
    """
    rows, in_size = x.shape
    if not MIN_ROWS <= rows <= MAX_ROWS or in_size % BLOCK_SIZE:
        return False
    rule = rule or installed_rule()
    return rule is not None and not rule(x.device.index or 0, x.dtype, rows, out_size, in_size)


def installed_rule() -> FusedRule | None:
    """What bitsandbytes 0.50 itself chooses by, from its internals; None where there is no CUDA, or no such rule."""
    if not torch.cuda.is_available():
        return None
    from bitsandbytes.backends.cuda import ops

    rule: FusedRule | None = getattr(ops, "_gemm_4bit_use_custom_fn", None)
    return rule
