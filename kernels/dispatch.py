"""The one place that chooses an attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.kernels import reference, reference_exact
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.kernels.view import AttentionView, BatchView

Backend = Callable[[Tensor, Tensor, Tensor, AttentionView], Tensor]


def _triton(query: Tensor, keys: Tensor, values: Tensor, view: AttentionView) -> Tensor:
    from treeeagle_edge.kernels.triton import attention as on_triton  # imports triton: only where it is used

    return on_triton.attention(query, keys, values, view)


class _Dispatcher:
    """The backends by name, and the one in force for the whole process."""

    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {
            "reference": reference.attention,
            "exact": reference_exact.attention,
            "triton": _triton,
        }
        self.name = "reference"


_dispatcher = _Dispatcher()


def available_backends() -> tuple[str, ...]:
    """Names that `set_backend` takes on this machine.

    "reference" is the definition, "exact" does not depend on the shape of the pass, "triton" is for CUDA.
    """
    return tuple(name for name in _dispatcher.backends if _refusal(name) is None)


def _refusal(name: str) -> CannotRunError | None:
    """Why a backend cannot run here; looked up anew each time, since a test may interpret Triton's kernels."""
    return availability.problem() if name == "triton" else None


def current_backend() -> str:
    """Name of the backend in force."""
    return _dispatcher.name


def set_backend(name: str) -> None:
    """Use `name` from now on, in every thread.

    Raises UsageError for an unknown name, CannotRunError for a backend that cannot run on this machine.
    """
    if name not in _dispatcher.backends:
        raise UsageError(
            f"there is no attention backend {name!r}", f"use one of: {', '.join(available_backends())}"
        )
    refusal = _refusal(name)
    if refusal is not None:
        raise refusal
    _dispatcher.name = name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use `name` within the block, then the one before it again. Raises as `set_backend` does."""
    before = _dispatcher.name
    set_backend(name)
    try:
        yield
    finally:
        _dispatcher.name = before


def attention(query: Tensor, keys: Tensor, values: Tensor, view: AttentionView | BatchView) -> Tensor:
    """[M, heads, head_dim], in the dtype of `query`: what each query row reads through `view`.

    query: [M, heads, head_dim]; keys, values: [slots, kv_heads, head_dim] of one layer. See `reference.attention`.
    """
    if isinstance(
        view, BatchView
    ):  # only the reference reads one: it serves making training data, not answering
        return reference.attention(query, keys, values, view)
    return _dispatcher.backends[_dispatcher.name](query, keys, values, view)
