"""Several processes that train one head: `accelerate launch` starts them, each with the same command.

They divide the dialogues to be written among themselves, and so they do with every batch. Gradients are summed over all
processes, so that two processes take the same steps as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from treeeagle_edge.errors import CannotRunError

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Place:
    """Which of the `count` processes this is, as `accelerate launch` and `torchrun` say through the environment."""

    index: int
    count: int

    @property
    def first(self) -> bool:
        """Whether this is the one process that prints, and that writes what all have in common."""
        return self.index == 0


def find_place() -> Place:
    """The place given by the environment's RANK and WORLD_SIZE; the only one where they are not set."""
    return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class Group:
    """The processes of a run. With one process nothing is exchanged and `accelerate` is not needed.

    It is a context manager: the threads that carry what is exchanged must have ended before Python does, or the process
    may abort after all of its work.
    """

    def __init__(self, place: Place, *, cpu: bool) -> None:
        """Connect to the other processes.

        Raises CannotRunError where several were started and the package `accelerate` is not installed.
        """
        self.place = place
        self._accelerator = None
        if place.count > 1:
            try:
                from accelerate import Accelerator
            except ImportError as error:
                raise CannotRunError(
                    f"{place.count} processes were started, and the package accelerate is not installed",
                    "pip install accelerate",
                ) from error
            self._accelerator = Accelerator(cpu=cpu)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        if self._accelerator is not None:
            self._accelerator.end_training()

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def total(self, value: Number) -> Number:
        """The sum of `value` over all processes."""
        if self._accelerator is None:
            return value
        import torch

        summed = torch.tensor(value, dtype=torch.float64, device=self._accelerator.device)
        return type(value)(self._accelerator.reduce(summed, "sum").item())

    def agreed(self, value: int) -> int:
        """The value of the first process, so that all decide alike."""
        return self.total(value if self.place.first else 0)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self._accelerator is None:
            return
        for tensor in tensors:
            tensor.copy_(self._accelerator.reduce(tensor, "sum").to(tensor.device))
