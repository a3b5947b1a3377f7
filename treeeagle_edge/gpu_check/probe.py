"""What a section of the GPU check gets (`Probe`) and what it fills in (`Finding`)."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check.models import LED, RandomModel, random_head
from treeeagle_edge.gpu_check.process import FAILED, NOT_HERE, OK
from treeeagle_edge.gpu_check.sizes import Model, Sizes
from treeeagle_edge.gpu_check.timing import said, wait
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.model.head import Head

Row = dict[str, Any]


class ContextLostError(Exception):
    """CUDA no longer works in this process: the remaining sections need another one."""


@dataclass
class Finding:
    """What a section found. All its rows have the same keys, "result" among them."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # tracebacks and sentences; a section with any of them has failed
    problems: list[str] = field(default_factory=list)

    def fail(self, sentence: str) -> str:
        """Note a check that failed. Returns the text for the table."""
        self.problems.append(sentence)
        return f"{FAILED}: {sentence}"


class Probe:
    """Device, sizes and time of a section, and its models, which are made when they are first used."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        *,
        triton: bool = True,
        facts: Mapping[str, float] | None = None,
        report: Callable[[list[Row]], None] | None = None,
    ) -> None:
        """triton: whether its kernels may run. facts: what earlier sections measured, by name.

        report: gets each row at once, so that the rows are known even if this process dies.
        """
        self.device = device
        self.sizes = sizes
        self.stop = float("inf")  # moment of time.perf_counter after which loops end early
        self.facts = dict(facts or {})
        self._report = report or (lambda rows: None)
        self._triton = triton
        self._loaded: tuple[str, RandomModel] | None = None
        self._head: Head | None = None

    @property
    def left(self) -> float:
        """Seconds that this section has left."""
        return self.stop - time.perf_counter()

    def triton_problem(self) -> str | None:
        """Why Triton's kernels are not run; None where they can be."""
        if not self._triton:
            return "left out after two sections that ended their processes"
        problem = availability.problem()
        return None if problem is None else problem.message

    def backends(self) -> tuple[str, ...]:
        """Attention backends to compare: the reference, and Triton where it can run."""
        return ("reference",) if self.triton_problem() else ("reference", "triton")

    def model(self, which: Model) -> RandomModel:
        """The random weights of a model. Only one model is held at a time."""
        if self._loaded is None or self._loaded[0] != which.name:
            self.release()
            self._loaded = (
                which.name,
                RandomModel.load(which.config, bits=self.sizes.bits, device=self.device),
            )
        return self._loaded[1]

    def head(self) -> Head:
        """A random head for the main model."""
        if self._head is None:
            target = self.model(self.sizes.main).target(LED, self.sizes.context)
            self._head = random_head(self.sizes.head, target, self.sizes.slots)
        return self._head

    def release(self) -> None:
        """Free the memory of the models."""
        self._loaded, self._head = None, None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def attempt(self, finding: Finding, row: Row, work: Callable[[], Mapping[str, Any] | list[Row]]) -> None:
        """Run `work` and add `row` with what it returns: once, or once for each row of a list.

        Where it fails, the row says so and the section goes on. Raises ContextLostError where CUDA no longer works.
        """
        try:
            given = work()
            outcomes: list[Mapping[str, Any]] = [*given] if isinstance(given, list) else [given]
            wait(self.device)
        except CannotRunError as error:
            outcomes = [{"result": f"{NOT_HERE}: {error.message}"}]
        except Exception as error:
            finding.problems.append(traceback.format_exc())
            outcomes = [{"result": f"{FAILED}: {said(error)}"}]
        rows = [{**row, "result": OK, **outcome} for outcome in outcomes]
        finding.rows += rows
        self._report(rows)
        self.require_device()

    def require_device(self) -> None:
        """Raise ContextLostError where CUDA no longer works."""
        try:
            wait(self.device)
        except RuntimeError as error:
            raise ContextLostError(said(error)) from error
