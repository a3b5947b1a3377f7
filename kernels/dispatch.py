"""The one place that chooses an attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from treeeagle_edge.errors import UsageError
from treeeagle_edge.kernels import reference, reference_exact
from treeeagle_edge.kernels.view import AttentionView, BatchView

Backend = Callable[[Tensor, Tensor, Tensor, AttentionView], Tensor]


class _Dispatcher:
    """The backends by name, and the one in force for the whole process."""

    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {
            "reference": reference.attention,
            "exact": reference_exact.attention,
        }
        self.name = "reference"


_dispatcher = _Dispatcher()


def available_backends() -> tuple[str, ...]:
    """Names for `set_backend`: "reference" is the definition, "exact" does not depend on the shape of the pass."""
    return tuple(_dispatcher.backends)


def current_backend() -> str:
    """Name of the backend in force."""
    return _dispatcher.name


def set_backend(name: str) -> None:
    """Use `name` from now on, in every thread. Raises UsageError for an unknown name."""
    if name not in _dispatcher.backends:
        raise UsageError(
            f"there is no attention backend {name!r}", f"use one of: {', '.join(available_backends())}"
        )
    _dispatcher.name = name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use `name` within the block, then the one before it again. Raises UsageError for an unknown name."""
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
