"""The heap of the C library, and what loading leaves in it."""

from __future__ import annotations

import ctypes
import sys


def give_back_freed() -> None:
    """Hand free pages of the heap back to the system.

    glibc keeps them, since it raises its threshold for giving back to twice the largest block that was ever freed
    (mallopt(3), M_MMAP_THRESHOLD): after loading, room for a matrix in fp32 that answering never asks for. Nothing
    happens where the C library is another one.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
