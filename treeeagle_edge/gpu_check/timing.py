"""Times calls on the device: interleaved, by CUDA events, as a CUDA graph where launching takes longer than running.

On the CPU, which is for tests, by the clock and never as a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from treeeagle_edge.cuda_graphs import CudaCapture
from treeeagle_edge.errors import CannotRunError, TreeEagleError, reason_of

Item = TypeVar("Item")
EAGER, GRAPH = "eager", "graph"
_LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Arm:
    """Something to time."""

    call: Callable[[], object]
    per: int = 1  # repetitions of what is measured in one call
    how: str = EAGER


@dataclass(frozen=True)
class Timing:
    """Microseconds of one repetition."""

    us: float  # median
    fastest_us: float
    samples: int
    how: str


def as_graph(call: Callable[[], object], device: torch.device, per: int = 1) -> Arm:
    """`call`, captured as a CUDA graph after it ran twice; `per` as in `Arm`. Raises as `CudaCapture` does."""
    return Arm(CudaCapture(device)(call), per, GRAPH)


def fastest_arm(call: Callable[[], object], device: torch.device, per: int = 1) -> tuple[Arm, str | None]:
    """`call` as a graph, or as it is, with the reason why it could not be captured."""
    try:
        return as_graph(call, device, per), None
    except CannotRunError as error:
        return Arm(call, per), error.message
    except RuntimeError as error:
        torch.cuda.synchronize(device)  # raises where more is broken than the capture
        return Arm(call, per), f"not captured: {said(error)}"


def interleaved(
    arms: Mapping[str, Arm], device: torch.device, samples: int, stop: float
) -> dict[str, Timing]:
    """Time every arm once, then every arm again, up to `samples` times; three at least, also past the moment `stop`
    (of `time.perf_counter`). A graph follows itself, so that its launch is over when its clock starts.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.call()
    wait(device)
    for done in range(samples):
        if done >= _LEAST_SAMPLES and time.perf_counter() > stop:
            break
        for name, arm in arms.items():
            found[name].append(_microseconds(arm, device) / arm.per)
    return {
        name: Timing(median(times), min(times), len(times), arms[name].how) for name, times in found.items()
    }


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """`call`, so many times in a row. Results are dropped at once, so that a graph needs the memory of one."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def walk(items: Iterable[Item], call: Callable[[Item], object]) -> Callable[[], None]:
    """`call` on every item in turn."""

    def run() -> None:
        for item in items:
            call(item)

    return run


def wait(device: torch.device) -> None:
    """Until everything that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def said(error: BaseException) -> str:
    """What an error says, as the end of a sentence."""
    if isinstance(error, TreeEagleError):
        return error.message
    return reason_of(error) if isinstance(error, Exception) else type(error).__name__


def _microseconds(arm: Arm, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        arm.call()
        return 1e6 * (time.perf_counter() - started)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if arm.how == GRAPH:
        arm.call()
    start.record()
    arm.call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
