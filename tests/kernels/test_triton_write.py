"""Writing keys and values, with and without rotation, against the plain PyTorch that defines it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, assert_near, needs_triton, normal

from treeeagle_edge.kernels.reference_layers import rotate
from treeeagle_edge.kernels.triton import reference
from treeeagle_edge.kernels.triton.operands import HeadNorm, KVScales, Pool
from treeeagle_edge.model.rope import RotaryTable
from treeeagle_edge.model_config import RopeConfig

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton import kv_write

pytestmark = needs_triton
SLOTS, KV_HEADS, HEADS = 90, 2, 4
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def empty_pool(dim: int, dtype: torch.dtype) -> Pool:
    keys, values = (torch.full((SLOTS, KV_HEADS, dim), 9, dtype=dtype, device=DEVICE) for _ in range(2))
    if dtype != torch.int8:
        return Pool(keys, values)
    scales = (torch.full((SLOTS, KV_HEADS), 9.0, device=DEVICE) for _ in range(2))
    return Pool(keys, values, KVScales(*scales))


def some_slots(rows: int) -> Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(5))[:rows].to(DEVICE)


def assert_same_pool(ours: Pool, expected: Pool) -> None:
    """Written slots equal up to rounding, a step of int8; all others untouched."""
    for mine, theirs in ((ours.keys, expected.keys), (ours.values, expected.values)):
        if mine.dtype == torch.int8:
            assert int((mine.int() - theirs.int()).abs().max()) <= 1
        else:
            assert_near(mine, theirs)
    if ours.scales is not None and expected.scales is not None:
        assert_near(ours.scales.keys, expected.scales.keys)
        assert_near(ours.scales.values, expected.scales.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (5, 80), (20, 16)])
def test_keys_and_values_reach_their_slots(rows: int, dim: int, dtype: torch.dtype) -> None:
    kv, slots = normal(rows, 2 * KV_HEADS, dim, seed=1), some_slots(rows)
    ours, expected = empty_pool(dim, dtype), empty_pool(dim, dtype)
    kv_write.write(kv, slots, ours)
    reference.write(kv, slots, expected)
    assert_same_pool(ours, expected)
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert bool((ours.keys[untouched] == 9).all())


def test_int8_keeps_zero_and_the_largest_value_and_marks_what_is_not_finite() -> None:
    kv = normal(5, 2 * KV_HEADS, 16, seed=1)
    kv[4] *= 1e-42
    kv[0], kv[1, 0, 3], kv[2, 0, 0], kv[3, 0, 0] = 0.0, -1e4, float("nan"), float("inf")
    pool = empty_pool(16, torch.int8)
    kv_write.write(kv, torch.arange(5, device=DEVICE), pool)
    assert pool.scales is not None
    assert not pool.keys[0].any() and not pool.scales.keys[0].any() and not pool.keys[4].any()
    assert int(pool.keys[1, 0, 3]) == -127
    assert float(pool.scales.keys[1, 0]) == pytest.approx(1e4 / 127)
    assert pool.scales.keys[2:4, 0].isnan().all() and pool.scales.keys[:, 1].isfinite().all()
    assert pool.scales.values.isfinite().all()


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (3, 96), (7, 16)])
def test_rotation_equals_the_reference(rows: int, dim: int, dtype: torch.dtype, normalizes: bool) -> None:
    table = RotaryTable(RopeConfig(theta=10_000.0), dim, 200, DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 13 + 1
    rotation = table.at(positions)
    norm = HeadNorm(normal(HEADS + KV_HEADS, dim, seed=7), 1e-6) if normalizes else None
    qkv, slots = normal(rows, HEADS + 2 * KV_HEADS, dim, seed=1), some_slots(rows)
    ours, expected = empty_pool(dim, dtype), empty_pool(dim, dtype)
    query = kv_write.rotate_and_write(qkv, rotation, slots, ours, torch.float32, norm)
    assert_near(query, reference.rotate_and_write(qkv, rotation, slots, expected, torch.float32, norm), 4)
    assert_same_pool(ours, expected)


def test_the_reference_rotates_as_the_model_does() -> None:
    """`reference_layers.rotate` is what target and head call."""
    rows, dim = 5, 64
    table = RotaryTable(RopeConfig(theta=10_000.0), dim, 200, DEVICE)
    positions, slots = torch.arange(40, 40 + rows, device=DEVICE), some_slots(rows)
    qkv, pool = normal(rows, HEADS + 2 * KV_HEADS, dim, seed=1), empty_pool(dim, torch.float32)
    rotation = table.at(positions)
    query = reference.rotate_and_write(qkv, rotation, slots, pool, torch.float32)
    rotated = rotate(qkv[:, : HEADS + KV_HEADS], *rotation.rows)
    assert_near(query, rotated[:, :HEADS])
    assert_near(pool.keys[slots], rotated[:, HEADS:])
    assert torch.equal(pool.values[slots], qkv[:, HEADS + KV_HEADS :])


def test_rows_of_a_16_bit_tensor_with_gaps_are_read_where_they_lie() -> None:
    wide = normal(6, 2 * KV_HEADS + 3, 32, seed=2, dtype=torch.float16)
    kv, slots = wide[::2, 3:], some_slots(3)
    ours, expected = empty_pool(32, torch.float16), empty_pool(32, torch.float16)
    kv_write.write(kv, slots, ours)
    reference.write(kv, slots, expected)
    assert torch.equal(ours.keys, expected.keys) and torch.equal(ours.values, expected.values)
