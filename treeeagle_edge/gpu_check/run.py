"""Checks and measures the CUDA path in a few minutes: `treeeagle gpu-check`. docs/gpu.md shows the figures.

Sections run one after another in a worker process, the most important ones first. After a section that fails, the next
one runs. A section may also crash its process or never end: then the remaining sections run in a new process, and after
the second such section without Triton's kernels: the first may have met a kernel that the others do not need. No model
is downloaded: weights are random and made on the card.

The result is a document of the schema "treeeagle-gpu-check/1":

- `environment`: `card`, `architecture` ("sm_90"), `driver`, `memory_bytes`, `multiprocessors`, `l2_bytes`, `device`,
  and `versions` of python, torch, CUDA, triton, bitsandbytes and of this package; null where it is unknown
- `size` ("full", or "test" on a CPU), `minutes` allowed, `seconds` taken, `card`
- `sections`: a list, each with `name`, `title`, `status` ("ok", "FAILED", "skipped", "not on this device"), `reason`
  (or null), `seconds`, `card`, `rows` (flat objects; `result` says what became of each), `notes`, and `problems`
  (tracebacks and sentences). Keys that end in "us" are microseconds; a "share" is one of the measured bandwidth
- `facts`: figures that later sections divide by, such as `bandwidth` in bytes/s
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError, UsageError, reason_of
from treeeagle_edge.gpu_check.process import FAILED, LOST, SKIPPED, Ended, Order, run_worker
from treeeagle_edge.gpu_check.report import render
from treeeagle_edge.progress import Progress

SCHEMA = "treeeagle-gpu-check/1"
_NO_TIME = "the time was over before it began"
_LEAST_SECONDS = 8.0  # no worker is started where less time is left
_START_SECONDS = 120.0  # a worker has imported PyTorch and found the device by then
# a section may take this much longer than its time, or than its last row, before its process is killed
_GRACE_SECONDS = 20.0
_MOST_LOSSES = 2  # processes that sections may take along before Triton is left out

Document = dict[str, Any]


@dataclass(frozen=True)
class SectionPlan:
    """A section, and the seconds it may take at full size."""

    name: str
    title: str
    seconds: float


PLAN = (
    SectionPlan("bandwidth", "Memory bandwidth", 15),
    SectionPlan("kernels", "Triton kernels against the reference", 100),
    SectionPlan("load", "Random weights, quantised on the device", 60),
    SectionPlan("served", "Triton kernels that serve in a pass", 40),
    SectionPlan("parity", "Tree and plain decoding say the same", 90),
    SectionPlan("passes", "Passes: verify to decode, head to decode", 45),
    SectionPlan("linears", "Products with 4- and 8-bit weights", 75),
    SectionPlan("attention", "Attention by context", 45),
    SectionPlan("speed", "Tokens per second at simulated acceptance", 60),
    SectionPlan("graphs", "CUDA graphs of a verify pass", 30),
    SectionPlan("rounds", "Rounds on the device, and as CUDA graphs", 90),
    SectionPlan("linears-2", "Products with the second model's weights", 45),
    SectionPlan("memory", "No allocation over a thousand rounds", 75),
    # behind what captures graphs and times rounds of the main model: a profiler may slow down its process from then on
    SectionPlan("products", "Which kernel multiplies", 25),
    SectionPlan("passes-2", "Passes of the second model", 50),
    SectionPlan("products-2", "Which kernel multiplies in the second model", 20),
)


@dataclass(frozen=True)
class CheckOptions:
    """Options of the check."""

    device: str
    size: str = "full"
    minutes: float = 7.5
    sections: tuple[str, ...] = ()  # empty: all

    def plans(self) -> list[SectionPlan]:
        """The sections to run, in order. Raises UsageError for an unknown name."""
        names = [plan.name for plan in PLAN]
        wrong = next((name for name in self.sections if name not in names), None)
        if wrong is not None:
            raise UsageError(f"there is no section {wrong} of the GPU check", f"use {', '.join(names)}")
        return [plan for plan in PLAN if not self.sections or plan.name in self.sections]


def run_check(options: CheckOptions, *, progress: Progress, save: Path | None = None) -> Document:
    """Run the sections within `minutes`. Returns the document, which is written to `save` after every section.

    Raises UsageError for an unknown section, InputError where `save` cannot be written.
    """
    run = _Run(options, progress, save)
    run.write()
    while run.waiting:
        if run.left < _LEAST_SECONDS:
            run.skip(_NO_TIME)
            break
        run.work()
    run.document["seconds"] = time.perf_counter() - run.started
    run.write()
    return run.document


def has_failed(document: Document) -> bool:
    """Whether a section failed. One that did not run does not count."""
    return any(section["status"] == FAILED for section in document["sections"])


@dataclass
class _Begun:
    """A section that is running, with the rows it has reported so far."""

    plan: SectionPlan
    since: float = field(default_factory=time.perf_counter)
    rows: list[Any] = field(default_factory=list)


class _Run:
    """Starts workers, one after another, and builds the document."""

    def __init__(self, options: CheckOptions, progress: Progress, save: Path | None) -> None:
        self.started = time.perf_counter()
        self.waiting: list[SectionPlan] = options.plans()
        self._options = options
        self._progress = progress
        self._save = save
        self._stop = self.started + 60 * options.minutes
        self._losses = 0  # processes that a section took along
        self.document: Document = {
            "schema": SCHEMA,
            "environment": {},
            "size": options.size,
            "minutes": options.minutes,
            "seconds": 0.0,
            "card": None,
            "sections": [],
            "facts": {},
        }

    @property
    def left(self) -> float:
        """Seconds that are left of the whole time."""
        return self._stop - time.perf_counter()

    def work(self) -> None:
        """Start one worker and let it run the waiting sections. A section that it began and did not end has failed."""
        order = Order(
            device=self._options.device,
            size=self._options.size,
            triton=self._losses < _MOST_LOSSES,
            sections=tuple((plan.name, self._seconds(plan)) for plan in self.waiting),
            stop=time.time() + self.left,
            facts=self.document["facts"],
        )
        begun: _Begun | None = None
        until = min(time.perf_counter() + _START_SECONDS, self._stop + _GRACE_SECONDS)
        worker = run_worker(order, until)
        event = next(worker)
        while not isinstance(event, Ended):
            kind = event.pop("event")
            if kind == "environment":
                self.document |= event
                until = time.perf_counter() + _GRACE_SECONDS
            elif kind == "start":
                begun = _Begun(next(plan for plan in self.waiting if plan.name == event["name"]))
                until = begun.since + min(self._seconds(begun.plan), self.left) + _GRACE_SECONDS
                self._progress(f"{begun.plan.title} ({self.left:.0f} s left)")
            elif kind == "rows":
                assert begun is not None
                begun.rows += event["rows"]
                # it is late, and alive: killed, it would take Triton out of all that follows
                until = max(until, min(time.perf_counter(), self._stop) + _GRACE_SECONDS)
            else:
                assert begun is not None
                self.document["facts"] |= event["facts"]
                self._add(_record(begun.plan, **event["section"]))
                begun, until = None, time.perf_counter() + _GRACE_SECONDS
            event = worker.send(until)
        self._settle(begun, event)

    def _seconds(self, plan: SectionPlan) -> float:
        """Seconds that the section may take. Its own limit is for the full size; a small run only limits the whole."""
        return plan.seconds if self._options.size == "full" else self.left

    def _settle(self, begun: _Begun | None, ended: Ended) -> None:
        """After a worker has ended: mark the section that it was in as failed, and count it."""
        if begun is not None:
            seconds = time.perf_counter() - begun.since
            problems = [ended.said or ended.reason]
            failed = _record(
                begun.plan, FAILED, ended.reason, seconds=seconds, rows=begun.rows, problems=problems
            )
            self._add(failed)
        elif ended.code not in (0, LOST):
            self.skip(f"no worker could do it: {ended.reason}", status=FAILED)
        elif ended.code == 0:
            self.skip(_NO_TIME)
        self._losses += 1

    def _add(self, section: dict[str, Any]) -> None:
        self.waiting = [plan for plan in self.waiting if plan.name != section["name"]]
        self.document["sections"].append({**section, "card": self.document["card"]})
        self.write()

    def skip(self, reason: str, status: str = SKIPPED) -> None:
        """Report all waiting sections as not run."""
        for plan in self.waiting:
            self._add(_record(plan, status, reason))

    def write(self) -> None:
        """Write the document as it is now, and its tables beside it."""
        if self._save is None:
            return
        try:
            self._save.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
            self._save.with_suffix(".md").write_text(render(self.document) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the report cannot be written to {self._save}: {reason_of(error)}", "choose another file"
            ) from error


def _record(
    plan: SectionPlan, status: str, reason: str | None, *, seconds: float = 0.0, **found: list[Any]
) -> dict[str, Any]:
    """A section's entry in the document. found: its rows, notes and problems."""
    known = {"name": plan.name, "title": plan.title, "status": status, "reason": reason, "seconds": seconds}
    return {**known, "rows": [], "notes": [], "problems": [], **found}
