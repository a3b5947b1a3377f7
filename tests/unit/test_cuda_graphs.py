"""How work is captured and replayed: the order of CUDA's calls, what warming up leaves, and what a failure does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treeeagle_edge.device import cuda_graphs
from treeeagle_edge.device.cuda_graphs import CudaCapture, Runs, Work
from treeeagle_edge.errors import CannotRunError

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the part of torch.cuda that captures, in words."""
    said: list[str] = []
    graphs = iter(range(9))

    def stream(name: str) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: said.append(f"{name} waits for {other.name}"), name=name
        )

    @contextmanager
    def on(which: Any) -> Iterator[None]:
        said.append(f"on {which.name}")
        yield
        said.append(f"off {which.name}")

    @contextmanager
    def graph(which: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        said.append(f"capture {which.name} {stream.name} in {pool}, {capture_error_mode}")
        yield
        said.append(f"captured {which.name}")

    def new_graph() -> Any:
        name = f"graph {next(graphs)}"
        return SimpleNamespace(
            name=name, replay=lambda: said.append(f"replay {name}"), pool=lambda: f"the pool of {name}"
        )

    sides = (f"aside {number}" for number in range(9))
    monkeypatch.setattr(cuda_graphs, "_side_streams", {})
    fakes = {
        "current_stream": lambda device: stream("main"),
        "Stream": lambda device: stream(next(sides)),
        "stream": on,
        "synchronize": lambda device: said.append("synchronize"),
        "CUDAGraph": new_graph,
        "graph": graph,
    }
    for name, fake in fakes.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    return said


def test_work_is_warmed_up_aside_and_captured_once_on_the_same_stream(log: list[str]) -> None:
    """One side stream for all captures: each more would keep a workspace of cuBLAS for good."""
    capture = CudaCapture(CUDA)
    replay = capture(lambda: log.append("work"))
    assert log == [
        *(
            "aside 0 waits for main",
            "on aside 0",
            "work",
            "work",
            "off aside 0",
            "main waits for aside 0",
            "synchronize",
        ),
        "on main",
        *("capture graph 0 aside 0 in None, thread_local", "work", "captured graph 0"),
        "off main",
    ]
    log.clear()
    replay()
    assert log == ["replay graph 0"]
    capture(lambda: None)
    assert "capture graph 1 aside 0 in the pool of graph 0, thread_local" in log
    CudaCapture(CUDA)(lambda: None)
    assert "capture graph 2 aside 0 in None, thread_local" in log


@pytest.mark.parametrize("broken", [True, False])
def test_a_failed_capture_leaves_the_stream_in_force_and_says_what_failed(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's own block around the capture, which stays on its stream where the end of the capture raises, as
    it does after what a graph cannot hold; not after a want of memory.
    """
    in_force = ["main"]

    @contextmanager
    def on(which: Any) -> Iterator[None]:
        before, in_force[0] = in_force[0], which.name
        yield
        in_force[0] = before

    class BrokenGraph:
        def capture_begin(self, **options: Any) -> None:
            assert in_force == ["aside"]

        def capture_end(self) -> None:
            if broken:
                raise RuntimeError("operation failed due to a previous error during capture")

    class On:
        """As `torch.cuda.stream`: a block that is left by its `__exit__` alone."""

        def __init__(self, which: Any) -> None:
            self.block = on(which)

        def __enter__(self) -> None:
            self.block.__enter__()

        def __exit__(self, *error: object) -> None:
            self.block.__exit__(None, None, None)

    def stream(name: str) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, name=name)

    fakes = {
        "current_stream": lambda device: stream(in_force[0]),
        "Stream": lambda device: stream("aside"),
        "stream": On,
        "synchronize": lambda device=None: None,
        "CUDAGraph": BrokenGraph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_graphs, "_side_streams", {})
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    runs, made = iter(range(3)), []

    def waits_in_the_end() -> None:
        tensor = torch.zeros(1)
        made.append(weakref.ref(tensor))
        if next(runs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing") as caught:
            CudaCapture(CUDA)(waits_in_the_end)
        assert in_force == ["main"]
        del caught
        # nothing of the work lives on where memory may be short; PyTorch's block makes a circle of the other case
        assert broken or made[-1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_while_work_is_captured(enabled: bool, fails: bool, log: list[str]) -> None:
    """A graph that is garbage in a circle would be destroyed then, which no capture survives."""
    collects: list[bool] = []

    def work() -> None:
        collects.append(gc.isenabled())
        if fails and len(collects) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            CudaCapture(CUDA)(work)
        assert collects == [enabled, enabled, False] and gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_there_is_no_capture_on_a_cpu() -> None:
    with pytest.raises(CannotRunError, match="CUDA graphs need a CUDA device"):
        CudaCapture(CPU)(lambda: None)


def counting(state: torch.Tensor) -> Work:
    return lambda: state.add_(1) and None


class Captures:
    """Runs the work twice, as warming up does, and keeps it; fails from the `fails_at`-th on."""

    def __init__(self, fails_at: int = 99, error: Exception | None = None) -> None:
        self.asked = 0
        self._fails_at = fails_at
        self._error = error or RuntimeError("operation not permitted when stream is capturing")

    def __call__(self, work: Work) -> Work:
        self.asked += 1
        work(), work()
        if self.asked >= self._fails_at:
            raise self._error
        return work


def test_each_key_is_captured_once_and_warming_up_leaves_no_trace() -> None:
    state, capture = torch.zeros(1), Captures()
    runs = Runs(capture, CPU)
    assert [runs.run("a", counting(state), [state]) for _ in range(3)] == [True, False, False]
    assert state.item() == 3 and capture.asked == 1
    assert runs.run("b", counting(state), [state])
    assert state.item() == 4 and capture.asked == 2 and runs.captures


def test_the_graph_that_was_not_used_for_longest_makes_room() -> None:
    """Each holds memory of the driver's, which the plan counts for so many."""
    state, capture = torch.zeros(1), Captures()
    runs = Runs(capture, CPU, most=2)
    assert [runs.run(key, counting(state), [state]) for key in "abaca"] == [True, True, False, True, False]
    assert capture.asked == 3
    assert runs.run("b", counting(state), [state]) and not runs.run("a", counting(state), [state])
    assert state.item() == 7 and capture.asked == 4


def test_a_failure_keeps_what_was_captured_and_tries_no_more() -> None:
    state, capture = torch.zeros(1), Captures(fails_at=2)
    runs = Runs(capture, CPU)
    assert runs.run("a", counting(state), [state])
    assert runs.run("b", counting(state), [state])
    assert runs.problem == "operation not permitted when stream is capturing" and not runs.captures
    assert state.item() == 2  # ran once each, whatever the attempt did
    assert not runs.run("c", counting(state), [state])
    assert not runs.run("a", counting(state), [state])
    assert state.item() == 4 and capture.asked == 2


def test_a_capture_that_breaks_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device, what: str) -> None:
        raise CannotRunError(f"{what} broke CUDA for this process", "use --kernels torch")

    monkeypatch.setattr(cuda_graphs, "require_device", broken)
    with pytest.raises(CannotRunError, match="capturing a CUDA graph broke CUDA"):
        Runs(Captures(fails_at=1), CPU).run("a", lambda: None, [])


def test_without_a_capture_everything_runs_as_it_is() -> None:
    state = torch.zeros(1)
    runs = Runs(None, CPU)
    assert [runs.run("a", counting(state), [state]) for _ in range(2)] == [False, False]
    assert state.item() == 2 and runs.problem is None
