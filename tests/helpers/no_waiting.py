"""Guards under which an operation raises that would make the host wait for a device, or copy from the host to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),  # a number to the host
    *(
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    ),  # unknown shapes
    *("bincount", "histc", "repeat_interleave"),
    *("lift_fresh", "lift", "_to_cpu"),  # a tensor made of Python numbers, which a graph would freeze
)


class NoWaiting(TorchDispatchMode):
    """Raises AssertionError at such an operation; counts the others. It does not see `tolist` and `numpy`, which
    `on_meta` is for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        name = func.overloadpacket.__name__
        assert name not in _WAITING, f"{func} makes the host wait, or takes numbers from it"
        if name in ("index", "index_put", "index_put_"):
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} with a mask makes the host wait for the number of elements"
        return func(*args, **(kwargs or {}))


def on_meta(root: Any, seen: dict[int, Any] | None = None) -> Any:
    """Replace every tensor that `root` holds, however deep, by one without memory, and devices by "meta".

    Whatever then looks at a value raises. Attributes are replaced in place, frozen classes included.
    """
    meta = torch.device("meta")
    seen = {} if seen is None else seen
    if isinstance(root, torch.Tensor):
        return root.to(meta)
    if isinstance(root, torch.device):
        return meta
    if id(root) in seen:
        return seen[id(root)]
    seen[id(root)] = root
    if isinstance(root, list | tuple):
        moved = [on_meta(each, seen) for each in root]
        return moved if isinstance(root, list) else tuple(moved)
    if isinstance(root, Callable) and hasattr(root, "__self__"):  # type: ignore[arg-type]
        on_meta(root.__self__, seen)
        return root
    if type(root).__module__.startswith(("treeeagle_edge", "tiny_models")) and hasattr(root, "__dict__"):
        for name, value in list(vars(root).items()):
            object.__setattr__(root, name, on_meta(value, seen))
    return root
