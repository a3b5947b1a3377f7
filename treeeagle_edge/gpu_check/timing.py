"""Times calls on the device: interleaved, with CUDA events, as a CUDA graph where launching takes longer than running.

On a CPU, which only tests use, calls are timed by the clock and never as a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from treeeagle_edge.device.cuda_graphs import CudaCapture
from treeeagle_edge.errors import CannotRunError, TreeEagleError, reason_of

Item = TypeVar("Item")
EAGER, GRAPH = "eager", "graph"
_LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Arm:
    """A call to be timed."""

    call: Callable[[], object]
    per: int = 1  # how often one call repeats what is measured
    how: str = EAGER


@dataclass(frozen=True)
class Timing:
    """Microseconds of one repetition."""

    us: float  # median
    fastest_us: float
    samples: int
    how: str


def as_graph(call: Callable[[], object], device: torch.device) -> Arm:
    """`call`, captured as a CUDA graph as the engine captures its rounds.

    Raises CannotRunError on the CPU, RuntimeError where `call` cannot be captured.
    """
    return Arm(CudaCapture(device)(call), how=GRAPH)


def fastest_arm(call: Callable[[], object], device: torch.device) -> tuple[Arm, str | None]:
    """`call` as a graph; or as it is, with the reason why it could not be captured."""
    try:
        return as_graph(call, device), None
    except CannotRunError as error:
        return Arm(call), error.message
    except RuntimeError as error:
        torch.cuda.synchronize(device)  # raises where not only the capture failed
        return Arm(call), f"not captured: {said(error)}"


def interleaved(
    arms: Mapping[str, Arm], device: torch.device, samples: int, stop: float
) -> dict[str, Timing]:
    """Time every arm once, then every arm again, up to `samples` times.

    At the moment `stop` (of `time.perf_counter`) it ends early, but not before three samples. A graph is replayed twice
    and only the second replay is timed, so that the time of its launch does not count.
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
    """`call`, repeated `times` times. Results are dropped at once, so that a graph needs memory for only one."""

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
    """Wait until everything that was launched has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def said(error: BaseException) -> str:
    """The text of an error, as the end of a sentence."""
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
