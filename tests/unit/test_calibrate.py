"""What passes cost is measured in a second, or in one plain pass, whatever the model's size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_models import tiny_head, tiny_target

from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.engine import calibrate
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.rounds import Round, tree_shape

LEVEL = 0.05  # of a plain pass


class Machine:
    """A machine whose clock moves only by what passes are said to take."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        *,
        running: float = 1.0,
        level: float = LEVEL,
        cold: float = 0.0,
    ) -> None:
        """`seconds` by rows; of which the thread runs a share of `running`. The first pass waits for `cold` more."""
        self.now = self.ran = 0.0
        self.verified: list[int] = []
        self.drafted: list[int] = []
        self._seconds, self._running, self._cold = seconds, running, cold
        self._level = level * seconds(1)

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.ran

    def verify(self, rows: int) -> float:
        waited = 0.0 if self.verified else self._cold
        self.now += waited
        self.verified.append(rows)
        return waited + self._pass(self._seconds(rows))

    def draft(self, levels: int) -> float:
        self.drafted.append(levels)
        return self._pass(self._level * levels)

    def _pass(self, seconds: float) -> float:
        self.now += seconds
        self.ran += seconds * self._running
        return seconds


def measured(monkeypatch: pytest.MonkeyPatch, machine: Machine, *, head: bool = True) -> CostTable:
    monkeypatch.setattr(calibrate, "time", machine)
    prompt = calibrate._prompt_seconds

    def first(*given: object) -> float:
        prompt(*given)  # type: ignore[arg-type]
        machine.now = machine.ran = 0.0
        return machine.verify(1)

    monkeypatch.setattr(calibrate, "_prompt_seconds", first)
    monkeypatch.setattr(calibrate, "_verify_seconds", lambda passes, sequence, rows: machine.verify(rows))
    monkeypatch.setattr(
        calibrate, "_draft_seconds", lambda passes, sequence, levels, wide: machine.draft(levels)
    )
    if head:
        table = adaptive_engine().costs
        assert table is not None
        return table
    passes = Passes(tiny_target(context=256), None, slots=300, fixed_rows=None)
    return calibrate.measure_costs(passes, KVPool(300), 256, tree_shape(5, 3, 0))


def adaptive_engine() -> Engine:
    shape = tree_shape(5, 3, 0)
    target = tiny_target(context=256)
    slots = 256 + shape.nodes + 1
    return Engine(target, tiny_head(target, slots=slots), context=256, slots=slots, tree=shape)


def sloped(plain: float, row: float = 0.1) -> Callable[[int], float]:
    return lambda rows: plain * (1.0 + row * (rows - 1))


def test_costs_are_measured_where_none_are_given() -> None:
    engine = adaptive_engine()
    table = engine.costs
    assert table is not None
    assert table.rows[0] == 1
    assert table.rows[-1] == 32
    assert min(*table.verify, table.extend, table.step) > 0
    assert engine.usage().used_slots == 0


@pytest.mark.parametrize("row", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    "plain", [0.004, 0.02, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.45, 0.6, 0.9, 0.99, 1.0, 1.5, 30.0]
)
def test_it_takes_a_second_or_one_plain_pass(
    monkeypatch: pytest.MonkeyPatch, plain: float, row: float
) -> None:
    machine = Machine(sloped(plain, row))
    table = measured(monkeypatch, machine)
    assert machine.now <= max(1.0, plain) + 1e-9
    assert table.steady  # later starts need not measure again
    assert table.rows[-1] == 32
    assert list(table.verify) == sorted(table.verify)


def test_a_small_model_has_every_size_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(sloped(0.004))
    table = measured(monkeypatch, machine)
    assert table.rows == (1, 2, 4, 8, 12, 16, 24, 32)
    assert table.verify == pytest.approx([sloped(0.004)(rows) for rows in table.rows])
    assert (table.extend, table.step) == pytest.approx((0.004 * LEVEL, 0.004 * LEVEL))
    assert min(machine.verified.count(rows) for rows in table.rows) > 1


def test_a_smaller_size_is_measured_where_one_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(sloped(0.2))
    table = measured(monkeypatch, machine)
    assert set(machine.verified) == {1, 2, 4}
    assert table.rows == (1, 2, 4, 32)
    assert table.verify[:3] == pytest.approx((0.2, 0.22, 0.26))


@pytest.mark.parametrize(("row", "expected"), [(0.02, 0.1), (0.5, 0.5)])
def test_rows_beyond_those_measured_add_what_rows_added_and_a_tenth_at_least(
    monkeypatch: pytest.MonkeyPatch, row: float, expected: float
) -> None:
    table = measured(monkeypatch, Machine(sloped(0.2, row)))
    last, most = table.rows[-2:]
    assert (last < 8, most) == (True, 32)
    assert table.verify[-1] - table.verify[-2] == pytest.approx(0.2 * expected * (most - last))


def test_of_a_very_large_model_one_plain_pass_is_measured_and_the_rest_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(sloped(2.0))
    table = measured(monkeypatch, machine)
    assert (machine.verified, machine.drafted) == ([1], [])
    assert table.rows == (1, 32)
    assert table.verify == pytest.approx((2.0, 2.0 * 4.1))
    target = tiny_target(context=256)
    share = tiny_head(target, slots=300).nbytes / target.nbytes
    assert table.extend == pytest.approx(2.0 * min(share, 1.0))
    assert table.step == pytest.approx(table.extend)


def test_what_was_assumed_is_corrected_by_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_head_share", lambda passes: 0.05)
    costs = CostModel(measured(monkeypatch, Machine(sloped(2.0))))
    assert costs.draft(3) == pytest.approx(0.3)
    true = sloped(2.0, 0.03)
    for rows in [1, 5, 9, 13] * 15:
        round_ = Round(
            ids=(1,),
            kind="tree",
            drafted=rows - 1,
            accepted=0,
            tree=None,
            walked=(),
            next_token=1,
            draft_s=0.45,
            verify_s=true(rows),
            sample_s=0.0,
        )
        costs.observe(round_, levels=3)
    for rows in (1, 8, 16, 32):
        assert costs.verify(rows) == pytest.approx(true(rows), rel=0.1)
    assert costs.draft(3) == pytest.approx(0.45, rel=0.1)


def test_drafts_of_a_large_model_are_measured_where_no_second_pass_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(sloped(0.6), level=0.02)
    monkeypatch.setattr(calibrate, "_head_share", lambda passes: 0.04)
    table = measured(monkeypatch, machine)
    assert (machine.verified, machine.drafted) == ([1], [1, 4])
    assert (table.extend, table.step) == pytest.approx((0.012, 0.012))


def test_without_a_head_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(sloped(0.01))
    table = measured(monkeypatch, machine, head=False)
    assert (machine.drafted, table.extend, table.step) == ([], 0.0, 0.0)


@pytest.mark.parametrize(("running", "steady"), [(1.0, True), (0.9, True), (0.5, False)])
def test_one_long_pass_is_relied_on_unless_its_thread_had_to_wait(
    monkeypatch: pytest.MonkeyPatch, running: float, steady: bool
) -> None:
    assert measured(monkeypatch, Machine(sloped(2.0), running=running)).steady is steady


@pytest.mark.parametrize(
    ("times", "steady"), [((3.0, 1.0, 1.1), True), ((3.0, 1.0, 1.5), False), ((1.0,), False)]
)
def test_short_passes_are_steady_where_the_fastest_times_agree(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], steady: bool
) -> None:
    taken: dict[int, int] = {}

    def seconds(rows: int) -> float:
        at = taken[rows] = taken.get(rows, -1) + 1
        return 0.01 * times[at] if at < len(times) else 0.05

    if len(times) == 1:
        monkeypatch.setattr(calibrate, "_TIME", 0.0)  # no second measurement
    machine = Machine(seconds)
    taken.clear()
    table = measured(monkeypatch, machine)
    assert table.steady is steady
    assert table.verify[0] == pytest.approx(0.01)


@pytest.mark.parametrize(("plain", "steady"), [(0.3, True), (0.6, False)])
def test_a_first_pass_that_waited_for_a_disk_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, plain: float, steady: bool
) -> None:
    table = measured(monkeypatch, Machine(sloped(plain), cold=plain / 2))
    assert table.steady is steady
    assert table.verify[0] == pytest.approx(plain if steady else 1.5 * plain)
