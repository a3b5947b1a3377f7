"""A small call of every operation, in the shapes of a model, with random numbers that are the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE, MAX_ROWS, HeadNorm, Pool, Rotation
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.tree import DraftTree

_PREFIX, _SLOTS = 300, 320  # enough for three splits of Triton's attention
_TREE = DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 3), (0, 1, 1, 2, 2, 3), (0.0,) * 6)
_ROWS = len(_TREE)
_CHANNELS = 80  # of the 4-bit product: two tiles and a half
_ROUNDINGS = 8  # of a dtype: what kernels may differ by that round weights and products there
_EPS = 1e-5
_SCALE = 0.5  # of a branch


@dataclass(frozen=True)
class ModelShape:
    """What one model asks of the kernels."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 64
    intermediate: int = 96
    dtype: torch.dtype = torch.float32  # of activations, keys and values
    stream: torch.dtype = torch.float32  # of the residual stream, the weights of norms, and rotated queries
    head_norm: bool = False  # whether query and key heads are normalised
    packed: bool = False  # whether matrices are held at 4 bits
    int8: bool = False  # or at 8


@dataclass(frozen=True)
class Case:
    """One operation to try: it goes through the dispatch point, and gives fresh results from the same inputs."""

    operation: str  # one of `dispatch.OPERATIONS`
    device: torch.device
    dtype: torch.dtype  # sets how near the results must be
    call: Callable[[], tuple[Tensor, ...]]

    @property
    def limit(self) -> float:
        """The largest relative error that rounding explains: 1e-4 in fp32."""
        return 1e-4 if self.dtype == torch.float32 else _ROUNDINGS * torch.finfo(self.dtype).eps


@dataclass(frozen=True)
class SmallTree:
    """Arguments of one attention call: a tree of six rows after three hundred tokens, in scattered slots."""

    query: Tensor  # [6, heads, head_dim] float32
    keys: Tensor  # [slots, kv_heads, head_dim]
    values: Tensor
    view: AttentionView

    @property
    def case(self) -> Case:
        """The call to try: with the whole prefix, and with a part of it whose length only the device knows."""
        device = self.query.device
        part = replace(self.view, length=torch.tensor([_PREFIX - 7], device=device))

        def call() -> tuple[Tensor, ...]:
            views = self.view, replace(part)  # a view caches what is made from it; a copy begins anew
            tensors, dtype = (self.query, self.keys, self.values), self.keys.dtype
            return tuple(dispatch.attention(*tensors, view, dtype) for view in views)

        return Case("attention", device, self.keys.dtype, call)


def small_tree(device: torch.device, shape: ModelShape | None = None) -> SmallTree:
    """The attention call of a model, of a tiny one where no shape is given."""
    shape = shape or ModelShape()
    visible = torch.zeros(_ROWS, _ROWS, dtype=torch.bool)
    for row, path in enumerate(_TREE.ancestors):
        visible[row, list(path)] = True
    generator = torch.Generator().manual_seed(11)
    slots = torch.randperm(_SLOTS, generator=generator).to(device)
    view = AttentionView(slots[:_PREFIX], slots[_PREFIX : _PREFIX + _ROWS], visible.to(device))
    query = torch.randn(_ROWS, shape.heads, shape.head_dim, generator=generator).to(device)
    pool = (_SLOTS, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, generator=generator).to(device, shape.dtype) for _ in range(2))
    return SmallTree(query, keys, values, view)


def cases(device: torch.device, shape: ModelShape) -> Iterator[Case]:
    """Every operation that a model of this shape calls."""
    yield small_tree(device, shape).case
    yield from _norms(device, shape)
    yield _rotation(device, shape)
    wide = _normal((_ROWS, 2 * shape.intermediate), 6, device, shape.dtype)
    yield Case("silu_gate", device, shape.dtype, lambda: (dispatch.silu_gate(wide),))
    yield _words(device)
    if shape.packed and shape.hidden % BLOCK_SIZE == 0:
        yield _product(device, shape)
    if shape.int8:
        yield _int8_product(device, shape)


def _norms(device: torch.device, shape: ModelShape) -> Iterator[Case]:
    size = (_ROWS, shape.hidden)
    stream, branch = _normal(size, 1, device, shape.stream), _normal(size, 2, device, shape.dtype)
    weight = _normal((shape.hidden,), 3, device, shape.stream)

    def added() -> tuple[Tensor, ...]:
        kept = stream.clone()
        return dispatch.add_rms_norm(kept, branch, weight, _EPS, shape.dtype, _SCALE), kept

    normed = (stream, weight, _EPS, shape.dtype)
    yield Case("rms_norm", device, shape.dtype, lambda: (dispatch.rms_norm(*normed),))
    yield Case("add_rms_norm", device, shape.dtype, added)


def _rotation(device: torch.device, shape: ModelShape) -> Case:
    parts = shape.heads + 2 * shape.kv_heads
    qkv = _normal((_ROWS, parts, shape.head_dim), 4, device, shape.dtype)
    angles = torch.linspace(0.0, 3.0, _SLOTS * shape.head_dim // 2).view(_SLOTS, -1).to(device)
    rotation = Rotation(angles.cos(), angles.sin(), torch.arange(_ROWS, device=device) * 7)
    slots = torch.randperm(_SLOTS, generator=torch.Generator().manual_seed(5))[:_ROWS].to(device)
    weight = _normal((shape.heads + shape.kv_heads, shape.head_dim), 7, device, torch.float32)
    norm = HeadNorm(weight, _EPS) if shape.head_norm else None

    def call() -> tuple[Tensor, ...]:
        held = (_SLOTS, shape.kv_heads, shape.head_dim)
        keys, values = (torch.zeros(held, device=device, dtype=shape.dtype) for _ in range(2))
        pool = Pool(keys, values)
        query = dispatch.rotate_and_write(qkv, rotation, slots, pool, shape.stream, norm)
        return query, pool.keys, pool.values

    return Case("rotate_and_write", device, shape.dtype, call)


def _words(device: torch.device) -> Case:
    """Random words, compared as numbers: a single wrong bit changes most of them."""
    seed = torch.tensor([7], device=device)
    positions = torch.arange(3, device=device) * 1000

    def call() -> tuple[Tensor, ...]:
        return (dispatch.random_words(seed, positions, 75).double(),)

    return Case("random_words", device, torch.float32, call)


def _product(device: torch.device, shape: ModelShape) -> Case:
    """The most rows that it ever takes, times random bytes: any byte is two 4-bit numbers."""
    generator = torch.Generator().manual_seed(8)
    count = _CHANNELS * shape.hidden
    packed = torch.randint(0, 256, (count // 2,), dtype=torch.uint8, generator=generator).to(device)
    absmax = torch.rand(count // BLOCK_SIZE, generator=generator).to(device) + 0.1
    code = torch.linspace(-1, 1, 16, device=device)
    x = _normal((MAX_ROWS, shape.hidden), 9, device, shape.dtype)
    return Case("matmul_4bit", device, shape.dtype, lambda: (dispatch.matmul_4bit(x, packed, absmax, code),))


def _int8_product(device: torch.device, shape: ModelShape) -> Case:
    """Activations with an outlier, as quantised models have them, and a bias."""
    generator = torch.Generator().manual_seed(10)
    codes = torch.randint(-127, 128, (_CHANNELS, shape.hidden), dtype=torch.int8, generator=generator)
    codes, absmax = codes.to(device), torch.rand(_CHANNELS, generator=generator).to(device) + 0.1
    x, bias = (_normal(size, 12, device, shape.dtype) for size in ((_ROWS, shape.hidden), (_CHANNELS,)))
    x[1, 3] = 100.0

    def call() -> tuple[Tensor, ...]:
        import bitsandbytes  # noqa: F401  registers the product of integers

        return (dispatch.int8_product(x, codes, absmax, bias),)

    return Case("int8_product", device, shape.dtype, call)


def _normal(size: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
