"""The quantised arithmetic of the native kernels in plain numpy, sums in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BLOCK = 32


def bf16(x: Array) -> Array:
    """Round to bf16 (nearest even), back in float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def bf16_bits(x: Array) -> Array:
    """The 16 bits of bf16, uint16."""
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16)


def quantise_rows(x: Array) -> tuple[Array, Array]:
    """int8 values and one scale (absmax / 127) for each block of 32."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    peak = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(blocks * inverse).astype(np.int32), (peak / np.float32(127))[..., 0]


def through_int8(x: Array) -> Array:
    """What a projection sees of its input."""
    q, scale = quantise_rows(x)
    return (q * scale[..., None].astype(np.float64)).reshape(x.shape)


def project(x: Array, w: Array) -> Array:
    """x [.., k] as int8 blocks times w [n, k] (its exact values)."""
    return (through_int8(x) @ w.T.astype(np.float64)).astype(np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis."""
    x64 = x.astype(np.float64)
    return (x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * weight).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate-half RoPE; x [rows, heads, d], cos and sin [rows, d / 2]."""
    a, b = np.split(x, 2, -1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate((a * c - b * s, b * c + a * s), -1)


def attention(query: Array, keys: Array, values: Array, lists: list[list[int]]) -> Array:
    """query [M, heads, d] (scaled) over keys, values [slots, kv_heads, d]; bf16 operands, one list a row.

    Exact up to sums for rows that read at most 64 slots; beyond, kernels round against a running peak.
    """
    rows, heads, _ = query.shape
    group = heads // keys.shape[1]
    out = np.empty_like(query)
    q, k, v = bf16(query), bf16(keys), bf16(values)
    for m in range(rows):
        for h in range(heads):
            own_k, own_v = (
                k[lists[m], h // group].astype(np.float64),
                v[lists[m], h // group].astype(np.float64),
            )
            score = own_k @ q[m, h].astype(np.float64)
            weight = np.exp(score - score.max())
            out[m, h] = bf16(weight.astype(np.float32)).astype(np.float64) @ own_v / weight.sum()
    return out


@dataclass
class LayerSpec:
    """Weights of a random layer by their names; matrices are exact (already quantised) values."""

    matrices: dict[str, Array]
    vectors: dict[str, Array] = field(default_factory=dict)


def layer_body(
    spec: LayerSpec, entry: Array, x: Array, keys: Array, values: Array, slots: Array, lists: list[list[int]],
    cos: Array, sin: Array, *, heads: int, kv_heads: int, dim: int, eps: float, residual: float,
) -> Array:  # fmt: skip
    """A decoder layer after its input norm; keys and values [slots, kv_heads, dim] are written in place."""
    rows = len(x)
    w, vec = spec.matrices, spec.vectors

    def heads_of(name: str, count: int) -> Array:
        y = project(entry, w[name]) + vec.get(f"{name}_bias", np.float32(0))
        return y.reshape(rows, count, dim).astype(np.float32)

    q, k, v = heads_of("q", heads), heads_of("k", kv_heads), heads_of("v", kv_heads)
    if "q_norm" in vec:
        q, k = rms_norm(q, vec["q_norm"], eps), rms_norm(k, vec["k_norm"], eps)
    q, k = rotate(q, cos, sin) / np.sqrt(dim), rotate(k, cos, sin)
    keys[slots], values[slots] = k, v
    mixed = attention(q.astype(np.float32), keys, values, lists).reshape(rows, -1)
    x = x + residual * (project(mixed, w["o"]) + vec.get("o_bias", np.float32(0)))
    normed = rms_norm(x, vec["mlp_norm"], eps)
    gate, up = project(normed, w["gate"]), project(normed, w["up"])
    gated = (gate / (1 + np.exp(-gate.astype(np.float64))) * up).astype(np.float32)
    return (x + residual * project(gated, w["down"])).astype(np.float32)
