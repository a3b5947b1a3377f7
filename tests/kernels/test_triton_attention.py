"""Tree attention in Triton against the plain PyTorch that defines it, and against itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, assert_near, needs_triton, normal, random_tree, tree_view

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels import reference
from treeeagle_edge.kernels.triton import reference as plain
from treeeagle_edge.kernels.triton.operands import KVScales, Pool
from treeeagle_edge.kernels.view import AttentionView

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton import attention as subject

pytestmark = needs_triton
SLOTS = 300
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(
    rows: int,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [rows, heads, dim] and pools [SLOTS, kv_heads, dim]; Q and K of magnitude `scale`."""
    query = normal(rows, heads, dim, seed=1, dtype=dtype, scale=scale)
    keys = normal(SLOTS, kv_heads, dim, seed=2, dtype=dtype, scale=scale)
    return query, keys, normal(SLOTS, kv_heads, dim, seed=3, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_equals_the_reference_for_every_head_size_and_dtype(dim: int, dtype: torch.dtype) -> None:
    query, keys, values = inputs(5, dim=dim, dtype=dtype)
    view = tree_view(70, 5, SLOTS)
    ours = subject.attention(query, keys, values, view)
    assert ours.dtype == dtype and ours.shape == query.shape
    assert_near(ours, reference.attention(query, keys, values, view))


@pytest.mark.parametrize(
    ("prefix", "rows"), [(0, 1), (0, 7), (1, 1), (31, 3), (32, 5), (33, 1), (128, 2), (130, 17), (229, 43)]
)
def test_equals_the_reference_for_every_prefix_and_tree(prefix: int, rows: int) -> None:
    """No prefix, prefixes around the block of 32 and the split of 128; one row, and 43, which with three heads each are
    one more than a tile holds.
    """
    query, keys, values = inputs(rows)
    view = tree_view(prefix, rows, SLOTS, seed=rows)
    assert_near(subject.attention(query, keys, values, view), reference.attention(query, keys, values, view))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (9, 3), (7, 1), (20, 1)])
def test_equals_the_reference_for_every_grouping(heads: int, kv_heads: int) -> None:
    """Groups of 1, 3, 7 and 20: fewer heads than a tile has rows, and more."""
    query, keys, values = inputs(6, heads, kv_heads, dim=32)
    view = tree_view(40, 6, SLOTS)
    assert_near(subject.attention(query, keys, values, view), reference.attention(query, keys, values, view))


def test_equals_the_reference_for_a_piece_of_a_prompt() -> None:
    """A causal chunk: a row's ancestors fill several blocks."""
    rows = 50
    query, keys, values = inputs(rows, dim=16)
    visible = torch.ones(rows + 1, rows + 1, dtype=torch.bool, device=DEVICE).tril()[:rows, :rows]
    slots = torch.arange(20, 20 + 37 + rows, device=DEVICE)
    view = AttentionView(slots[:37], slots[37:], visible)
    assert_near(subject.attention(query, keys, values, view), reference.attention(query, keys, values, view))


def test_drafting_rows_may_see_rows_of_earlier_levels() -> None:
    """The head's view: two query rows, seven rows written before or now."""
    query, keys, values = inputs(2)
    granted = [[1, 0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1]]
    visible = torch.tensor(granted, dtype=torch.bool, device=DEVICE)
    view = AttentionView(torch.arange(9, device=DEVICE), torch.arange(40, 47, device=DEVICE), visible)
    assert_near(subject.attention(query, keys, values, view), reference.attention(query, keys, values, view))


def test_reads_a_layer_of_a_store_and_heads_of_a_wider_tensor() -> None:
    """Query heads in front of keys and values in one tensor, and the second of three layers of a pool."""
    wide = normal(4, 6 + 2 + 2, 64, seed=1)
    keys, values = normal(3, SLOTS, 2, 64, seed=2), normal(3, SLOTS, 2, 64, seed=3)
    view = tree_view(50, 4, SLOTS)
    ours = subject.attention(wide[:, :6], keys[1], values[1], view)
    assert_near(ours, reference.attention(wide[:, :6], keys[1], values[1], view))


@pytest.mark.parametrize("pool", [torch.float16, torch.bfloat16])
def test_takes_queries_in_fp32_over_a_pool_in_16_bits(pool: torch.dtype) -> None:
    """As the target hands them over; products take them in the dtype of the pool."""
    query, keys, values = inputs(3)
    keys, values = keys.to(pool), values.to(pool)
    view = tree_view(50, 3, SLOTS)
    ours = subject.attention(query, keys, values, view)
    assert ours.dtype == torch.float32
    expected = reference.attention(query, keys, values, view)
    assert float((ours - expected).abs().max()) < 8 * torch.finfo(pool).eps
    rounded = subject.attention(query, keys, values, view, pool)
    assert rounded.dtype == pool and float((rounded - ours).abs().max()) < 2 * torch.finfo(pool).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_queries_and_keys_do_not_overflow(dtype: torch.dtype) -> None:
    """Products far beyond fp16's 65,504, in prefix and tree."""
    query, keys, values = inputs(5, dim=128, dtype=dtype, scale=1e3)
    view = tree_view(100, 5, SLOTS)
    products = torch.einsum("mhd,shd->mhs", query.double(), keys.double().repeat_interleave(3, dim=1))
    assert products.abs().max() > 65_504
    ours = subject.attention(query, keys, values, view)
    assert torch.isfinite(ours).all()
    assert_near(ours, reference.attention(query, keys, values, view))


@pytest.mark.parametrize("junk", [50.0, float("nan"), float("inf")])
def test_slots_that_are_not_granted_do_not_matter(junk: float) -> None:
    """K and V of siblings and of foreign slots, NaN included, leave a row's bits alone."""
    rows = 6
    query, keys, values = inputs(rows, dim=16)
    view = tree_view(30, rows, SLOTS, seed=4)
    before = subject.attention(query, keys, values, view)
    for row in range(rows):
        foreign = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
        foreign[view.prefix] = False
        foreign[view.rows[view.visible[row]]] = False
        k, v = keys.clone(), values.clone()
        k[foreign], v[foreign] = junk, -junk
        assert torch.equal(subject.attention(query, k, v, view)[row], before[row])


@pytest.mark.parametrize("where", ["prefix", "node"])
def test_nan_reaches_exactly_the_rows_that_read_it(where: str) -> None:
    rows = 8
    query, keys, values = inputs(rows, dim=16)
    view = tree_view(30, rows, SLOTS, seed=3)
    slot = view.prefix[7] if where == "prefix" else view.rows[2]
    keys[slot], values[slot] = float("nan"), float("nan")
    ours = subject.attention(query, keys, values, view)
    spoiled = ours.isnan().flatten(1).all(dim=1)
    readers = torch.ones(rows, dtype=torch.bool) if where == "prefix" else view.visible[:, 2].cpu()
    assert torch.equal(spoiled.cpu(), readers)
    assert_near(ours, reference.attention(query, keys, values, view))


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    """Not even where they are all that a split, a block or a node's own line has to offer."""
    query, keys, values = inputs(3, dim=16)
    view = tree_view(200, 3, SLOTS)
    query[..., 0] = 1.0
    keys[view.prefix[:150], :, 0] = float("-inf")
    keys[view.rows, :, 0] = float("-inf")
    ours = subject.attention(query, keys, values, view)
    assert torch.isfinite(ours).all()
    assert_near(ours, reference.attention(query, keys, values, view))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prefix", [0, 45])
def test_an_int8_pool_is_read_as_what_it_stands_for(dtype: torch.dtype, prefix: int) -> None:
    query, keys, values = inputs(7, dim=64, dtype=dtype)
    (k, k_scales), (v, v_scales) = plain.quantize(keys.float()), plain.quantize(values.float())
    view = tree_view(prefix, 7, SLOTS)
    pool = Pool(k, v, KVScales(k_scales, v_scales))
    ours = subject.attention(query, k, v, view, scales=pool.scales)
    expected = reference.attention(query, *plain.dequantize(pool), view)
    rounding = torch.finfo(torch.float16 if dtype == torch.float16 else torch.bfloat16).eps
    assert float((ours.float() - expected.float()).abs().max()) < 4 * rounding


def test_a_broken_head_of_an_int8_pool_spoils_its_readers_only() -> None:
    query, keys, values = inputs(6, heads=2, kv_heads=2, dim=16)
    view = tree_view(20, 6, SLOTS, seed=3)
    keys[view.rows[2], 1, 5] = float("inf")
    (k, k_scales), (v, v_scales) = plain.quantize(keys), plain.quantize(values)
    ours = subject.attention(query, k, v, view, scales=KVScales(k_scales, v_scales))
    assert torch.equal(ours[:, 1].isnan().all(dim=1), view.visible[:, 2])
    assert not ours[:, 0].isnan().any()


@pytest.mark.parametrize("length", [0, 1, 31, 127, 128, 129, 200, 256])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_length_that_only_the_device_knows(length: int, rows: int) -> None:
    """The grid is that of the whole buffer; what lies beyond the length, NaN included, is not read."""
    query, keys, values = inputs(rows, heads=4, kv_heads=2, dim=16)
    whole = tree_view(256, rows, SLOTS, seed=rows)
    keys[whole.prefix[length:]], values[whole.prefix[length:]] = float("nan"), float("nan")
    known = AttentionView(whole.prefix[:length], whole.rows, whole.visible)
    asked = replace(whole, length=torch.tensor([length], device=DEVICE))
    ours = subject.attention(query, keys, values, asked)
    assert torch.isfinite(ours).all()
    assert_near(ours, reference.attention(query, keys, values, known))


def test_grids_do_not_depend_on_a_length_that_the_device_knows() -> None:
    query, keys, values = inputs(4, heads=4, kv_heads=2, dim=16)
    whole = tree_view(256, 4, SLOTS)
    grids = []
    for length in (1, 256):
        view = replace(whole, length=torch.tensor([length], device=DEVICE))
        table, out = subject.ancestor_table(view), torch.empty_like(query)
        grids.append([each.grid for each in subject.launches(query, keys, values, view, table, out)])
    assert grids[0] == grids[1]


@pytest.mark.parametrize("cores", [1, 4, 1000])
def test_the_number_of_splits_changes_rounding_only(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = inputs(3, heads=2, kv_heads=1, dim=16)
    view = tree_view(290, 3, SLOTS)
    monkeypatch.setattr(subject, "processors", lambda device: cores)
    assert_near(subject.attention(query, keys, values, view), reference.attention(query, keys, values, view))


def test_splits_cover_the_prefix_in_whole_blocks() -> None:
    for length in (1, 127, 128, 129, 5000, 32_000):
        for programs in (1, 8, 64, 512):
            split = subject.choose_split(length, programs, cores=68, block=32)
            splits = -(-length // split)
            assert split % 32 == 0 and split >= 128
            assert splits == 1 or splits * programs <= 2 * 68 + programs
    assert subject.choose_split(8192, 8, cores=68, block=32) == 512  # 17 splits of 8 programs: two a core


def test_scaling_of_queries_rounds_nothing() -> None:
    for dim in (16, 64, 80, 96, 128):
        power, rest = subject.split_scale(dim)
        assert math.frexp(power)[0] == 0.5 and 1 <= rest < 2
        assert power * rest == pytest.approx(math.log2(math.e) / math.sqrt(dim), rel=1e-15)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (6, 6), (3, 11), (64, 64)])
def test_the_table_lists_what_each_row_reads_in_order(rows: int, width: int) -> None:
    visible = random_tree(width, seed=width)[-rows:].to(DEVICE)
    slots = torch.randperm(SLOTS)[:width].to(DEVICE)
    view = AttentionView(slots[:0], slots, visible)
    table = subject.ancestor_table(view)
    for row in range(rows):
        count = int(table.counts[row])
        assert torch.equal(table.slots[row, :count], slots[visible[row]])
    assert subject.ancestor_table(view) is table  # made once a pass, whatever the number of layers


def test_heads_beyond_the_registers_are_refused() -> None:
    query, keys, values = inputs(1, dim=256)
    with pytest.raises(CannotRunError, match="128 at most, and these are of 256"):
        subject.attention(query, keys, values, tree_view(3, 1, SLOTS))
