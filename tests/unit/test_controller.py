"""The controller: trees sized by cost and chance, calibration, and a pause where drafting does not pay."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_engine, tiny_head, tiny_target

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.costs import CostModel, CostTable, Curve, load_table, save_table
from treeeagle_edge.drafting.growth import AdaptiveGrowth, Candidate
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.rounds import Round, TreeShape, tree_shape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

FLAT = CostTable(rows=(1, 32), verify=(0.010, 0.011), extend=0.0005, step=0.0005)  # rows are nearly free
STEEP = CostTable(rows=(1, 32), verify=(0.010, 0.320), extend=0.0005, step=0.0005)  # a row costs a whole pass
BOUNDS = tree_shape(6, 4, 0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def level(growth: AdaptiveGrowth, parent: Candidate | None, probs: list[float]) -> list[Candidate]:
    above = parent.log_prob if parent else 0.0
    depth = parent.depth + 1 if parent else 1
    return [
        Candidate(token, parent, depth, above + math.log(p), growth.score(parent, math.log(p)))
        for token, p in enumerate(probs)
    ]


def sized(table: CostTable, probs: list[float]) -> tuple[int, bool]:
    """(nodes kept of one level, whether a second level is drafted), where time is worth what plain decoding makes."""
    costs = CostModel(table)
    growth = AdaptiveGrowth(BOUNDS, costs, Acceptance(), 1 / costs.verify(1))
    candidates = level(growth, None, probs)
    deeper = bool(growth.expand(candidates, candidates))
    return len(growth.select(candidates)), deeper


def test_cheap_rows_make_wide_trees_and_dear_rows_small_ones() -> None:
    assert sized(FLAT, [0.5, 0.2, 0.1, 0.05]) == (4, True)
    assert sized(STEEP, [0.5, 0.2, 0.1, 0.05]) == (0, False)
    assert sized(STEEP, [0.999, 0.0002, 0.0001, 0.0001])[0] <= 1


def test_unlikely_candidates_are_left_out() -> None:
    middling = CostTable(rows=(1, 32), verify=(0.010, 0.040), extend=0.0005, step=0.0005)
    assert sized(middling, [0.9, 0.02, 0.01, 0.005]) == (1, True)


def test_time_is_worth_what_rounds_earn() -> None:
    """The same candidates: few of them pay where rounds earn much, more of them where they earn little."""
    sloped = CostTable(rows=(1, 32), verify=(0.010, 0.072), extend=0.0005, step=0.0005)  # 2 ms a row
    kept = {}
    for rate in (25.0, 75.0, 200.0):
        growth = AdaptiveGrowth(BOUNDS, CostModel(sloped), Acceptance(), rate)
        candidates = level(growth, None, [0.45, 0.3, 0.1, 0.07])
        growth.expand(candidates, candidates)
        kept[rate] = len(growth.select(candidates))
    assert kept == {25.0: 4, 75.0: 2, 200.0: 1}


def test_a_level_that_pays_only_with_the_next_ones_is_drafted() -> None:
    """A first level deeper earns 0.54 of a token and costs 0.8, but every later one costs 0.1."""
    costs, acceptance = CostModel(FLAT), Acceptance()
    tree = DraftTree((0, 1, 2, 3, 4), (-1, 0, 1, 2, 3), (0, 1, 2, 3, 4), (0.0,) * 5)
    for _ in range(300):
        acceptance.observe(tree, (0, 1, 2, 3, 4))  # walks go on, as the head was sure that they would
    costs._draft = Curve((1, 2, 3, 4, 5, 6), (0.001, 0.009, 0.010, 0.011, 0.012, 0.013))
    growth = AdaptiveGrowth(BOUNDS, costs, acceptance, 100.0)
    candidates = level(growth, None, [0.6])
    assert growth.expand(candidates, candidates)
    shallow = AdaptiveGrowth(TreeShape(2, 4, 32), costs, acceptance, 100.0)
    candidates = level(shallow, None, [0.6])
    assert not shallow.expand(candidates, candidates)


def test_a_weak_node_gives_its_place_to_a_deeper_one() -> None:
    """Rows beyond the third cost a whole token: a deeper node pays only in the place of a weaker one."""
    cliff = CostTable(rows=(1, 3, 4), verify=(0.010, 0.010, 0.020), extend=0.0001, step=0.0001)
    growth = AdaptiveGrowth(TreeShape(3, 4, 3, adaptive=True), CostModel(cliff), Acceptance(), 100.0)
    candidates = level(growth, None, [0.8, 0.1])
    assert growth.expand(candidates, candidates) == candidates[:1]
    deeper = level(growth, candidates[0], [0.7, 0.2])
    both = sorted([*candidates, *deeper], key=lambda candidate: -candidate.score)
    growth.expand(deeper, both)
    assert growth.select(both) == [candidates[0], deeper[0]]


def test_a_child_never_ranks_above_its_parent() -> None:
    acceptance = Acceptance()
    tree = DraftTree((0, 1, 2), (-1, 0, 1), (0, 1, 2), (0.0, -2.0, -2.1))
    for _ in range(500):
        acceptance.observe(tree, (0, 1, 2))  # what the head finds unlikely is always taken
    growth = AdaptiveGrowth(BOUNDS, CostModel(FLAT), acceptance, 100.0)
    parent = level(growth, None, [0.1])[0]
    assert all(child.score <= parent.score for child in level(growth, parent, [0.999, 0.5, 0.1, 0.001]))


@pytest.mark.parametrize("truth", [0.9, 0.5, 0.1])
def test_calibration_approaches_what_walks_show(truth: float) -> None:
    acceptance, draw = Acceptance(), random.Random(1)
    tree = DraftTree((0, 1), (-1, 0), (0, 1), (0.0, math.log(0.5)))
    assert acceptance.chance(math.log(0.5)) == pytest.approx(0.5)
    for _ in range(600):
        acceptance.observe(tree, (0, 1) if draw.random() < truth else (0,))
    assert acceptance.chance(math.log(0.5)) == pytest.approx(truth, abs=0.08)
    assert acceptance.continues(1) == pytest.approx(truth, abs=0.08)


@pytest.mark.parametrize("truth", [{0.9: 0.7, 0.5: 0.5, 0.1: 0.3}, {0.8: 0.95, 0.5: 0.7, 0.05: 0.1}])
def test_a_head_that_is_too_sure_or_too_modest_is_seen_through(truth: dict[float, float]) -> None:
    acceptance, draw = Acceptance(), random.Random(1)
    for _ in range(1500):
        for claimed, real in truth.items():
            tree = DraftTree((0, 1), (-1, 0), (0, 1), (0.0, math.log(claimed)))
            acceptance.observe(tree, (0, 1) if draw.random() < real else (0,))
    for claimed, real in truth.items():
        assert acceptance.chance(math.log(claimed)) == pytest.approx(real, abs=0.1)


def test_no_chance_is_certain() -> None:
    acceptance = Acceptance()
    assert 0.999 < acceptance.chance(0.0) < 1.0
    assert 0.0 < acceptance.chance(-1e6) < 0.001


def test_nodes_below_a_rejected_parent_teach_nothing() -> None:
    whole, first = Acceptance(), Acceptance()
    whole.observe(DraftTree((0, 1, 2), (-1, 0, 1), (0, 1, 2), (0.0, math.log(0.5), math.log(0.45))), (0,))
    first.observe(DraftTree((0, 1), (-1, 0), (0, 1), (0.0, math.log(0.5))), (0,))
    assert whole.calibration == first.calibration != Acceptance().calibration


def a_round(accepted: int, *, drafted: int = 4, draft_s: float = 0.002, verify_s: float = 0.012) -> Round:
    return Round(
        ids=(1,) * (accepted + 1),
        kind="tree",
        drafted=drafted,
        accepted=accepted,
        tree=None,
        walked=(0,),
        next_token=1,
        draft_s=draft_s,
        verify_s=verify_s,
        sample_s=0.0,
    )


def test_speculation_pauses_while_plain_decoding_is_faster_and_probes_again() -> None:
    """Expectations row 19: the controller switches off, and comes back when drafts are accepted again."""
    controller = Controller(FLAT)
    pauses = []
    for _ in range(400):
        growth = controller.growth(BOUNDS, ())
        if growth is None:
            pauses[-1] += 1
            controller.observe(replace(a_round(0, drafted=0, draft_s=0.0), kind="plain"), None)
        else:
            controller.observe(a_round(0), growth)
            if controller.paused:
                pauses.append(0)
    assert pauses[:3] == [24, 48, 96]
    rounds = 0
    while controller.paused:
        controller.observe(replace(a_round(0, drafted=0, draft_s=0.0), kind="plain"), None)
    for _ in range(200):  # the text turned easy: three tokens a round
        growth = controller.growth(BOUNDS, ())
        rounds += growth is not None
        controller.observe(a_round(2), growth)
    assert rounds == 200


def test_costs_follow_what_rounds_take() -> None:
    costs = CostModel(FLAT)
    assert costs.verify(1) == pytest.approx(0.010)
    assert costs.verify(32) == pytest.approx(0.011)
    assert costs.verify(64) == pytest.approx(0.022)  # beyond the table: in proportion
    assert costs.draft(0) == 0.0
    assert costs.draft(3) == pytest.approx(0.0015)
    for _ in range(200):
        costs.observe(a_round(1, drafted=0, draft_s=0.004, verify_s=0.020), levels=2)
    assert costs.verify(1) == pytest.approx(0.020, rel=0.01)
    assert costs.draft(2) == pytest.approx(0.004, rel=0.01)
    assert costs.verify(32) > 0.015  # what slowed one size down slows the others too


def test_a_curve_learns_its_shape_from_rounds_and_forgives_an_interruption() -> None:
    curve = Curve((1, 8, 16), (0.010, 0.013, 0.012))
    assert curve.at(8) == pytest.approx(0.012)  # more rows never take less
    for _ in range(400):
        curve.observe(1, 0.010)
        curve.observe(8, 0.010)
        curve.observe(16, 0.020)
    assert [curve.at(rows) for rows in (1, 8, 16)] == pytest.approx([0.010, 0.010, 0.020], rel=0.05)
    assert curve.at(12) == pytest.approx(0.015, rel=0.05)
    before = curve.at(8)
    curve.observe(8, 5.0)
    assert curve.at(8) < 1.25 * before


def test_tables_are_cached_and_damage_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "table.json"
    assert load_table(path) is None
    save_table(path, FLAT)
    assert load_table(path) == FLAT
    damaged = ["", "{}", "[]", '{"rows": 3}']
    for rows, verify, step in (
        ("[1]", "[]", 1), ("[]", "[]", 1), ("[0]", "[1]", 1), ("[8, 1]", "[1, 2]", 1), ("[1, 1]", "[1, 2]", 1),
        ('"1"', "[1]", 1), ("[1]", '"1"', 1), ("[1]", "[NaN]", 1), ("[1, 2]", "[1, NaN]", 1), ("[1]", "[0]", 1),
        ("[1]", "[1]", -1), ("[1]", "[1]", "Infinity"),
    ):  # fmt: skip
        damaged.append(f'{{"rows": {rows}, "verify": {verify}, "extend": 1, "step": {step}}}')
    for damage in damaged:
        path.write_text(damage)
        assert load_table(path) is None, damage
    save_table(Path("/proc/nowhere/table.json"), FLAT)  # cannot be written: no error


def test_what_a_busy_machine_took_is_not_cached(tmp_path: Path) -> None:
    save_table(tmp_path / "table.json", replace(FLAT, steady=False))
    assert load_table(tmp_path / "table.json") is None


def adaptive_engine(costs: CostTable | None = None) -> Engine:
    shape = replace(tree_shape(5, 3, 0), lookup=False)
    target = tiny_target(context=256)
    slots = 256 + shape.nodes + 1
    return Engine(target, tiny_head(target, slots=slots), context=256, slots=slots, tree=shape, costs=costs)


@pytest.mark.parametrize(("first", "more"), [(1.0, 2.0), (1.6, 1.0), (0.8, 1.5)])
def test_rows_may_slow_down_apart_from_the_pass(first: float, more: float) -> None:
    """A machine whose arithmetic is slower than when costs were measured, its memory not, or the other way round: some
    dozens of rounds tell, also of counts that never occurred.
    """
    curve, draw = Curve((1, 8, 16, 32), (0.010, 0.013, 0.020, 0.040)), random.Random(7)
    known = [None, *curve.up_to(32)]

    def true(count: int) -> float:
        return first * known[1] + more * (known[count] - known[1])  # type: ignore[operator]

    for _ in range(60):
        count = draw.choice((1, 3, 4, 6, 9))
        curve.observe(count, true(count) * draw.uniform(0.95, 1.05))
    for count in (1, 2, 5, 8, 12, 16, 24, 32):
        assert curve.at(count) == pytest.approx(true(count), rel=0.15)
    assert curve.up_to(32) == pytest.approx([curve.at(count) for count in range(1, 33)])


def test_one_count_alone_says_little_about_others() -> None:
    curve = Curve((1, 8, 32), (0.010, 0.013, 0.040))
    for _ in range(2000):
        curve.observe(1, 0.012)
    assert curve.at(1) == pytest.approx(0.012, rel=1e-3)
    assert 0.012 < curve.at(8) < 0.020
    for _ in range(2000):
        curve.observe(8, 0.020)
    assert curve.at(8) == pytest.approx(0.020, rel=1e-3)
    assert all(0 < a <= b < 1 for a, b in zip(curve.up_to(31), curve.up_to(32)[1:], strict=True))


@pytest.mark.parametrize("table", [FLAT, STEEP], ids=["flat", "steep"])
def test_an_adaptive_tree_gives_the_text_of_plain_decoding(table: CostTable) -> None:
    engine = adaptive_engine(table)
    for seed in range(3):
        params = SamplingParams(max_tokens=80, temperature=0.8 * seed, seed=seed)
        plain = list(engine.generate(PROMPT, params, speculate=False, reuse_prefix=False))
        tree = list(engine.generate(PROMPT, params, reuse_prefix=False))
        assert [t for r in tree for t in r.ids] == [t for r in plain for t in r.ids]


def test_pauses_keep_head_rows_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rounds decode plainly features wait; the cache afterwards equals a fresh prefill, head rows included."""
    engine = adaptive_engine(FLAT)
    assert engine._controller is not None
    monkeypatch.setattr(engine._controller, "growth", lambda bounds, stop_ids, match: None)
    rounds = list(engine.generate(PROMPT, SamplingParams(max_tokens=150)))
    assert {item.kind for item in rounds[1:]} == {"plain"}
    entry = engine._pool.cached[-1]
    assert entry.head_tokens == len(entry.tokens)
    fresh = tiny_engine(context=256)
    sequence = fresh._open(list(entry.tokens), with_head=True, reuse=False)
    fresh._passes.prefill(sequence, list(entry.tokens))
    ours, theirs = list(entry.slots)[1:], sequence.slots[1:]
    assert engine.head is not None
    assert fresh.head is not None
    torch.testing.assert_close(
        engine.head.store.keys[:, ours], fresh.head.store.keys[:, theirs], atol=1e-4, rtol=1e-4
    )


def test_shapes_by_number() -> None:
    assert tree_shape(5, 4, 16) == TreeShape(5, 4, 16)
    assert tree_shape(8, 4, 0).adaptive
