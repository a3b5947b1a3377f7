"""A target held by the native library: one call a pass."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeeagle_edge.kernels.native.library import NativeError, address, check, library, source_of
from treeeagle_edge.kernels.native.reading import Lists, Store, View
from treeeagle_edge.kernels.native.structs import FORMATS, MATRICES, VECTORS, ModelConfig, Pass, Wanted
from treeeagle_edge.kernels.native.team import Team


@dataclass(frozen=True)
class Output:
    """logits [R, V]; best [R], their argmax, and peaks [R], the logits there, NaN where one of the row is not finite;
    hidden [R, H] after the final norm, features [M, taps * H].

    Views of buffers that the next pass overwrites.
    """

    logits: NDArray[np.float32] | None
    best: NDArray[np.int64] | None
    peaks: NDArray[np.float32] | None
    hidden: NDArray[np.float32]
    features: NDArray[np.float32] | None


@dataclass(frozen=True)
class Request:
    """What passes of one kind give, and where it will lie. It serves any number of passes."""

    wanted: Wanted
    output: Output
    keep: tuple[Any, ...]  # arrays that `wanted` points to


class Model:
    """A target held by the native library. Fill it with `matrix` and `vector`, then call `ready`.

    A pass hands out views of buffers that the next pass overwrites: nothing is allocated while decoding. At
    most `scored_rows` rows of a pass can have logits.
    """

    def __init__(self, team: Team, config: ModelConfig, scored_rows: int = 64) -> None:
        self.team, self.config = team, config
        self._logits: NDArray[np.float32] | None = None  # made when a request first wants them
        self._best = np.empty(scored_rows, np.int64)
        self._peaks = np.empty(scored_rows, np.float32)
        self._hidden = np.empty((scored_rows, config.hidden), np.float32)
        self._features: dict[int, NDArray[np.float32]] = {}  # by the number of taps
        self.handle = c_void_p()
        check(library().te_model_create(team.handle, byref(config), byref(self.handle)))
        self._destroy = library().te_model_destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)

    def matrix(self, name: str, fmt: str, data: NDArray[Any], layer: int = 0) -> None:
        """Set a matrix from fp32 rows or (uint8) GGUF blocks of `fmt`."""
        source, at, size = source_of(data)
        check(library().te_model_matrix(self.handle, layer, MATRICES[name], FORMATS[fmt], source, at, size))

    def vector(self, name: str, data: NDArray[np.float32], layer: int = 0) -> None:
        """Set a norm or a bias, fp32."""
        check(
            library().te_model_vector(self.handle, layer, VECTORS[name], address(data, np.float32), data.size)
        )

    def rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Rotary tables [max_positions, head_dim / 2], fp32."""
        check(
            library().te_model_rope(self.handle, address(cos, np.float32), address(sin, np.float32), cos.size)
        )

    def ready(self) -> None:
        """Check that nothing is missing; passes may follow."""
        check(library().te_model_ready(self.handle))

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return int(library().te_model_bytes(self.handle))

    def embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Raw rows of the embedding, [len(ids), H]."""
        out = np.empty((len(ids), self.config.hidden), np.float32)
        check(library().te_model_embed(self.handle, address(ids, np.int64), len(ids), out.ctypes.data))
        return out

    def forward(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        view: View | Lists,
        store: Store,
        *,
        logit_rows: Sequence[int],
        taps: Sequence[int] | None = None,
        logits: bool = True,
        best: bool = False,
    ) -> Output:
        """One pass over [M] rows; keys and values are written to `slots` first."""
        request = self.request(len(ids), logit_rows, taps, logits=logits, best=best)
        return self.run(view.pass_of(len(ids), ids, positions, slots), store, request)

    def request(
        self,
        rows: int,
        logit_rows: Sequence[int],
        taps: Sequence[int] | None = None,
        *,
        logits: bool = True,
        best: bool = False,
    ) -> Request:
        """Ask passes of `rows` rows for logits of `logit_rows`, with `best` their argmax, and features at `taps`.

        `best` without `logits` costs less: the logits never go to memory.
        """
        count = len(logit_rows)
        if count > len(self._best):
            raise NativeError(f"logits of {count} rows were asked for, there is room for {len(self._best)}")
        out = Output(
            self._room_for_logits()[:count] if logits else None,
            self._best[:count] if best else None,
            self._peaks[:count] if best else None,
            self._hidden[:count],
            self._room_for_features(rows, len(taps)) if taps is not None else None,
        )
        scored, levels = np.array(logit_rows, np.int64), None if taps is None else np.array(taps, np.int64)
        wanted = Wanted(
            address(scored, np.int64), count, address(out.logits, np.float32), address(out.best, np.int64),
            address(out.peaks, np.float32), address(out.hidden, np.float32), address(levels, np.int64),
            0 if taps is None else len(taps), address(out.features, np.float32),
        )  # fmt: skip
        return Request(wanted, out, (scored, levels))

    def run(self, job: Pass, store: Store, request: Request) -> Output:
        """One pass over the rows of `job`, as many as `request` was made for."""
        check(library().te_forward(self.handle, byref(job), byref(store.struct), byref(request.wanted)))
        return request.output

    def _room_for_logits(self) -> NDArray[np.float32]:
        if self._logits is None:
            self._logits = np.empty((len(self._best), self.config.vocabulary), np.float32)
        return self._logits

    def _room_for_features(self, rows: int, taps: int) -> NDArray[np.float32]:
        if taps not in self._features:
            self._features[taps] = np.empty((self.config.max_rows, taps * self.config.hidden), np.float32)
        return self._features[taps][:rows]
