"""The native kernels through ctypes: teams of threads, targets and draft heads.

Needs numpy only; torch tensors pass as pointers. Arrays are C-contiguous. Keys and values are bf16; numpy has no such
type, so they travel as uint16 (or as the address of a torch.bfloat16 tensor). Every refusal
of the native side becomes a NativeError with its sentence.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeeagle_edge.kernels.native.loader import library_path

VERSION = 1
MOST_THREADS = 256  # of a team
FORMATS = {"q8": 0, "q4_0": 1, "q4_1": 2}
MATRICES = {
    "q": 0,
    "k": 1,
    "v": 2,
    "o": 3,
    "gate": 4,
    "up": 5,
    "down": 6,
    "embedding": 16,
    "lm_head": 17,
    "fc": 18,
}
VECTORS = {
    "attention_norm": 32, "mlp_norm": 33, "q_bias": 34, "k_bias": 35, "v_bias": 36, "o_bias": 37, "q_norm": 38,
    "k_norm": 39, "final_norm": 48, "hidden_norm": 49,
}  # fmt: skip


class NativeError(RuntimeError):
    """The native library refused a call; the message says why."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelConfig(Structure):
    """`te_model_config`: shapes of a target; max_rows bounds the rows of one pass."""

    _fields_ = [
        *_fields(
            c_int64, "layers hidden intermediate heads kv_heads head_dim vocabulary max_positions max_rows"
        ),
        *_fields(c_float, "eps embedding_scale residual_scale logit_scale"),
    ]


class HeadConfig(Structure):
    """`te_head_config`: shapes of an EAGLE-3 head; `vocabulary` is the draft's."""

    _fields_ = [
        *_fields(c_int64, "hidden feature_width intermediate heads kv_heads head_dim vocabulary"),
        *_fields(c_int64, "max_positions max_rows max_scored"),
        ("eps", c_float),
        *_fields(c_int32, "norm_before_residual norm_output"),
    ]


class Pass(Structure):
    """`te_pass`: the rows of one pass and the slots they read, in reading order."""

    _fields_ = [
        ("rows", c_int64),
        *_fields(c_void_p, "ids positions slots prefix"),
        ("prefix_count", c_int64),
        ("tree", c_void_p),
        ("tree_count", c_int64),
        ("visible", c_void_p),
    ]


class KV(Structure):
    """`te_kv`: bf16 keys and values [layers, slots, kv_heads, head_dim]."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("slots", c_int64)]


class Wanted(Structure):
    """`te_wanted`: what a target pass hands back."""

    _fields_ = [
        ("logit_rows", c_void_p),
        ("logit_count", c_int64),
        *_fields(c_void_p, "logits best hidden taps"),
        ("tap_count", c_int64),
        ("features", c_void_p),
    ]


class HeadInput(Structure):
    """`te_head_input`: true features or the states of the level before."""

    _fields_ = _fields(c_void_p, "features hidden")


class HeadWanted(Structure):
    """`te_head_wanted`: what a draft pass hands back."""

    _fields_ = [
        *_fields(c_void_p, "hidden scored_rows"),
        *_fields(c_int64, "scored_count top"),
        *_fields(c_void_p, "log_probs ids"),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "te_version": (c_int64, []),
    "te_error": (c_char_p, []),
    "te_isas": (c_char_p, []),
    "te_team_create": (c_int32, [c_int64, c_char_p, c_int64, POINTER(c_void_p)]),
    "te_team_isa": (c_char_p, [c_void_p]),
    "te_team_destroy": (None, [c_void_p]),
    "te_model_create": (c_int32, [c_void_p, POINTER(ModelConfig), POINTER(c_void_p)]),
    "te_model_matrix": (c_int32, [c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_int64]),
    "te_model_vector": (c_int32, [c_void_p, c_int64, c_int32, c_void_p, c_int64]),
    "te_model_rope": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64]),
    "te_model_ready": (c_int32, [c_void_p]),
    "te_model_bytes": (c_int64, [c_void_p]),
    "te_model_embed": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "te_forward": (c_int32, [c_void_p, POINTER(Pass), POINTER(KV), POINTER(Wanted)]),
    "te_model_destroy": (None, [c_void_p]),
    "te_head_create": (c_int32, [c_void_p, POINTER(HeadConfig), POINTER(c_void_p)]),
    "te_head_matrix": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int64]),
    "te_head_vector": (c_int32, [c_void_p, c_int32, c_void_p, c_int64]),
    "te_head_rope": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64]),
    "te_head_ids": (c_int32, [c_void_p, c_void_p, c_int64]),
    "te_head_ready": (c_int32, [c_void_p]),
    "te_head_bytes": (c_int64, [c_void_p]),
    "te_draft": (c_int32, [c_void_p, POINTER(Pass), POINTER(KV), POINTER(HeadInput), POINTER(HeadWanted)]),
    "te_head_destroy": (None, [c_void_p]),
    "te_matmul": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p],
    ),
    "te_attention": (c_int32, [c_void_p, c_void_p, *[c_int64] * 3, POINTER(Pass), POINTER(KV), c_void_p]),
    "te_unpack": (c_int32, [c_int32, c_int32, c_void_p, *[c_int64] * 3, c_void_p]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; OSError when it was never built, NativeError when it belongs to another version."""
    lib = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    if lib.te_version() != VERSION:
        raise NativeError(
            f"the native library has interface {lib.te_version()}, this package needs {VERSION}"
        )
    return lib


def check(code: int) -> None:
    """Turn the return value of a native call into an exception."""
    if code != 0:
        raise NativeError(library().te_error().decode())


def available_isas() -> tuple[str, ...]:
    """Instruction sets this build and this machine both have, best first."""
    return tuple(library().te_isas().decode().split(","))


def address(array: np.ndarray[Any, Any] | None, dtype: Any) -> int | None:
    """Where an array lies, after checking that native code may read it as `dtype`."""
    if array is None:
        return None
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise NativeError(
            f"expected a contiguous array of {np.dtype(dtype)}, got {array.dtype} with strides {array.strides}"
        )
    return int(array.ctypes.data)


def _source(data: np.ndarray[Any, Any]) -> tuple[int, int, int]:
    """(source, address, bytes): fp32 rows are quantised, uint8 are GGUF blocks."""
    if data.dtype == np.uint8:
        return 1, address(data, np.uint8) or 0, data.nbytes
    return 0, address(data, np.float32) or 0, data.nbytes


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

    def matmul(
        self, fmt: str, data: np.ndarray[Any, Any], n: int, x: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """x [rows, k] float32 times a weight [n, k] -> [rows, n]; for tests."""
        source, at, size = _source(data)
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

    def attention(self, query: np.ndarray[Any, Any], reads: View, kv: Store) -> np.ndarray[Any, Any]:
        """query [rows, heads, head_dim] float32 (not scaled) over one layer's slots -> the same shape; for tests."""
        rows, heads, dim = query.shape
        out = np.empty_like(query)
        check(
            library().te_attention(
                self.handle, address(query, np.float32), heads, kv.kv_heads, dim, byref(reads.pass_of(rows)),
                byref(kv.struct), out.ctypes.data,
            )
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class View:
    """What rows read: `prefix` [T] slots, then `tree` [R] slots where `visible` [M, R] says so (None: causal)."""

    prefix: np.ndarray[Any, Any]  # int64
    tree: np.ndarray[Any, Any]  # int64
    visible: np.ndarray[Any, Any] | None = None  # bool or uint8

    def pass_of(
        self,
        rows: int,
        ids: np.ndarray[Any, Any] | None = None,
        positions: np.ndarray[Any, Any] | None = None,
        slots: np.ndarray[Any, Any] | None = None,
    ) -> Pass:
        """The C structure; it borrows the arrays, which must outlive the call."""
        visible = self.visible
        if visible is not None:
            if visible.shape != (rows, len(self.tree)):
                raise NativeError(f"`visible` is {visible.shape}, not {(rows, len(self.tree))}")
            visible = visible.view(np.uint8)
        for name, given in (("ids", ids), ("positions", positions), ("slots", slots)):
            if given is not None and len(given) != rows:
                raise NativeError(f"{name} has {len(given)} entries for {rows} rows")
        return Pass(
            rows, address(ids, np.int64), address(positions, np.int64), address(slots, np.int64),
            address(self.prefix, np.int64), len(self.prefix), address(self.tree, np.int64), len(self.tree),
            address(visible, np.uint8),
        )  # fmt: skip


class Store:
    """Addresses of the keys and values, bf16 [layers, slots, kv_heads, head_dim]; `keep` holds what owns them."""

    def __init__(self, keys: int, values: int, slots: int, kv_heads: int, keep: Sequence[Any] = ()) -> None:
        self.struct = KV(keys, values, slots)
        self.kv_heads = kv_heads
        self._keep = tuple(keep)

    @classmethod
    def allocate(cls, layers: int, slots: int, kv_heads: int, head_dim: int) -> Store:
        """A zeroed store of its own (uint16 arrays)."""
        keys, values = (np.zeros((layers, slots, kv_heads, head_dim), np.uint16) for _ in range(2))
        return cls(keys.ctypes.data, values.ctypes.data, slots, kv_heads, keep=(keys, values))


@dataclass(frozen=True)
class Output:
    """logits [R, V], best [R] (argmax), hidden [R, H] after the final norm, features [M, taps * H].

    Overwritten by the next pass.
    """

    logits: np.ndarray[Any, Any] | None
    best: np.ndarray[Any, Any] | None
    hidden: np.ndarray[Any, Any]
    features: np.ndarray[Any, Any] | None


class Model:
    """A target held by the native library. Fill it with `matrix` and `vector`, then call `ready`.

    A pass hands out views of buffers that the next pass overwrites: nothing is allocated while decoding. At most
    `scored_rows` rows of a pass can have logits.
    """

    def __init__(self, team: Team, config: ModelConfig, scored_rows: int = 64) -> None:
        self.team, self.config = team, config
        self._logits = np.empty((scored_rows, config.vocabulary), np.float32)
        self._best = np.empty(scored_rows, np.int64)
        self._hidden = np.empty((scored_rows, config.hidden), np.float32)
        self._features = np.empty(0, np.float32)  # grows to the widest choice of taps
        self.handle = c_void_p()
        check(library().te_model_create(team.handle, byref(config), byref(self.handle)))
        self._destroy = library().te_model_destroy

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)

    def matrix(self, name: str, fmt: str, data: np.ndarray[Any, Any], layer: int = 0) -> None:
        """Set a matrix from fp32 rows or (uint8) GGUF blocks of `fmt`."""
        source, at, size = _source(data)
        check(library().te_model_matrix(self.handle, layer, MATRICES[name], FORMATS[fmt], source, at, size))

    def vector(self, name: str, data: np.ndarray[Any, Any], layer: int = 0) -> None:
        """Set a norm or a bias, fp32."""
        check(
            library().te_model_vector(self.handle, layer, VECTORS[name], address(data, np.float32), data.size)
        )

    def rope(self, cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any]) -> None:
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

    def embed(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Raw rows of the embedding, [len(ids), H]."""
        out = np.empty((len(ids), self.config.hidden), np.float32)
        check(library().te_model_embed(self.handle, address(ids, np.int64), len(ids), out.ctypes.data))
        return out

    def forward(
        self,
        ids: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        slots: np.ndarray[Any, Any],
        view: View,
        store: Store,
        *,
        logit_rows: np.ndarray[Any, Any],
        taps: np.ndarray[Any, Any] | None = None,
        logits: bool = True,
        best: bool = False,
    ) -> Output:
        """One pass over [M] rows; keys and values are written to `slots` first."""
        rows, count = len(ids), len(logit_rows)
        if count > len(self._logits):
            raise NativeError(f"logits of {count} rows were asked for, there is room for {len(self._logits)}")
        out = Output(
            self._logits[:count] if logits else None,
            self._best[:count] if best else None,
            self._hidden[:count],
            self._room_for_features(rows, len(taps)) if taps is not None else None,
        )
        wanted = Wanted(
            address(logit_rows, np.int64), count, address(out.logits, np.float32), address(out.best, np.int64),
            address(out.hidden, np.float32), address(taps, np.int64), 0 if taps is None else len(taps),
            address(out.features, np.float32),
        )  # fmt: skip
        job = view.pass_of(rows, ids, positions, slots)
        check(library().te_forward(self.handle, byref(job), byref(store.struct), byref(wanted)))
        return out

    def _room_for_features(self, rows: int, taps: int) -> np.ndarray[Any, Any]:
        width = taps * int(self.config.hidden)
        if rows * width > self._features.size:
            self._features = np.empty(max(rows, int(self.config.max_rows)) * width, np.float32)
        return self._features[: rows * width].reshape(rows, width)


class Head:
    """An EAGLE-3 head held by the native library; `target` lends threads and, unless it brings its own, embeddings."""

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
        source, at, size = _source(data)
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
