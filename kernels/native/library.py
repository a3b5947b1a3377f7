"""The native library through ctypes: its functions, and refusals as exceptions. Needs numpy only."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels.native.loader import path_to_load
from treeeagle_edge.kernels.native.structs import (
    KV,
    Growth,
    HeadConfig,
    HeadInput,
    HeadWanted,
    ModelConfig,
    Pass,
    Sampling,
    Tree,
    TreeInput,
    Wanted,
)

VERSION = 6


class NativeError(CannotRunError):
    """The native library refused a call; the message says why."""


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
    "te_draft_tree": (
        c_int32,
        [c_void_p, POINTER(TreeInput), POINTER(KV), POINTER(Growth), POINTER(Tree)],
    ),
    "te_head_destroy": (None, [c_void_p]),
    "te_draw": (
        c_int32,
        [c_void_p, c_void_p, c_int64, POINTER(Sampling), c_uint64, POINTER(c_int64)],
    ),
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
    lib = ctypes.CDLL(str(path_to_load()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name, None)
        if function is None:
            raise NativeError(f"the native library has no function {name}")
        function.restype, function.argtypes = result, arguments
    if lib.te_version() != VERSION:
        raise NativeError(
            f"the native library has interface {lib.te_version()}, this package needs {VERSION}"
        )
    return lib


def check(code: int) -> None:
    """Turn the return value of a native call into an exception."""
    if code != 0:
        raise NativeError(library().te_error().decode(errors="replace"))


def available_isas() -> tuple[str, ...]:
    """Instruction sets this build and this machine both have, best first."""
    return tuple(library().te_isas().decode().split(","))


def address(array: NDArray[Any] | None, dtype: Any) -> int | None:
    """Where an array lies, after checking that native code may read it as `dtype`."""
    if array is None:
        return None
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise NativeError(
            f"expected a contiguous array of {np.dtype(dtype)}, got {array.dtype}, strides {array.strides}"
        )
    return int(array.ctypes.data)


def source_of(data: NDArray[Any]) -> tuple[int, int, int]:
    """(source, address, bytes): fp32 rows are quantised, uint8 are GGUF blocks."""
    if data.dtype == np.uint8:
        return 1, address(data, np.uint8) or 0, data.nbytes
    return 0, address(data, np.float32) or 0, data.nbytes
