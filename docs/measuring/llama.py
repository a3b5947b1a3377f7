"""llama.cpp as an arm, through llama-cpp-python: passes over given ids, without its sampling loop."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from measuring.timing import Decoded
from treeeagle_edge.errors import InputError

MAKING = "llama.cpp's own quantiser, Q8_0 of the values of the same file"


def library() -> Any:
    """The module `llama_cpp`. Raises InputError where it is not installed."""
    try:
        return import_module("llama_cpp")
    except ImportError as error:
        raise InputError(
            "llama-cpp-python, the other arm of this comparison, is not installed",
            "pip install llama-cpp-python (it compiles for some minutes), or leave its parts out with --parts",
        ) from error


def write_eight_bit(source: Path, folder: Path, threads: int) -> Path:
    """A Q8_0 GGUF in `folder` with the values that `source` has."""
    lib = library()
    path = folder / f"{source.stem}.Q8_0.gguf"
    wanted = lib.llama_model_quantize_default_params()
    wanted.ftype = lib.LLAMA_FTYPE_MOSTLY_Q8_0
    wanted.allow_requantize = True
    wanted.nthread = threads
    _quieten(lib)
    if lib.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(wanted)) != 0:
        raise InputError(f"llama.cpp could not write {source.name} at 8 bits", "see what it printed above")
    return path


class LlamaArm:
    """One GGUF. Seconds count `llama_decode` and the wait for its end, nothing else."""

    def __init__(self, path: Path, *, threads: int, context: int, flash_attention: bool) -> None:
        """`context` tokens; a prompt goes in as one batch, which llama.cpp cuts into pieces of 512."""
        self._lib = library()
        _quieten(self._lib)
        self._llama = self._lib.Llama(
            str(path), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads,
            flash_attn=flash_attention, verbose=False,
        )  # fmt: skip
        self._vocab: int = self._llama.n_vocab()

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds to read `ids`, from an empty memory, to the logits of the last one."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._llama.ctx), True)
        return self._pass(ids)

    def answer(self, ids: Sequence[int], tokens: int) -> Decoded:
        """Greedy, exactly `tokens` tokens: end tokens do not end it. Choosing a token is not timed."""
        prefill = self.prefill(ids)
        found = [self._likeliest()]
        seconds = 0.0
        while len(found) < tokens:
            seconds += self._pass(found[-1:])
            found.append(self._likeliest())
        return Decoded(tuple(found), prefill, seconds)

    def _pass(self, ids: Sequence[int]) -> float:
        row = (ctypes.c_int32 * len(ids))(*ids)
        batch = self._lib.llama_batch_get_one(row, len(ids))
        started = time.perf_counter()
        code = self._lib.llama_decode(self._llama.ctx, batch)
        self._lib.llama_synchronize(self._llama.ctx)
        seconds = time.perf_counter() - started
        if code != 0:
            raise InputError(
                f"llama.cpp refused a pass of {len(ids)} tokens with code {code}", "try fewer tokens"
            )
        return seconds

    def _likeliest(self) -> int:
        logits = self._lib.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


_silent: Any = None  # the callback must outlive every call


def _quieten(lib: Any) -> None:
    """Drop llama.cpp's log, which would end up between the lines of the report."""
    global _silent
    if _silent is None:
        _silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(_silent, None)
