"""Launches that the supported models make, by name, on tensors without memory: only shapes and types matter."""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.kernels.triton import attention, int8_rows, kv_write, matmul_4bit, noise, rowwise
from treeeagle_edge.kernels.triton.launch import Launch
from treeeagle_edge.kernels.triton.operands import HeadNorm, KVScales, Pool, Rotation
from treeeagle_edge.kernels.view import AttentionView

_DEMO, _8B = (9, 3, 64), (32, 8, 128)  # query heads, KV heads, head size: SmolLM2-135M, Llama-3.1-8B
_BETWEEN = ((32, 32, 80), (32, 8, 96))
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_SLOTS, _PREFIX = 8192, 4096


def launched() -> dict[str, Launch]:
    """Name -> launch: every kernel, for one row, sixteen and sixty-four, in the types and head sizes in use.

    A target keeps its queries in fp32, a head in the type of its pool.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: dict[str, Launch] = {}
    for rows in (1, 16, 64):
        found |= _attention(rows, _DEMO, bf16) | _attention(rows, _8B, bf16)
        found |= _attention(rows, _8B, bf16, int8=True)
    found |= _attention(8, _8B, bf16) | _attention(16, _8B, bf16, query=bf16)
    for shape in _BETWEEN:
        found |= _attention(1, shape, bf16) | _attention(64, shape, bf16)
    for rows in (1, 16, 64):
        found |= _attention(rows, _DEMO, bf16, known=False) | _attention(rows, _8B, bf16, known=False)
    found |= _attention(64, _8B, bf16, int8=True, known=False) | _attention(16, _8B, fp32, known=False)
    found |= _attention(64, _DEMO, bf16, int8=True) | _attention(64, _8B, fp16) | _attention(64, _8B, fp32)
    for rows in (64, 256):
        view, table = _view(rows), _table(rows)
        found[f"ancestor table, {rows} rows"] = attention.table_launch(view, table)
    found["KV write, bf16"] = _write(rotates=False)
    found["rotate and write, bf16"] = _write()
    found["rotate and write with head norm, int8"] = _write(int8=True, normalizes=True)
    x, weight = _empty(16, 4096, dtype=fp32), _empty(4096, dtype=fp32)
    found["RMSNorm, 4,096"] = rowwise.norm_launch(x, weight, 1e-6, _empty(16, 4096))
    found["add and RMSNorm, 4,096"] = rowwise.norm_launch(x, weight, 1e-6, _empty(16, 4096), _empty(16, 4096))
    x, weight = _empty(16, 4096), _empty(4096)
    found["add and RMSNorm of a head, 4,096"] = rowwise.norm_launch(
        x, weight, 1e-6, _empty(16, 4096), _empty(16, 4096)
    )
    found["SiLU gate"] = rowwise.gate_launch(_empty(16, 28672), _empty(16, 14336))
    words = _empty(6, 128_256, dtype=torch.int64)
    found["random words"] = noise.words_launch(words[0, :1], words[0, :6], words)
    x, codes, steps = _empty(16, 14336), _empty(32, 14336, dtype=torch.int8), _empty(16, dtype=fp32)
    found["int8 codes of rows"] = int8_rows.split_launch(x, codes, steps)
    sums, absmax = _empty(32, 6144, dtype=torch.int32), _empty(6144, dtype=fp32)
    found["int8 sums to rows"] = int8_rows.scale_launch(sums, steps, absmax, _empty(16, 6144))
    for rows in (16, 32, 64):
        found[f"4-bit product, bf16, {rows} rows"] = _product(rows, 6144, bf16)
    found["4-bit product, fp16, 64 rows"] = _product(64, 6144, fp16)
    found["4-bit product, narrow, bf16, 16 rows"] = _product(16, 112, bf16)
    return found


def _attention(
    rows: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    int8: bool = False,
    known: bool = True,
    query: torch.dtype = torch.float32,
) -> dict[str, Launch]:
    """`dtype`: of the pool and the result; `known`: whether the host knows how long the prefix is."""
    heads, kv_heads, dim = shape
    queries, out = (_empty(rows, heads, dim, dtype=each) for each in (query, dtype))
    pool = _pool(kv_heads, dim, dtype, int8)
    over_prefix, over_ancestors = attention.launches(
        queries, pool.keys, pool.values, _view(rows, known), _table(rows), out, pool.scales
    )
    kind = f"{dim}, {'int8' if int8 else _NAMES[dtype]}{'' if known else ', device length'}"
    kind += "" if query == torch.float32 else ", of a head"
    return {
        f"prefix, {kind}, {over_prefix.arguments['block_q']} rows": over_prefix,
        f"ancestors, {kind}": over_ancestors,
    }


def _write(rotates: bool = True, int8: bool = False, normalizes: bool = False) -> Launch:
    heads, kv_heads, dim = _8B
    rows, positions = 16, _empty(16, dtype=torch.int64)
    pool = _pool(kv_heads, dim, torch.bfloat16, int8)
    if not rotates:
        return kv_write.write_launch(_empty(rows, 2 * kv_heads, dim), positions, pool)
    angles = _empty(_SLOTS, dim // 2, dtype=torch.float32)
    rotation = Rotation(angles, angles, positions)
    norm = HeadNorm(_empty(heads + kv_heads, dim, dtype=torch.float32), 1e-6) if normalizes else None
    # a target keeps its queries in fp32
    qkv, query = _empty(rows, heads + 2 * kv_heads, dim), _empty(rows, heads, dim, dtype=torch.float32)
    return kv_write.write_launch(qkv, positions, pool, rotation, norm, query)


def _product(rows: int, out_size: int, dtype: torch.dtype) -> Launch:
    in_size = 4096
    packed = _empty(out_size * in_size // 2, dtype=torch.uint8)
    absmax = _empty(out_size * in_size // 64, dtype=torch.float32)
    code = _empty(16, dtype=torch.float32)
    x, out = _empty(rows, in_size, dtype=dtype), _empty(rows, out_size, dtype=dtype)
    return matmul_4bit.matmul_launch(x, packed, absmax, code, out)


def _pool(kv_heads: int, dim: int, dtype: torch.dtype, int8: bool) -> Pool:
    rows = _empty(_SLOTS, kv_heads, dim, dtype=torch.int8 if int8 else dtype)
    scales = _empty(_SLOTS, kv_heads, dtype=torch.float32)
    return Pool(rows, rows, KVScales(scales, scales) if int8 else None)


def _view(rows: int, known: bool = True) -> AttentionView:
    prefix, own = _empty(_PREFIX, dtype=torch.int64), _empty(rows, dtype=torch.int64)
    length = None if known else _empty(1, dtype=torch.int64)
    return AttentionView(prefix, own, _empty(rows, rows, dtype=torch.bool), length)


def _table(rows: int) -> attention.AncestorTable:
    slots, counts = _empty(rows, rows, dtype=torch.int64), _empty(rows, dtype=torch.int32)
    return attention.AncestorTable(slots, counts)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
