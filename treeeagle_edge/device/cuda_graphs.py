"""CUDA graphs: work on fixed buffers, captured once and then started by a single call instead of a thousand launches.

Where capturing fails the same work is launched piece by piece, and the reason is kept for the person.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.errors import CannotRunError, TreeEagleError, reason_of
from treeeagle_edge.kernels.trial import require_device

Work = Callable[[], object]
# runs the work a few times and returns what runs it again; raises where it cannot
Capture = Callable[[Work], Work]
_WARM_UPS = 2
_side_streams: dict[torch.device, Any] = {}  # one a card: cuBLAS keeps a workspace for each it ever ran on


class CudaCapture:
    """Captures on one device. All graphs share one pool of memory: none runs beside another, or reads what one left."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # a handle of PyTorch's, once there is a graph

    def __call__(self, work: Work) -> Work:
        """A replay of `work`, which first ran twice aside, so that kernels are compiled and loaded.

        Raises CannotRunError without CUDA, and what `work` raises where it does what a graph cannot hold.
        """
        if self._device.type != "cuda":
            raise CannotRunError("CUDA graphs need a CUDA device", "this does without them")
        current = torch.cuda.current_stream(self._device)
        if self._device not in _side_streams:
            _side_streams[self._device] = torch.cuda.Stream(self._device)
        aside = _side_streams[self._device]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(aside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        self._record(graph, work, current, aside)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def _record(self, graph: Any, work: Work, current: Any, aside: Any) -> None:
        """Capture `work` on the stream `aside`. `current` is the stream in force before, and after it, come what may:
        PyTorch's own block stays on the other one where the capture breaks.
        """
        cause: BaseException | None = None
        try:
            # other threads may allocate meanwhile: only what this one does belongs to the graph
            recording = torch.cuda.graph(
                graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"
            )
            with torch.cuda.stream(current), _without_collecting(), recording:
                try:
                    work()
                except BaseException as error:
                    cause = error
                    raise
        except Exception as error:  # the end of a broken capture only says that something before it failed
            raise cause or error from None
        finally:
            cause = None  # its traceback holds this frame: in a circle, tensors of the work would live on


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Python's collector waits: an older graph that it destroyed would break the capture (pytorch#161037), and so would
    a kernel of Triton's. PyTorch has not collected before a capture since 2.9.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Runs:
    """Runs work by its key: as a graph from the second time on, or as it is where there is nothing to capture with."""

    def __init__(self, capture: Capture | None, device: torch.device, most: int = 12) -> None:
        """`capture` None: everything is launched piece by piece, on purpose. `most`: graphs kept, for each of which the
        driver holds memory; the one that was not used for longest makes room.
        """
        self.problem: str | None = None  # why capturing failed; nothing more is captured then
        self._capture = capture
        self._device = device
        self._most = most
        self._replays: dict[Hashable, Work] = {}  # the one used last is the last

    @property
    def captures(self) -> bool:
        """Whether work that is new will be captured."""
        return self._capture is not None and self.problem is None

    def run(self, key: Hashable, work: Work, state: Sequence[Tensor]) -> bool:
        """Run what `key` stands for, once; `state` are the tensors it changes and reads again later.

        Returns whether this run also prepared later ones, so that its time says nothing about theirs. Raises
        CannotRunError where the attempt to capture broke CUDA for this process.
        """
        prepares = key not in self._replays and self.captures
        if prepares:
            self._prepare(key, work, state)
        replay = self._replays.pop(key, None)
        if replay is None:
            work()
        else:
            self._replays[key] = replay
            replay()
        return prepares

    def _prepare(self, key: Hashable, work: Work, state: Sequence[Tensor]) -> None:
        assert self._capture is not None
        before = [tensor.clone() for tensor in state]
        try:
            self._replays[key] = self._capture(work)
            # after the capture: one graph at least keeps their common pool
            if len(self._replays) > self._most:
                del self._replays[next(iter(self._replays))]
        except Exception as error:  # compilers, drivers and allocators each raise errors of their own
            require_device(self._device, "capturing a CUDA graph")
            self.problem = error.message if isinstance(error, TreeEagleError) else reason_of(error)
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)  # warming up ran the work
