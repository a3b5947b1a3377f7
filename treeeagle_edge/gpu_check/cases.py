"""Calls of every Triton kernel in several shapes, each with the same call of its reference in plain PyTorch.

Only the calls import Triton, so that the list can be made where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from treeeagle_edge.gpu_check.inputs import (
    Case,
    empty_pool,
    floats_of,
    name_of,
    normal,
    random_tree,
    scattered_slots,
)
from treeeagle_edge.gpu_check.product_cases import int8_case, product_case
from treeeagle_edge.kernels import reference
from treeeagle_edge.kernels.triton import reference as plain
from treeeagle_edge.kernels.triton.operands import HeadNorm, KVScales, Pool
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model.rope import RotaryTable
from treeeagle_edge.model_config import RopeConfig


def cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """All kernels, in the shapes of Llama-3.1-8B, Qwen2-7B and SmolLM2-135M, or in tiny ones."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    large = (32, 8, 128), (28, 4, 128), (9, 3, 64)
    llama, qwen, smol = ((4, 2, 16), (7, 1, 16), (3, 3, 16)) if small else large
    long, short = (40, 10) if small else (2100, 130)
    tall = 8 if small else 64
    yield attention_case(device, llama, bf16, rows=1, prefix=long)
    yield attention_case(device, llama, bf16, rows=tall // 2, prefix=long)
    yield attention_case(device, qwen, bf16, rows=tall, prefix=short)
    yield attention_case(device, smol, bf16, rows=tall // 4, prefix=long)
    yield attention_case(device, llama, bf16, rows=tall, prefix=0)
    yield attention_case(device, llama, fp16, rows=tall // 4, prefix=short, scale=1e3)
    yield attention_case(device, smol, fp32, rows=tall // 4, prefix=short)
    yield attention_case(device, llama, torch.int8, rows=tall // 4, prefix=short)
    yield attention_case(device, llama, bf16, rows=8 if small else 256, prefix=short, causal=True)
    yield attention_case(device, llama, bf16, rows=tall // 4, prefix=short, spoiled=True)
    for dtype in (bf16, torch.int8):
        yield write_case(device, llama, dtype, rows=tall)
        yield rotate_case(device, llama, dtype, rows=tall // 4, normalizes=dtype == torch.int8)
    width = 64 if small else 4096
    yield from rowwise_cases(device, bf16, tall, width, stream=fp32)
    yield from rowwise_cases(device, bf16, tall // 4, width, stream=bf16)
    for rows, out_size, in_size in (
        ((2, 33, 64), (8, 64, 128))
        if small
        else (
            (2, 4608, 3584),
            (16, 6144, 4096),
            (33, 112, 4096),
            (64, 4096, 14_336),
        )
    ):
        yield product_case(device, bf16, rows, out_size, in_size)
    yield product_case(device, fp16, tall // 4 + 1, width, width)
    for rows in (1, tall // 4 + 1):
        yield int8_case(device, bf16, rows, width, width + 64)


def attention_case(
    device: torch.device,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    rows: int,
    prefix: int,
    causal: bool = False,
    scale: float = 1.0,
    spoiled: bool = False,
) -> Case:
    """Attention over a random tree, or over a piece of a prompt.

    heads: (query heads, KV heads, their size). scale: factor of queries and keys. spoiled: one node holds NaN, which
    may reach only its descendants.
    """
    query_heads, kv_heads, dim = heads
    floating = torch.bfloat16 if dtype == torch.int8 else dtype
    slots = prefix + rows + 9
    query = normal((rows, query_heads, dim), 1, device, floating) * scale
    keys = normal((slots, kv_heads, dim), 2, device, floating) * scale
    values = normal((slots, kv_heads, dim), 3, device, floating)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(4)).to(device)
    visible = torch.ones(rows, rows, dtype=torch.bool).tril() if causal else random_tree(rows)
    if spoiled:
        keys[order[prefix + 1]], values[order[prefix + 1]] = float("nan"), float("nan")
    scales: KVScales | None = None
    read_keys, read_values = keys, values
    if dtype == torch.int8:
        (keys, key_scales), (values, value_scales) = (
            plain.quantize(keys.float()),
            plain.quantize(values.float()),
        )
        scales = KVScales(key_scales, value_scales)
        read_keys, read_values = plain.dequantize(Pool(keys, values, scales))

    def view() -> AttentionView:
        return AttentionView(order[:prefix], order[prefix : prefix + rows], visible.to(device))

    def ours() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton.attention import (
            attention,
        )  # imports triton, so only where it can run

        return (attention(query, keys, values, view(), scales=scales),)

    def expected() -> tuple[Tensor, ...]:
        return (reference.attention(query, read_keys, read_values, view()),)

    kind = "prompt" if causal else "tree with NaN" if spoiled else "tree"
    name = f"attention {query_heads}/{kv_heads}x{dim} {name_of(dtype)}, {kind} of {rows} after {prefix}"
    return Case(name, dtype, ours, expected)


def write_case(device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype, rows: int) -> Case:
    """Writing keys and values to their slots."""
    _, kv_heads, dim = heads
    kv = normal((rows, 2 * kv_heads, dim), 1, device, torch.bfloat16)
    slots = scattered_slots(rows, device)

    def ours() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton import kv_write

        pool = empty_pool(2 * rows, kv_heads, dim, dtype, device)
        kv_write.write(kv, slots, pool)
        return floats_of(pool)

    def expected() -> tuple[Tensor, ...]:
        pool = empty_pool(2 * rows, kv_heads, dim, dtype, device)
        plain.write(kv, slots, pool)
        return floats_of(pool)

    return Case(f"KV write {kv_heads}x{dim} {name_of(dtype)}, {rows} rows", dtype, ours, expected)


def rotate_case(
    device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype, rows: int, normalizes: bool
) -> Case:
    """RoPE, after a norm of each head where `normalizes`, and writing keys and values to their slots."""
    query_heads, kv_heads, dim = heads
    qkv = normal((rows, query_heads + 2 * kv_heads, dim), 1, device, torch.bfloat16)
    table = RotaryTable(RopeConfig(), dim, 8 * rows, device)
    rotation = table.at(torch.arange(rows, device=device) * 7)
    norm = (
        HeadNorm(normal((query_heads + kv_heads, dim), 5, device, torch.float32), 1e-6)
        if normalizes
        else None
    )
    slots = scattered_slots(rows, device)

    def ours() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton import kv_write

        pool = empty_pool(2 * rows, kv_heads, dim, dtype, device)
        query = kv_write.rotate_and_write(qkv, rotation, slots, pool, torch.float32, norm)
        return query, *floats_of(pool)

    def expected() -> tuple[Tensor, ...]:
        pool = empty_pool(2 * rows, kv_heads, dim, dtype, device)
        query = plain.rotate_and_write(qkv, rotation, slots, pool, torch.float32, norm)
        return query, *floats_of(pool)

    what = "norm, rotate and write" if normalizes else "rotate and write"
    return Case(f"{what} {query_heads}/{kv_heads}x{dim} {name_of(dtype)}, {rows} rows", dtype, ours, expected)


def rowwise_cases(
    device: torch.device, dtype: torch.dtype, rows: int, width: int, stream: torch.dtype
) -> Iterator[Case]:
    """RMSNorm, RMSNorm after the residual sum, and SiLU gating. stream: fp32 in a target, 16 bits in a head."""
    x = normal((rows, width), 1, device, stream)
    branch, weight = normal((rows, width), 2, device, dtype), normal((width,), 3, device, stream)
    wide = normal((rows, 2 * width), 4, device, dtype)

    def added() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton import rowwise

        kept = x.clone()
        return rowwise.add_rms_norm(kept, branch, weight, 1e-5, dtype, scale=0.5), kept

    def added_plainly() -> tuple[Tensor, ...]:
        kept = x.clone()
        return plain.add_rms_norm(kept, branch, weight, 1e-5, dtype, scale=0.5), kept

    def normed() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton import rowwise

        return (rowwise.rms_norm(x, weight, 1e-5, dtype),)

    def gated() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton import rowwise

        return (rowwise.silu_gate(wide),)

    shape = f"{rows} x {width}, stream of {name_of(stream)}"
    yield Case(f"RMSNorm {shape}", dtype, normed, lambda: (plain.rms_norm(x, weight, 1e-5, dtype),))
    yield Case(f"add and RMSNorm {shape}", dtype, added, added_plainly)
    yield Case(f"SiLU gate {rows} x {width}", dtype, gated, lambda: (plain.silu_gate(wide),))
