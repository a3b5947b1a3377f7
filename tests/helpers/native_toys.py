"""Random targets and draft heads on native kernels, with the exact values of their weights for numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy_reference import LayerSpec

from treeeagle_edge.kernels.native.head import Head
from treeeagle_edge.kernels.native.library import check, library
from treeeagle_edge.kernels.native.loader import problem
from treeeagle_edge.kernels.native.model import Model
from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.structs import FORMATS, HeadConfig, ModelConfig
from treeeagle_edge.kernels.native.team import Team

needs_native = pytest.mark.skipif(problem() is not None, reason=f"no native kernels: {problem()}")

H, WIDE, HEADS, KV, DIM, V, LAYERS, SLOTS, EPS = 96, 160, 4, 2, 32, 77, 3, 256, 1e-5
HEAD_WIDE, HEAD_HEADS, VD, TAPS = 128, 3, 50, 3  # of the draft head; its KV heads are as many as its heads


@dataclass
class Toy:
    """A random target: native, and its exact values for numpy."""

    model: Model
    layers: list[LayerSpec]
    embedding: Any
    final_norm: Any
    cos: Any
    sin: Any
    scales: tuple[float, float, float]


def exact(fmt: str, w: Any) -> Any:
    """The values a matrix has after quantising."""
    out = np.empty_like(w)
    check(library().te_unpack(FORMATS[fmt], 0, w.ctypes.data, w.nbytes, *w.shape, out.ctypes.data))
    return out


@dataclass(frozen=True)
class ToyWeights:
    """Weights of a toy, in fp32 and read-only. `matrices` and `vectors` have an entry for each layer."""

    matrices: list[dict[str, Any]]
    vectors: list[dict[str, Any]]
    embedding: Any
    final_norm: Any
    layers: list[LayerSpec]  # as they are after quantising
    exact_embedding: Any


@lru_cache(maxsize=64)
def toy_weights(fmt: str, extras: bool, vocabulary: int) -> ToyWeights:
    """The same for every team: a test makes hundreds of toys, and most of the time would go into their weights."""
    rng = np.random.default_rng(7)

    def normal(*shape: int, scale: float = 0.1, mean: float = 0.0) -> Any:
        return frozen(mean + (rng.standard_normal(shape) * scale).astype(np.float32))

    shapes = {
        "q": (HEADS * DIM, H), "k": (KV * DIM, H), "v": (KV * DIM, H), "o": (H, HEADS * DIM),
        "gate": (WIDE, H), "up": (WIDE, H), "down": (H, WIDE),
    }  # fmt: skip
    matrices, vectors = [], []
    for _ in range(LAYERS):
        matrices.append({name: normal(*shape) for name, shape in shapes.items()})
        vectors.append({name: normal(H, mean=1) for name in ("attention_norm", "mlp_norm")})
        if extras:
            vectors[-1] |= {f"{n}_bias": normal(shapes[n][0]) for n in ("q", "k", "v", "o")}
            vectors[-1] |= {name: normal(DIM, mean=1) for name in ("q_norm", "k_norm")}
    embedding, final_norm = normal(vocabulary, H, scale=1.0), normal(H, mean=1)
    layers = [
        LayerSpec({name: frozen(exact(fmt, matrix)) for name, matrix in each.items()}, own)
        for each, own in zip(matrices, vectors, strict=True)
    ]
    return ToyWeights(matrices, vectors, embedding, final_norm, layers, frozen(exact("q8", embedding)))


def frozen(array: Any) -> Any:
    """The array, which nobody may write to from now on."""
    array.flags.writeable = False
    return array


def toy(isa: str, threads: int = 1, *, fmt: str = "q8", extras: bool = False, vocabulary: int = V) -> Toy:
    """`extras`: biases, q and k norms, and the scales of MiniCPM."""
    weights = toy_weights(fmt, extras, vocabulary)
    scales = (1.7, 0.6, 0.8) if extras else (1.0, 1.0, 1.0)
    config = ModelConfig(LAYERS, H, WIDE, HEADS, KV, DIM, vocabulary, SLOTS, 64, EPS, *scales)
    model = Model(Team(threads, isa), config)
    for layer in range(LAYERS):
        for name, matrix in weights.matrices[layer].items():
            model.matrix(name, fmt, matrix, layer)
        for name, vector in weights.vectors[layer].items():
            model.vector(name, vector, layer)
    model.matrix("embedding", "q8", weights.embedding)
    model.vector("final_norm", weights.final_norm)
    angles = np.arange(SLOTS)[:, None] / 10_000 ** (np.arange(0, DIM, 2) / DIM)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    model.rope(cos, sin)
    model.ready()
    return Toy(model, weights.layers, weights.exact_embedding, weights.final_norm, cos, sin, scales)


def store() -> Store:
    """An empty store for the toy."""
    return Store.allocate(LAYERS, SLOTS, KV, DIM)


def causal(model: Model, ids: Any, at: Store, slots: Any, cuts: tuple[int, ...] = ()) -> Any:
    """Logits of every row of a prompt, read in chunks that end at `cuts`."""
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        span = np.arange(begin, end)
        out = model.forward(
            ids[span],
            span,
            slots[span],
            View(slots[:begin], slots[span]),
            at,
            logit_rows=np.arange(end - begin),
        )
        parts.append(out.logits.copy())
    return np.concatenate(parts)


@dataclass
class ToyHead:
    """A random head, its exact values for numpy, and the target it drafts for."""

    head: Head
    spec: LayerSpec
    fc: Any
    lm_head: Any
    vectors: dict[str, Any]
    ids: Any
    target: Any


def toy_head(
    isa: str, threads: int = 1, *, before_residual: bool = False, norm_output: bool = False
) -> ToyHead:
    target = toy(isa, threads)
    rng = np.random.default_rng(11)
    normal = lambda *shape: (rng.standard_normal(shape) * 0.1).astype(np.float32)  # noqa: E731
    wide = HEAD_HEADS * DIM
    config = HeadConfig(
        H, TAPS * H, HEAD_WIDE, HEAD_HEADS, HEAD_HEADS, DIM, VD, SLOTS, 32, 16, 24, EPS,
        before_residual, norm_output,
    )  # fmt: skip
    head = Head(target.model, config)
    shapes = {
        "q": (wide, 2 * H), "k": (wide, 2 * H), "v": (wide, 2 * H), "o": (H, wide), "gate": (HEAD_WIDE, H),
        "up": (HEAD_WIDE, H), "down": (H, HEAD_WIDE), "fc": (H, TAPS * H), "lm_head": (VD, H),
    }  # fmt: skip
    values = {}
    for name, shape in shapes.items():
        matrix = normal(*shape)
        head.matrix(name, "q8", matrix)
        values[name] = exact("q8", matrix)
    vectors = {name: 1 + normal(H) for name in ("attention_norm", "mlp_norm", "hidden_norm", "final_norm")}
    for name, vector in vectors.items():
        head.vector(name, vector)
    ids = np.sort(rng.permutation(V)[:VD]).astype(np.int64)
    head.target_ids(ids)
    head.rope(target.cos, target.sin)
    head.ready()
    return ToyHead(head, LayerSpec(values, vectors), values["fc"], values["lm_head"], vectors, ids, target)
