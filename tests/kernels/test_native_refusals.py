"""Bad shapes, slots, pointers and names are Python exceptions that say what is wrong."""

from __future__ import annotations

from ctypes import addressof, byref, c_double, c_int64
from typing import Any

import numpy as np
import pytest
from native_toys import DIM, HEAD_HEADS, KV, SLOTS, TAPS, VD, H, V, needs_native, store, toy, toy_head

from treeeagle_edge.kernels.native.head import TreeRoom
from treeeagle_edge.kernels.native.library import NativeError, available_isas, check, library
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import Growth, ModelConfig, TreeInput
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

GOOD: dict[str, Any] = {
    "ids": np.array([1, 2]), "positions": np.array([0, 1]), "slots": np.array([3, 4]),
    "prefix": np.zeros(0, np.int64), "tree": np.array([3, 4]), "visible": None, "parents": None,
    "logit_rows": np.array([1]), "taps": np.array([0, 1, 2]),
}  # fmt: skip


def run(model: Model, **changed: Any) -> None:
    it = {**GOOD, **changed}
    model.forward(
        it["ids"], it["positions"], it["slots"], View(it["prefix"], it["tree"], it["visible"], it["parents"]),
        store(), logit_rows=it["logit_rows"], taps=it["taps"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ids": np.array([1, V])}, r"ids\[1\] is 77, outside 0\.\.76"),
        ({"ids": np.array([-1, 0])}, r"ids\[0\] is -1"),
        ({"positions": np.array([0, SLOTS])}, r"positions\[1\]"),
        ({"slots": np.array([0, SLOTS])}, r"slots\[1\]"),
        ({"prefix": np.array([SLOTS])}, r"prefix\[0\]"),
        ({"tree": np.array([3, -4])}, r"tree\[1\]"),
        ({"tree": np.array([3])}, "tree_count"),
        ({"visible": np.array([[1, 0], [0, 0]], bool)}, "row 1 reads nothing"),
        ({"visible": np.ones((1, 2), bool)}, "visible"),
        ({"parents": np.array([-1, 1], np.int32)}, "parents is 1, outside -1..0"),
        ({"parents": np.array([-2, -1], np.int32)}, "parents is -2"),
        ({"parents": np.array([-1], np.int32)}, "parents. has 1 entries for 2 slots"),
        ({"parents": np.array([-1, 0])}, "int32"),
        ({"logit_rows": np.array([2])}, r"logit_rows\[0\]"),
        ({"taps": np.array([9])}, r"taps\[0\] is 9, outside 0\.\.3"),
        ({"ids": np.array([1, 2], np.int32)}, "int64"),
        ({"ids": np.arange(4)[::2]}, "contiguous"),
        ({"ids": np.array([1])}, "rows"),
    ],
)
def test_a_bad_pass_is_refused(changed: dict[str, Any], words: str) -> None:
    model = toy(available_isas()[0]).model
    run(model)
    if "ids" in changed and len(changed["ids"]) == 1:
        changed = {**changed, "positions": np.array([0, 1])}
    with pytest.raises(NativeError, match=words):
        run(model, **changed)
    run(model)  # and the model is still whole


def test_too_many_rows() -> None:
    model = toy(available_isas()[0]).model
    many = np.zeros(65, np.int64)
    with pytest.raises(NativeError, match=r"rows is 65, outside 1\.\.64"):
        run(model, ids=many, positions=many, slots=many, tree=many)


def test_unknown_instruction_set_names_those_there() -> None:
    with pytest.raises(NativeError, match="portable"):
        Team(1, "sse9")


def test_a_long_name_that_is_cut_within_a_letter_is_refused() -> None:
    for name in ("ä" * 300, "xä" * 300):
        with pytest.raises(NativeError, match="instruction set"):
            Team(1, name)


@pytest.mark.parametrize("threads", [0, -1, 1000])
def test_thread_count(threads: int) -> None:
    with pytest.raises(NativeError, match=r"threads is .*, outside 1\.\.256"):
        Team(threads)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden", 100, "hidden"),
        ("head_dim", 48, "head_dim"),
        ("kv_heads", 3, "kv_heads"),
        ("layers", 0, "layers"),
    ],
)
def test_impossible_shapes(field: str, value: int, words: str) -> None:
    config = ModelConfig(2, 96, 160, 4, 2, 32, 77, 16, 16, 1e-5, 1, 1, 1)
    setattr(config, field, value)
    with pytest.raises(NativeError, match=words):
        Model(Team(1), config)


def test_weights_of_the_wrong_size_or_value() -> None:
    model = toy(available_isas()[0]).model
    with pytest.raises(NativeError, match="takes 49152 bytes"):
        model.matrix("q", "q8", np.zeros((4, H), np.float32))
    with pytest.raises(NativeError, match="takes 7680 bytes, not 12"):
        model.matrix("q", "q4_1", np.zeros(12, np.uint8))
    bad = np.zeros((128, H), np.float32)
    bad[3, 4] = np.nan
    with pytest.raises(NativeError, match="finite"):
        model.matrix("q", "q8", bad)
    with pytest.raises(NativeError, match="layer is 3"):
        model.vector("mlp_norm", np.zeros(H, np.float32), 3)


def test_an_unfinished_model_is_refused() -> None:
    config = ModelConfig(2, 96, 160, 4, KV, 32, 77, 16, 16, 1e-5, 1, 1, 1)
    model = Model(Team(1), config)
    with pytest.raises(NativeError, match="layer 0 lacks"):
        model.ready()
    with pytest.raises(NativeError, match="not ready"):
        run(model)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"features": np.zeros((1, TAPS * H - 1), np.float32)}, "shape"),
        ({"scored_rows": np.array([1])}, r"scored_rows\[0\]"),
        ({"top": VD + 1}, "top"),
        ({"top": 0}, "top"),
        ({"slots": np.array([SLOTS])}, r"slots\[0\]"),
    ],
)
def test_a_bad_draft_pass_is_refused(changed: dict[str, Any], words: str) -> None:
    head = toy_head(available_isas()[0]).head
    good: dict[str, Any] = {
        "slots": np.array([0]), "features": np.zeros((1, TAPS * H), np.float32),
        "scored_rows": np.array([0]), "top": 2,
    }  # fmt: skip
    it = {**good, **changed}
    slots = it.pop("slots")
    at, view = Store.allocate(1, SLOTS, HEAD_HEADS, DIM), View(np.zeros(0, np.int64), np.array([0]))
    head.step(np.array([1]), np.array([0]), good["slots"], view, at, **{k: good[k] for k in it})
    with pytest.raises(NativeError, match=words):
        head.step(np.array([1]), np.array([0]), slots, view, at, **it)


NUMBERS = (c_double * 16)(*[1.0] * 16)  # costs, chances or counts, whichever is asked for
TRUE_ROWS = {
    "rows": 2, "ids": (c_int64 * 2)(1, 2), "table": (c_int64 * 5)(9, 8, 7, 6, 5), "prefix_count": 3, "position": 3,
    "features": (c_double * (TAPS * H))(), "feature_rows": (c_int64 * 2)(1, 0), "feature_count": 2,
    "scratch": 40, "scratch_count": 4,
}  # fmt: skip
RULE = {
    "depth": 3, "branching": 2, "nodes": 4, "stop_ids": (c_int64 * 1)(3), "stop_count": 1, "verify": NUMBERS,
    "draft": NUMBERS, "continues": NUMBERS, "calibration": NUMBERS, "least": 0.1,
}  # fmt: skip


def filled(struct: Any, values: dict[str, Any]) -> Any:
    """`struct` with numbers as they are and arrays by their addresses."""
    numbers = (int, float, type(None))
    return struct(**{k: v if isinstance(v, numbers) else addressof(v) for k, v in values.items()})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": 0}, "rows is 0, outside 1..32"),
        ({"rows": 33}, "rows is 33"),
        ({"ids": None}, "ids is null"),
        ({"ids": (c_int64 * 2)(1, V)}, r"ids\[1\] is 77, outside 0\.\.76"),
        ({"table": None}, "table is null"),
        ({"table": (c_int64 * 5)(9, 8, 7, SLOTS, 5)}, r"table\[3\] is 256"),
        ({"prefix_count": -1}, "prefix_count is -1"),
        ({"position": -1}, "position is -1"),
        ({"position": SLOTS - 3}, "position is 253, outside 0..252"),
        ({"features": None}, "features is null"),
        ({"feature_rows": (c_int64 * 2)(1, 2)}, r"feature_rows\[1\] is 2, outside 0\.\.1"),
        ({"feature_rows": None, "feature_count": 3}, r"feature_count \(3\) must equal rows \(2\)"),
        ({"feature_count": 0}, "feature_count is 0"),
        ({"scratch_count": 3}, "scratch_count is 3, outside 4..256"),
        ({"scratch": SLOTS - 3}, "scratch is 253, outside 0..252"),
        ({"branching": 0}, "branching is 0"),
        ({"branching": 17}, "branching is 17, outside 1..16"),
        ({"depth": 0}, "depth is 0"),
        ({"depth": 33}, "depth is 33"),
        ({"depth": 14}, r"\(depth - 1\) \* branching is 26, outside 0..24"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 8}, "capacity is 8, outside 9"),
        ({"stop_ids": None}, "stop_ids is null"),
        ({"stop_count": -1}, "stop_count is -1"),
        ({"draft": None}, "draft is null"),
        ({"continues": None}, "continues is null"),
        ({"calibration": None}, "calibration is null"),
        ({"least": 0.0}, "least is 0"),
        ({"least": float("nan")}, "least is -?nan"),
    ],
)
def test_a_bad_draft_tree_is_refused(changed: dict[str, Any], words: str) -> None:
    head = toy_head(available_isas()[0]).head
    at, room = Store.allocate(1, SLOTS, HEAD_HEADS, DIM), TreeRoom(8)

    def run(changed: dict[str, Any]) -> None:
        job = filled(TreeInput, {name: changed.get(name, value) for name, value in TRUE_ROWS.items()})
        rule = filled(Growth, {name: changed.get(name, value) for name, value in RULE.items()})
        head.draft_tree(job, at, rule, room)

    run({})
    with pytest.raises(NativeError, match=words):
        run(changed)
    run({"verify": None})  # and the head is still whole


def test_a_draft_tree_needs_a_head_a_store_and_room() -> None:
    lib, head = library(), toy_head(available_isas()[0]).head
    job, rule, room = filled(TreeInput, TRUE_ROWS), filled(Growth, RULE), TreeRoom(8)
    at = Store.allocate(1, SLOTS, HEAD_HEADS, DIM)
    given = [head.handle, byref(job), byref(at.struct), byref(rule), byref(room.struct)]
    check(lib.te_draft_tree(*given))
    for place, name in enumerate(("head", "input", "kv", "growth", "tree")):
        with pytest.raises(NativeError, match=f"{name} is null"):
            check(lib.te_draft_tree(*given[:place], None, *given[place + 1 :]))
    room.struct.log_probs = None
    with pytest.raises(NativeError, match="log_probs is null"):
        check(lib.te_draft_tree(*given))
