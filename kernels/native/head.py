"""An EAGLE-3 head held by the native library: one call a level."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import Any

import numpy as np

from treeeagle_edge.kernels.native.library import NativeError, address, check, library, source_of
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import (
    FORMATS,
    MATRICES,
    VECTORS,
    HeadConfig,
    HeadInput,
    HeadWanted,
)


class Head:
    """An EAGLE-3 head; `target` lends threads and, unless the head brings its own, embeddings."""

    def __init__(self, target: Model, config: HeadConfig) -> None:
        self.target, self.config = target, config
        self.handle = c_void_p()
        check(library().te_head_create(target.handle, byref(config), byref(self.handle)))
        self._destroy = library().te_head_destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)

    def matrix(self, name: str, fmt: str, data: np.ndarray[Any, Any]) -> None:
        """Set a matrix from fp32 rows or (uint8) GGUF blocks of `fmt`."""
        source, at, size = source_of(data)
        check(library().te_head_matrix(self.handle, MATRICES[name], FORMATS[fmt], source, at, size))

    def vector(self, name: str, data: np.ndarray[Any, Any]) -> None:
        """Set a norm or a bias, fp32."""
        check(library().te_head_vector(self.handle, VECTORS[name], address(data, np.float32), data.size))

    def rope(self, cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any]) -> None:
        """Rotary tables [max_positions, head_dim / 2], fp32."""
        check(
            library().te_head_rope(self.handle, address(cos, np.float32), address(sin, np.float32), cos.size)
        )

    def target_ids(self, ids: np.ndarray[Any, Any]) -> None:
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
        ids: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        slots: np.ndarray[Any, Any],
        view: View,
        store: Store,
        *,
        features: np.ndarray[Any, Any] | None = None,
        hidden: np.ndarray[Any, Any] | None = None,
        scored_rows: np.ndarray[Any, Any],
        top: int,
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """One draft pass -> (state [M, H], log-probabilities [S, top], target ids [S, top])."""
        rows, count = len(ids), len(scored_rows)
        given, width = (
            (features, self.config.feature_width) if features is not None else (hidden, self.config.hidden)
        )
        if given is None or given.shape != (rows, width):
            raise NativeError(f"expected features or hidden of shape {(rows, int(width))}")
        state = np.empty((rows, self.config.hidden), np.float32)
        log_probs = np.empty((count, top), np.float32)
        found = np.empty((count, top), np.int64)
        job = view.pass_of(rows, ids, positions, slots)
        source = HeadInput(address(features, np.float32), address(hidden, np.float32))
        wanted = HeadWanted(
            state.ctypes.data,
            address(scored_rows, np.int64),
            count,
            top,
            log_probs.ctypes.data,
            found.ctypes.data,
        )
        check(library().te_draft(self.handle, byref(job), byref(store.struct), byref(source), byref(wanted)))
        return state, log_probs, found
