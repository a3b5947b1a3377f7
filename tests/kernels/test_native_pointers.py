"""Null and misaligned pointers and impossible counts, given to the C interface itself, are refused with a sentence."""

from __future__ import annotations

from ctypes import byref, c_void_p

import numpy as np
import pytest
from native_toys import (
    DIM,
    EPS,
    HEAD_HEADS,
    HEAD_WIDE,
    SLOTS,
    TAPS,
    VD,
    H,
    needs_native,
    store,
    toy,
    toy_head,
)

from treeeagle_edge.kernels.native.library import NativeError, available_isas, check, library
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.reading import Lists, View
from treeeagle_edge.kernels.native.structs import HeadConfig, Pass, Wanted
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

IDS, POSITIONS, PLACES = np.array([1, 2]), np.array([0, 1]), np.array([3, 4])
NONE = np.zeros(0, np.int64)


def two_rows() -> Pass:
    return View(NONE, PLACES).pass_of(2, IDS, POSITIONS, PLACES)


def run(model: Model, job: Pass, wanted: Wanted) -> None:
    at = store()  # lives as long as the call
    check(library().te_forward(model.handle, byref(job), byref(at.struct), byref(wanted)))


def test_misaligned_memory_is_refused() -> None:
    model = toy(available_isas()[0]).model
    raw = np.zeros(33, np.uint8)
    ids = raw[1:17].view(np.int64) if raw.ctypes.data % 8 == 0 else raw[:16].view(np.int64)
    with pytest.raises(NativeError, match="ids is not aligned"):
        run(model, View(NONE, PLACES).pass_of(2, ids, POSITIONS, PLACES), Wanted())


@pytest.mark.parametrize("missing", ["ids", "positions", "slots", "keys", "values"])
def test_null_pointers_are_refused(missing: str) -> None:
    model, at = toy(available_isas()[0]).model, store()
    job = two_rows()
    setattr(at.struct if missing in ("keys", "values") else job, missing, None)
    with pytest.raises(NativeError, match=f"{missing} is null"):
        check(library().te_forward(model.handle, byref(job), byref(at.struct), byref(Wanted())))


@pytest.mark.parametrize("output", ["logits", "best", "peaks", "hidden", "features"])
def test_misaligned_outputs_are_refused(output: str) -> None:
    model = toy(available_isas()[0]).model
    request = model.request(2, range(2), (1,), best=True)
    run(model, two_rows(), request.wanted)
    setattr(request.wanted, output, getattr(request.wanted, output) + 1)
    with pytest.raises(NativeError, match=f"{output} is not aligned"):
        run(model, two_rows(), request.wanted)


def test_misaligned_lists_are_refused() -> None:
    model = toy(available_isas()[0]).model
    lists, counts = np.array([[3], [4]], np.int32), np.ones(2, np.int32)
    job = Lists(lists, counts).pass_of(2, IDS, POSITIONS, PLACES)
    job.own += 2
    with pytest.raises(NativeError, match="own is not aligned"):
        run(model, job, Wanted())


@pytest.mark.parametrize("count", [-1, 2**31, 2**62, -(2**63)])
def test_counts_beyond_all_measure_are_refused(count: int) -> None:
    """Before they are multiplied, which could make them small again."""
    it, lib, out = toy_head(available_isas()[0]), library(), c_void_p()
    target = it.target.model
    config = HeadConfig(H, TAPS * H, HEAD_WIDE, HEAD_HEADS, HEAD_HEADS, DIM, VD, SLOTS, 32, 16, 24, EPS)
    for field in [
        "hidden",
        "intermediate",
        "heads",
        "vocabulary",
        "max_rows",
        "max_positions",
        "max_expanded",
    ]:
        changed = HeadConfig.from_buffer_copy(config)
        setattr(changed, field, count)
        with pytest.raises(NativeError, match=rf"{field}.* is {count}, outside"):
            check(lib.te_head_create(target.handle, byref(changed), byref(out)))
    query, at = np.zeros((1, 2, DIM), np.float32), store()
    for field in ("rows", "tree_count", "prefix_count"):
        job = View(NONE, PLACES[:1]).pass_of(1)
        setattr(job, field, count)
        given = query.ctypes.data, 2, 2, DIM, byref(job), byref(at.struct), query.ctypes.data
        with pytest.raises(NativeError, match=f"{field} is {count}, outside"):
            check(lib.te_attention(target.team.handle, *given))
    with pytest.raises(NativeError, match=f"count is {count}, outside"):
        check(lib.te_model_embed(target.handle, IDS.ctypes.data, count, query.ctypes.data))


def test_handles_and_configurations_that_are_null_are_refused() -> None:
    lib, out = library(), c_void_p()
    with pytest.raises(NativeError, match="null"):
        check(lib.te_forward(None, None, None, None))
    with pytest.raises(NativeError, match="null"):
        check(lib.te_model_create(Team(1).handle, None, byref(out)))
    with pytest.raises(NativeError, match="null"):
        check(lib.te_head_create(None, None, byref(out)))
