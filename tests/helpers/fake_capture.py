"""Stands in for CUDA graphs: keeps the work as it is, or fails as a capture does, after the warm-up."""

from __future__ import annotations

from treeeagle_edge.device.cuda_graphs import Work


class FakeCapture:
    """Counts what it captured."""

    def __init__(self, fails: bool = False) -> None:
        self.captured = 0
        self._fails = fails

    def __call__(self, work: Work) -> Work:
        work(), work()
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.captured += 1
        return work
