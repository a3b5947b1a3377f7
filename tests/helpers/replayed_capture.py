"""Stands in for CUDA graphs as strictly as a CPU can: the operations of a captured run, again with the same arguments.

What Python does between them is not done again, so that a number that the host chose is frozen, as in a graph. What an
operation made lies where it lay when it was captured, and holds garbage before each replay, as in a pool of memory that
other graphs use, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from treeeagle_edge.device.cuda_graphs import Work


class ReplayedCapture:
    """Warms up and captures as `CudaCapture` does. launches: whether Triton's are kept, too."""

    def __init__(self, launches: bool = False) -> None:
        self.captured = self.replayed = 0
        self._launches = launches

    def __call__(self, work: Work) -> Work:
        work(), work()
        recording = _Recording()
        with recording.launches() if self._launches else recording:
            work()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            recording.replay()

        return replay


class _Recording(TorchDispatchMode):
    """Runs operations and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []
        self._made: list[Tensor] = []  # memory that the captured run took

    def launches(self) -> Any:
        """A block in which Triton's launches are kept, too."""
        from treeeagle_edge.kernels.triton.launch import Launch

        run = Launch.run

        def kept(launch: Launch) -> None:
            with _disable_current_modes():  # the interpreter copies by operations of its own
                run(launch)
            self._steps.append(lambda: run(launch))

        return _Together(patch.object(Launch, "run", kept), self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        known = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        outputs = tree_leaves(found)
        assert all(isinstance(each, Tensor) for each in outputs), f"{func} gives the host a number"
        fresh = [each.numel() > 0 and _place(each) not in known for each in outputs]
        self._made += [each for each, new in zip(outputs, fresh, strict=True) if new]

        def again() -> None:
            for kept, new, now in zip(outputs, fresh, tree_leaves(func(*args, **kwargs)), strict=True):
                if new:
                    kept.copy_(now)

        self._steps.append(again)
        return found

    def replay(self) -> None:
        with torch.inference_mode():
            for tensor in self._made:
                tensor.fill_(
                    True if tensor.dtype == torch.bool else 77 if tensor.dtype == torch.int8 else 1e9
                )
            for step in self._steps:
                step()


class _Together:
    """Two blocks as one."""

    def __init__(self, *blocks: Any) -> None:
        self._blocks = blocks

    def __enter__(self) -> None:
        for block in self._blocks:
            block.__enter__()

    def __exit__(self, *error: Any) -> None:
        for block in reversed(self._blocks):
            block.__exit__(*error)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
