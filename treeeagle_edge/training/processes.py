"""Several processes that train one head: `accelerate launch` starts them, each with the same command.

They share the dialogues to be written, and every batch. Gradients are sums over the whole batch, so that two processes
take the steps that one would take.
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
    """This process among `count`, as `accelerate launch` and `torchrun` say it through the environment."""

    index: int
    count: int

    @property
    def first(self) -> bool:
        """The one that speaks and writes what all have in common."""
        return self.index == 0


def find_place() -> Place:
    """RANK and WORLD_SIZE of the environment; one process where they are not set."""
    return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class Group:
    """The processes of a run. With one process nothing is exchanged and `accelerate` is not needed."""

    def __init__(self, place: Place, *, cpu: bool) -> None:
        """Meet the others. Raises CannotRunError where several were started and `accelerate` is not installed."""
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

    def wait(self) -> None:
        """Go on when every process has come here."""
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
        """What the first process says, so that all do the same."""
        return self.total(value if self.place.first else 0)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self._accelerator is None:
            return
        for tensor in tensors:
            tensor.copy_(self._accelerator.reduce(tensor, "sum").to(tensor.device))
