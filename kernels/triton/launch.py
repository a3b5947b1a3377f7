"""One launch of a kernel as a value: what is run on a card is also what is compiled, and counted, without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from treeeagle_edge.kernels.triton.availability import interpreting

_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_counters: list[Counter[str]] = []  # of those who count at the moment


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, its arguments by name (tensors, numbers and compile-time constants), and its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2  # loads of a loop that are under way at once

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told; products and sums may fuse, as in PyTorch's own kernels."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Start it on the current stream; nothing waits for its end."""
        for counter in _counters:
            counter[self.kernel.__name__] += 1
        self.kernel[self.grid](**self.arguments, **self.options)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts launches by the kernel's name while the block runs; a replay of a CUDA graph launches nothing anew."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def operand_dtype(dtype: torch.dtype) -> tl.dtype:
    """What matrix products take their factors in; they always add up in fp32.

    That is `dtype` itself. Triton's interpreter would multiply the bit patterns of bf16: it is given fp32 instead.
    """
    return tl.float32 if interpreting() and dtype == torch.bfloat16 else _TRITON_DTYPES[dtype]


def power_of_two(count: int, least: int = 1, most: int | None = None) -> int:
    """The smallest power of two that holds `count`, between `least` and `most`: tiles have no other sizes."""
    size = max(least, triton.next_power_of_2(count))
    return size if most is None else min(size, most)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the card; a few elsewhere, so that the interpreter meets split grids, too."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
