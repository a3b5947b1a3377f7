"""The run of the GPU check: sections one after another, whatever becomes of the one before or of its process."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from treeeagle_edge.errors import CannotRunError, InputError, UsageError
from treeeagle_edge.gpu_check import process as gpu_check_process
from treeeagle_edge.gpu_check import run as gpu_check
from treeeagle_edge.gpu_check.probe import ContextLostError, Finding, Probe
from treeeagle_edge.gpu_check.process import Ended, Order, run_worker
from treeeagle_edge.gpu_check.report import render
from treeeagle_edge.gpu_check.run import PLAN, CheckOptions, has_failed, run_check
from treeeagle_edge.gpu_check.sizes import SIZES
from treeeagle_edge.gpu_check.worker import SECTIONS, run_section

CARD = "Some Card (sm_86)"
ENVIRONMENT: dict[str, Any] = {
    "device": "cuda:0",
    "card": "Some Card",
    "architecture": "sm_86",
    "driver": "580.95.05",
    "memory_bytes": 12_000_000_000,
    "multiprocessors": 70,
    "l2_bytes": 6_000_000,
    "versions": {"torch": "2.13.0", "triton": None},
}
Worker = Callable[[Order], Iterator[Any]]


def start(name: str) -> dict[str, Any]:
    return {"event": "start", "name": name}


def end(**changes: Any) -> dict[str, Any]:
    section = {"status": "ok", "reason": None, "seconds": 1.0, "rows": [], "notes": [], "problems": []}
    return {"event": "end", "section": {**section, **changes}, "facts": {"bandwidth": 1e9}}


def well(order: Order) -> Iterator[Any]:
    for name, _ in order.sections:
        yield start(name)
        yield end()
    yield Ended(0, "")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Worker], list[Order]]:
    """Scripts of workers in place of processes, taken in turn, and the orders that they were given."""
    scripts: list[Worker] = []
    orders: list[Order] = []

    def run(order: Order, until: float) -> Iterator[Any]:
        orders.append(order)
        yield {"event": "environment", "environment": ENVIRONMENT, "card": CARD}
        yield from scripts[len(orders) - 1](order)

    monkeypatch.setattr(gpu_check, "run_worker", run)
    return scripts, orders


def checked(*sections: str, save: Path | None = None, **options: Any) -> dict[str, Any]:
    wanted = CheckOptions("cuda:0", sections=sections, **options)
    return run_check(wanted, progress=lambda line: None, save=save)


def states(document: dict[str, Any]) -> dict[str, str]:
    return {section["name"]: section["status"] for section in document["sections"]}


def test_every_planned_section_has_its_function() -> None:
    assert [plan.name for plan in PLAN] == list(SECTIONS)


def test_one_worker_does_all_sections_in_order_each_with_its_limit(workers: Any) -> None:
    scripts, orders = workers
    scripts.append(well)
    document = checked()
    assert states(document) == {plan.name: "ok" for plan in PLAN}
    assert orders[0].sections == tuple((plan.name, plan.seconds) for plan in PLAN)
    assert orders[0].triton and orders[0].device == "cuda:0" and orders[0].size == "full"
    assert 0 < orders[0].stop - time.time() <= 7.5 * 60
    assert document["facts"] == {"bandwidth": 1e9} and document["schema"] == "treeeagle-gpu-check/1"
    assert {section["card"] for section in document["sections"]} == {CARD}
    assert not has_failed(document)


def test_a_section_that_takes_its_process_along_stops_no_other(workers: Any, tmp_path: Path) -> None:
    """What it had found is kept; the rest goes on in a new process, with what is known."""
    scripts, orders = workers

    def dies(order: Order) -> Iterator[Any]:
        yield start("bandwidth")
        yield end()
        yield start("kernels")
        yield {"event": "rows", "rows": [{"kernel": "RMSNorm", "result": "ok"}]}
        yield Ended(-11, "some noise\nSegmentation fault")

    scripts += [dies, well]
    document = checked("bandwidth", "kernels", "parity", save=tmp_path / "found.json")
    assert states(document) == {"bandwidth": "ok", "kernels": "FAILED", "parity": "ok"}
    failed = document["sections"][1]
    assert failed["reason"] == "its process ended with -11: Segmentation fault"
    assert failed["rows"] == [{"kernel": "RMSNorm", "result": "ok"}]
    assert "some noise" in failed["problems"][0]
    assert [name for name, _ in orders[1].sections] == ["parity"]
    assert orders[1].facts == {"bandwidth": 1e9}
    assert has_failed(document)
    assert json.loads((tmp_path / "found.json").read_text()) == document
    assert "| FAILED |" in (tmp_path / "found.md").read_text()


def test_a_device_that_answers_no_more_gets_a_new_process(workers: Any) -> None:
    """The section `kernels` tries some that no other calls: what it meets says nothing about `parity`."""
    scripts, orders = workers

    def loses(order: Order) -> Iterator[Any]:
        yield start(order.sections[0][0])
        yield end(status="FAILED", reason="the device answers no more", problems=["Traceback"])
        yield Ended(9, "")

    scripts += [loses, well]
    assert states(checked("kernels", "parity")) == {"kernels": "FAILED", "parity": "ok"}
    assert [order.triton for order in orders] == [True, True]
    orders.clear()
    scripts[:] = [loses, loses, well]
    assert states(checked("kernels", "parity", "speed")) == {
        "kernels": "FAILED",
        "parity": "FAILED",
        "speed": "ok",
    }
    assert [order.triton for order in orders] == [True, True, False]


def test_a_section_that_is_late_may_go_on_while_it_reports_rows(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for ever: 20 seconds after the end of the whole, everything ends."""
    scripts, _ = workers
    now, allowed = [started := time.perf_counter()], list[float]()
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: now[0])

    def late(order: Order) -> Iterator[Any]:
        yield start("parity")
        for after in (30, 105, 123, 500):
            now[0] = started + after
            allowed.append((yield {"event": "rows", "rows": []}) - started)
        yield end()
        yield Ended(0, "")

    scripts.append(late)
    checked("parity")
    # 90 seconds of its own, 450 for the whole
    assert allowed == pytest.approx([110, 125, 143, 470], abs=2)


def test_a_worker_that_starts_late_may_not_take_its_whole_time_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the check ends within eight minutes, whatever a second process does: 7.5 of them and 20 seconds."""
    now, allowed = [started := time.perf_counter()], list[float]()
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: now[0])

    def run(order: Order, until: float) -> Iterator[Any]:
        allowed.append(until - started)
        now[0] = started + 440
        yield {"event": "environment", "environment": ENVIRONMENT, "card": CARD}
        if len(allowed) == 1:
            yield start("kernels")
            yield Ended(-11, "")
        yield Ended(None, "")

    monkeypatch.setattr(gpu_check, "run_worker", run)
    checked("kernels", "parity")
    assert allowed == pytest.approx([120, 470], abs=2)


def test_a_worker_that_cannot_start_fails_everything_with_its_last_words(workers: Any) -> None:
    scripts, orders = workers
    scripts.append(lambda order: iter([Ended(1, "Traceback\nImportError: libcudart.so")]))
    document = checked("kernels", "parity")
    assert states(document) == {"kernels": "FAILED", "parity": "FAILED"} and len(orders) == 1
    assert document["sections"][0]["reason"].endswith("ended with 1: ImportError: libcudart.so")


def test_what_finds_no_time_is_skipped_and_no_failure(workers: Any) -> None:
    scripts, _ = workers

    def slow(order: Order) -> Iterator[Any]:
        yield start("kernels")
        yield end()
        yield Ended(0, "")

    scripts.append(slow)
    document = checked("kernels", "parity")
    assert states(document) == {"kernels": "ok", "parity": "skipped"} and not has_failed(document)
    assert "time was over" in document["sections"][1]["reason"]
    assert states(checked("kernels", minutes=0.05)) == {"kernels": "skipped"}


def test_unknown_sections_and_unwritable_files_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no section kernel") as caught:
        checked("kernel")
    assert "kernels" in str(caught.value.hint)
    with pytest.raises(InputError, match="cannot be written"):
        checked(save=tmp_path / "missing" / "found.json")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a program as a worker; gives its events and its end, each event with so many seconds for the next."""

    def run(code: str, seconds: float = 60) -> list[Any]:
        (tmp_path / "pretended_worker.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(gpu_check_process, "WORKER", "pretended_worker")
        order = Order("cpu", "test", True, (("kernels", 1.5),), 0.0)
        worker = run_worker(order, time.perf_counter() + 60)
        found: list[Any] = [next(worker)]
        while not isinstance(found[-1], Ended):
            found.append(worker.send(time.perf_counter() + seconds))
        return found

    return run


def test_a_worker_process_is_heard_to_its_end(program: Any) -> None:
    first, ended = program(
        """
        import json, sys
        from treeeagle_edge.gpu_check.process import Order
        order = Order.read(sys.argv[1])
        print(json.dumps({"sections": order.sections, "triton": order.triton}), flush=True)
        print("broken", file=sys.stderr)
        sys.exit(7)
        """
    )
    assert first == {"sections": [["kernels", 1.5]], "triton": True}
    assert ended == Ended(7, "broken\n") and ended.reason == "its process ended with 7: broken"


def test_a_worker_process_that_never_ends_is_ended(program: Any) -> None:
    began = time.perf_counter()
    first, ended = program("import time\nprint('{}', flush=True)\ntime.sleep(600)\n", seconds=0.2)
    assert first == {} and ended.code is None and "took too long" in ended.reason
    assert time.perf_counter() - began < 120


def a_probe(**changes: Any) -> Probe:
    return Probe(torch.device("cpu"), SIZES["test"], **changes)


def test_a_row_that_fails_leaves_the_others() -> None:
    reported: list[Any] = []
    finding, probe = Finding(), a_probe(report=reported.extend)

    def refuses() -> dict[str, Any]:
        raise CannotRunError("bitsandbytes cannot be imported", "install it")

    probe.attempt(finding, {"name": "one", "error": None}, lambda: {"error": 0.5})
    probe.attempt(finding, {"name": "two", "error": None}, lambda: {"error": 1 / 0})
    probe.attempt(finding, {"name": "three", "error": None}, refuses)
    probe.attempt(finding, {"name": "four"}, lambda: [{"rows": 1}, {"rows": 8, "result": "FAILED: wrong"}])
    assert (
        finding.rows
        == reported
        == [
            {"name": "one", "error": 0.5, "result": "ok"},
            {"name": "two", "error": None, "result": "FAILED: division by zero"},
            {"name": "three", "error": None, "result": "not on this device: bitsandbytes cannot be imported"},
            {"name": "four", "rows": 1, "result": "ok"},
            {"name": "four", "rows": 8, "result": "FAILED: wrong"},
        ]
    )
    (problem,) = finding.problems
    assert problem.startswith("Traceback") and "ZeroDivisionError" in problem


def raising(error: Exception) -> Callable[[Probe, Finding], None]:
    def section(probe: Probe, finding: Finding) -> None:
        finding.rows.append({"result": "ok"})
        raise error

    return section


@pytest.mark.parametrize(
    ("error", "status", "reason", "lost"),
    [
        (RuntimeError("CUDA out of memory\nmore"), "FAILED", "CUDA out of memory", False),
        (CannotRunError("no card", "buy one"), "not on this device", "no card", False),
        (ContextLostError("illegal access"), "FAILED", "the device answers no more: illegal access", True),
    ],
)
def test_a_section_that_raises_is_reported_with_what_it_had(
    error: Exception, status: str, reason: str, lost: bool
) -> None:
    record, is_lost = run_section(raising(error), a_probe())
    assert (record["status"], record["reason"], is_lost) == (status, reason, lost)
    assert record["rows"] == [{"result": "ok"}]
    assert any("Traceback" in problem for problem in record["problems"]) is isinstance(error, RuntimeError)


def test_a_device_lost_after_the_last_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = a_probe()

    def lost() -> None:
        raise ContextLostError("an illegal memory access")

    monkeypatch.setattr(probe, "require_device", lost)
    record, is_lost = run_section(lambda probe, finding: None, probe)
    assert is_lost and record["status"] == "FAILED" and "illegal memory access" in record["reason"]


def test_a_check_that_is_not_met_fails_its_section() -> None:
    def section(probe: Probe, finding: Finding) -> None:
        finding.rows.append({"result": finding.fail("2.0e-01 from the reference")})
        finding.notes += ["said twice", "said twice"]

    record, _ = run_section(section, a_probe())
    assert (record["status"], record["reason"]) == ("FAILED", "2.0e-01 from the reference")
    assert record["notes"] == ["said twice"]


def test_rows_that_are_all_not_for_this_device_say_so_of_their_section() -> None:
    def section(probe: Probe, finding: Finding) -> None:
        finding.rows += [{"result": "not on this device: no card"}] * 2

    record, _ = run_section(section, a_probe())
    assert (record["status"], record["reason"]) == ("not on this device", "no card")


def test_the_table_labels_figures_and_says_what_failed(workers: Any) -> None:
    scripts, _ = workers
    rows = [
        {"kernel": "a|b", "us": 1234.5, "rows": 16, "share": 0.12345, "unused": None, "result": "ok"},
        {"kernel": "gate", "us": None, "rows": 1, "share": None, "result": "FAILED: wrong"},
    ]

    def one(order: Order) -> Iterator[Any]:
        yield start("kernels")
        yield end(status="FAILED", reason="wrong", rows=rows, notes=["a note"], problems=["Traceback"])
        yield Ended(0, "")

    scripts.append(one)
    text = render(checked("kernels"))
    assert text.startswith(
        f"# GPU check: {CARD}\n\n70 multiprocessors, 12 GB, L2 6 MB, driver 580.95.05, torch 2.13.0"
    )
    assert f"## Triton kernels against the reference ({CARD})" in text
    lines = text.splitlines()
    assert "| kernel |    us | rows | share | result        |" in lines
    assert "| a\\|b   | 1,234 |   16 | 0.123 | ok            |" in lines
    assert "| gate   |     - |    1 |     - | FAILED: wrong |" in lines
    assert lines[-1] == "- a note" and "Traceback" not in text


def test_without_any_worker_the_table_says_so() -> None:
    document = {"environment": {}, "sections": []}
    assert "No worker could be started" in render(document)
