"""What a section of the GPU check is given, and what it gives back."""

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
from treeeagle_edge.head import Head
from treeeagle_edge.kernels.triton import availability

Row = dict[str, Any]


class ContextLostError(Exception):
    """CUDA answers no more in this process: what is left has to be done in another."""


@dataclass
class Finding:
    """What a section found. Rows of a section have the same keys; "result" is one of them."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # tracebacks and sentences: any of them fails the section
    problems: list[str] = field(default_factory=list)

    def fail(self, sentence: str) -> str:
        """Note a check that is not met; returns what the table is to say."""
        self.problems.append(sentence)
        return f"{FAILED}: {sentence}"


class Probe:
    """The device, the sizes, the time, and models that are made when first asked for."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        *,
        triton: bool = True,
        facts: Mapping[str, float] | None = None,
        report: Callable[[list[Row]], None] | None = None,
    ) -> None:
        """`triton`: whether its kernels may be run; `facts`: what earlier sections measured, by name; `report` is given
        rows as they come, so that they are known whatever becomes of this process.
        """
        self.device = device
        self.sizes = sizes
        self.stop = float("inf")  # of time.perf_counter: loops end early after it
        self.facts = dict(facts or {})
        self._report = report or (lambda rows: None)
        self._triton = triton
        self._loaded: tuple[str, RandomModel] | None = None
        self._head: Head | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.stop - time.perf_counter()

    def triton_problem(self) -> str | None:
        """Why Triton's kernels are left out; None where they can run."""
        if not self._triton:
            return "left out after a section that ended its process"
        problem = availability.problem()
        return None if problem is None else problem.message

    def backends(self) -> tuple[str, ...]:
        """Attention backends to compare: the reference, and Triton where it can run."""
        return ("reference",) if self.triton_problem() else ("reference", "triton")

    def model(self, which: Model) -> RandomModel:
        """Its random weights. One model is held at a time."""
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
        """Give the models' memory back."""
        self._loaded, self._head = None, None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def attempt(self, finding: Finding, row: Row, work: Callable[[], Mapping[str, Any] | list[Row]]) -> None:
        """Add `row` with what `work` gives, once for each of its rows; a failure is this row's alone.

        Raises ContextLostError where it took CUDA with it.
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
        """Raise ContextLostError where CUDA answers no more."""
        try:
            wait(self.device)
        except RuntimeError as error:
            raise ContextLostError(said(error)) from error
