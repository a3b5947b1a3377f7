"""An EAGLE-3 head held by the native library: one call a level, or one for a whole tree."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeeagle_edge.kernels.native.library import NativeError, address, check, library, source_of
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import (
    FORMATS,
    MATRICES,
    VECTORS,
    Growth,
    HeadConfig,
    HeadInput,
    HeadWanted,
    Pass,
    Tree,
    TreeInput,
)


class HeadOutput(NamedTuple):
    """State [M, H] for the next level; log-probabilities, descending, and target ids [S, top] of the scored rows."""

    hidden: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    ids: NDArray[np.int64]


@dataclass(frozen=True)
class HeadRequest:
    """What passes of one kind give, and the arrays that it goes to.

    Any later pass overwrites `hidden`; the other arrays are overwritten by the next pass with the same request.
    """

    wanted: HeadWanted
    output: HeadOutput
    keep: tuple[Any, ...]  # arrays that `wanted` points to


class TreeRoom:
    """Where draft trees of up to `rows` rows go, the root included. The next tree overwrites them."""

    def __init__(self, rows: int) -> None:
        self.tokens, self.parents, self.depths = ((c_int64 * rows)() for _ in range(3))
        self.log_probs = (c_double * rows)()
        arrays = self.tokens, self.parents, self.depths, self.log_probs
        self.struct = Tree(*(addressof(values) for values in arrays), rows, 0, 0)


class Head:
    """An EAGLE-3 head; `target` lends threads and, unless the head brings its own, embeddings."""

    def __init__(self, target: Model, config: HeadConfig) -> None:
        self.target, self.config = target, config
        self._hidden = np.empty((config.max_rows, config.hidden), np.float32)
        self.handle = c_void_p()
        check(library().te_head_create(target.handle, byref(config), byref(self.handle)))
        self._destroy = library().te_head_destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)

    def matrix(self, name: str, fmt: str, data: NDArray[Any]) -> None:
        """Set a matrix from fp32 rows or (uint8) GGUF blocks of `fmt`."""
        source, at, size = source_of(data)
        check(library().te_head_matrix(self.handle, MATRICES[name], FORMATS[fmt], source, at, size))

    def vector(self, name: str, data: NDArray[np.float32]) -> None:
        """Set a norm or a bias, fp32."""
        check(library().te_head_vector(self.handle, VECTORS[name], address(data, np.float32), data.size))

    def rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Rotary tables [max_positions, head_dim / 2], fp32."""
        check(
            library().te_head_rope(self.handle, address(cos, np.float32), address(sin, np.float32), cos.size)
        )

    def target_ids(self, ids: NDArray[np.int64]) -> None:
        """[Vd] int64: the target's id of each draft id."""
        check(library().te_head_ids(self.handle, address(ids, np.int64), len(ids)))

    def ready(self) -> None:
        """Check that nothing is missing; passes may follow."""
        check(library().te_head_ready(self.handle))

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return int(library().te_head_bytes(self.handle))

    def step(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        view: View,
        store: Store,
        *,
        features: NDArray[np.float32] | None = None,
        hidden: NDArray[np.float32] | None = None,
        scored_rows: Sequence[int],
        top: int,
    ) -> HeadOutput:
        """One draft pass over [M] rows, from true features or from the states of the level before."""
        rows = len(ids)
        given, width = (
            (features, self.config.feature_width) if features is not None else (hidden, self.config.hidden)
        )
        if given is None or given.shape != (rows, width):
            raise NativeError(f"expected features or hidden of shape {(rows, int(width))}")
        source = HeadInput(address(features, np.float32), address(hidden, np.float32), None, rows)
        return self.run(
            view.pass_of(rows, ids, positions, slots), store, source, self.request(rows, scored_rows, top)
        )

    def request(self, rows: int, scored_rows: Sequence[int], top: int) -> HeadRequest:
        """Ask passes of `rows` rows for the `top` likeliest tokens after `scored_rows`."""
        count = len(scored_rows)
        if rows > len(self._hidden):
            raise NativeError(f"a pass has at most {len(self._hidden)} rows, not {rows}")
        out = HeadOutput(
            self._hidden[:rows],
            np.empty((count, top), np.float32),
            np.empty((count, top), np.int64),
        )
        scored = np.array(scored_rows, np.int64)
        wanted = HeadWanted(
            out.hidden.ctypes.data, address(scored, np.int64), count, top, out.log_probs.ctypes.data,
            out.ids.ctypes.data,
        )  # fmt: skip
        return HeadRequest(wanted, out, (scored,))

    def run(self, job: Pass, store: Store, source: HeadInput, request: HeadRequest) -> HeadOutput:
        """One draft pass over the rows of `job`, as many as `request` was made for."""
        check(
            library().te_draft(
                self.handle, byref(job), byref(store.struct), byref(source), byref(request.wanted)
            )
        )
        return request.output

    def draft_tree(self, job: TreeInput, store: Store, growth: Growth, room: TreeRoom) -> None:
        """A whole tree into `room`, whose `struct` then says how many rows it has and how many levels were scored."""
        check(
            library().te_draft_tree(
                self.handle, byref(job), byref(store.struct), byref(growth), byref(room.struct)
            )
        )
