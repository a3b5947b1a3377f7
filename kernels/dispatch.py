"""The one place that chooses which backend computes attention and the other operations between matrix products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from torch import Tensor

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.kernels import (
    reference,
    reference_exact,
    reference_int8,
    reference_layers,
    reference_noise,
)
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.kernels.triton import reference as reference_packed
from treeeagle_edge.kernels.triton.operands import HeadNorm, Pool, Rotation
from treeeagle_edge.kernels.view import AttentionView, BatchView

Kernel = Callable[..., Tensor]
TRITON = "triton"


def _triton(module: str, name: str) -> Kernel:
    """A function of one of our Triton modules, which is imported at the first call: it imports triton."""

    def call(*arguments: object) -> Tensor:
        return getattr(import_module(f"treeeagle_edge.kernels.triton.{module}"), name)(*arguments)

    return call


class _Dispatcher:
    """For each operation its kernels by backend, and the backend in force for the whole process."""

    def __init__(self) -> None:
        self.kernels: dict[str, dict[str, Kernel]] = {
            "attention": {
                "reference": reference.attention,
                "exact": reference_exact.attention,
                TRITON: _triton("attention", "attention"),
            },
            "rms_norm": {
                "reference": reference_layers.rms_norm,
                TRITON: _triton("rowwise", "rms_norm"),
            },
            "add_rms_norm": {
                "reference": reference_layers.add_rms_norm,
                TRITON: _triton("rowwise", "add_rms_norm"),
            },
            "rotate_and_write": {
                "reference": reference_layers.rotate_and_write,
                TRITON: _triton("kv_write", "rotate_and_write"),
            },
            "silu_gate": {
                "reference": reference_layers.silu_gate,
                TRITON: _triton("rowwise", "silu_gate"),
            },
            "random_words": {
                "reference": reference_noise.random_words,
                TRITON: _triton("noise", "random_words"),
            },
            "matmul_4bit": {
                "reference": reference_packed.matmul_4bit,
                TRITON: _triton("matmul_4bit", "matmul_4bit"),
            },
            "int8_product": {
                "reference": reference_int8.int8_product,
                TRITON: _triton("int8_rows", "int8_product"),
            },
        }
        self.name = "reference"
        self.left_out: frozenset[str] = frozenset()

    def serving(self, operation: str) -> str:
        """The backend that computes `operation`: the one in force, or the reference where that has no kernel to use."""
        left_out = self.name == TRITON and operation in self.left_out
        return "reference" if left_out or self.name not in self.kernels[operation] else self.name

    def chosen(self, operation: str) -> Kernel:
        return self.kernels[operation][self.serving(operation)]


_dispatcher = _Dispatcher()
OPERATIONS = tuple(_dispatcher.kernels)


def available_backends() -> tuple[str, ...]:
    """Names that `set_backend` takes on this machine.

    "reference" is the definition, "exact" does not depend on the shape of the pass, "triton" is for CUDA.
    """
    return tuple(name for name in _dispatcher.kernels["attention"] if _refusal(name) is None)


def _refusal(name: str) -> CannotRunError | None:
    """Why a backend cannot run here. Asked anew each time, since tests switch Triton's interpreter on."""
    return availability.problem() if name == TRITON else None


def current_backend() -> str:
    """Name of the backend in force."""
    return _dispatcher.name


def serving(operation: str) -> str:
    """Name of the backend that computes `operation`, one of `OPERATIONS`, now."""
    return _dispatcher.serving(operation)


def set_backend(name: str) -> None:
    """Use `name` from now on, in every thread. The reference computes what `name` has no kernel for.

    Raises UsageError for an unknown name, CannotRunError for a backend that cannot run on this machine.
    """
    if name not in _dispatcher.kernels["attention"]:
        raise UsageError(
            f"there is no attention backend {name!r}", f"use one of: {', '.join(available_backends())}"
        )
    refusal = _refusal(name)
    if refusal is not None:
        raise refusal
    _dispatcher.name = name


def leave_out(operations: Collection[str]) -> None:
    """Leave these `OPERATIONS`, and no others, to the reference whenever "triton" is in force."""
    assert set(operations) <= set(OPERATIONS)
    _dispatcher.left_out = frozenset(operations)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use `name` within the block, then the one before it again. Raises as `set_backend` does."""
    before = _dispatcher.name
    set_backend(name)
    try:
        yield
    finally:
        _dispatcher.name = before


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: AttentionView | BatchView,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, heads, head_dim], in `dtype` or else that of `query`: what each query row reads through `view`.

    query: [M, heads, head_dim]; keys, values: [slots, kv_heads, head_dim] of one layer. See `reference.attention`.
    """
    # only the reference takes one: it is for making training data, not for answers
    if isinstance(view, BatchView):
        return reference.attention(query, keys, values, view, dtype)
    return _dispatcher.chosen("attention")(query, keys, values, view, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[M, H] in `dtype`: the RMSNorm of `x` [M, H]. See `reference_layers.rms_norm`."""
    return _dispatcher.chosen("rms_norm")(x, weight, eps, dtype)


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """[M, H] in `dtype`: the RMSNorm of `x` after `scale` times `branch` was added to it, in place.

    See `reference_layers.add_rms_norm`.
    """
    return _dispatcher.chosen("add_rms_norm")(x, branch, weight, eps, dtype, scale)


def rotate_and_write(
    qkv: Tensor,
    rotation: Rotation,
    slots: Tensor,
    pool: Pool,
    dtype: torch.dtype,
    norm: HeadNorm | None = None,
) -> Tensor:
    """[M, heads, head_dim] in `dtype`: the queries of `qkv`, rotated; its keys and values go to `slots` of the pool.

    See `reference_layers.rotate_and_write`.
    """
    return _dispatcher.chosen("rotate_and_write")(qkv, rotation, slots, pool, dtype, norm)


def silu_gate(wide: Tensor) -> Tensor:
    """[M, I]: SiLU of the first half of `wide` [M, 2 I] times its second. See `reference_layers.silu_gate`."""
    return _dispatcher.chosen("silu_gate")(wide)


def random_words(seed: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """[L, 4 * blocks] int64 for `positions` [L] under `seed` [1]. See `reference_noise.random_words`."""
    return _dispatcher.chosen("random_words")(seed, positions, blocks)


def matmul_4bit(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, bias: Tensor | None = None
) -> Tensor:
    """[M, out]: rows times a weight in the layout of bitsandbytes. See `triton.reference.matmul_4bit`.

    Callers ask `serving` first: where that says "reference", the product of bitsandbytes is faster than this one.
    """
    return _dispatcher.chosen("matmul_4bit")(x, packed, absmax, code, bias)


def int8_product(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, out]: rows times an int8 weight. See `reference_int8.int8_product`; bitsandbytes must be imported."""
    return _dispatcher.chosen("int8_product")(x, codes, absmax, bias)
