"""A team of native threads, kept warm between calls."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeeagle_edge.kernels.native.library import address, check, library, source_of
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import FORMATS, Sampling


class Team:
    """Threads that work together, with one instruction set; kept warm between calls."""

    def __init__(self, threads: int, isa: str | None = None, spin_us: int = 1000) -> None:
        self.handle = c_void_p()
        check(library().te_team_create(threads, isa.encode() if isa else None, spin_us, byref(self.handle)))
        self.threads = threads
        self.isa: str = library().te_team_isa(self.handle).decode()
        self._destroy = library().te_team_destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)

    def draw(self, scores: NDArray[np.float32], how: Sampling, position: int) -> int:
        """The token of scores [V] float32 that the noise of `position` chooses; see `sampling.choose`."""
        token = c_int64()
        at = address(scores, np.float32)
        check(library().te_draw(self.handle, at, scores.size, byref(how), position, byref(token)))
        return token.value

    def matmul(self, fmt: str, data: NDArray[Any], n: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x [rows, k] float32 times a weight [n, k] -> [rows, n]; for tests."""
        source, at, size = source_of(data)
        out = np.empty((x.shape[0], n), np.float32)
        lib = library()
        check(
            lib.te_matmul(
                self.handle,
                FORMATS[fmt],
                source,
                at,
                size,
                n,
                x.shape[1],
                address(x, np.float32),
                x.shape[0],
                out.ctypes.data,
            )
        )
        return out

    def attention(self, query: NDArray[np.float32], reads: View, kv: Store) -> NDArray[np.float32]:
        """query [rows, heads, head_dim] float32 (not scaled) over one layer -> the same shape; for tests."""
        rows, heads, dim = query.shape
        out = np.empty_like(query)
        check(
            library().te_attention(
                self.handle, address(query, np.float32), heads, kv.kv_heads, dim, byref(reads.pass_of(rows)),
                byref(kv.struct), out.ctypes.data,
            )
        )  # fmt: skip
        return out
