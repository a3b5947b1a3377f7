"""The attention backends: against fp64, against PyTorch's own attention, and against themselves under other layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treeeagle_edge.errors import UsageError
from treeeagle_edge.kernels import dispatch, reference
from treeeagle_edge.kernels.view import AttentionView

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 300
BACKENDS = dispatch.available_backends()


def tensors(
    rows: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Query [rows, heads, dim] and pools [slots, kv_heads, dim]; Q and K of magnitude `scale`."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, HEADS, DIM, generator=generator) * scale
    keys = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator) * scale
    values = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def in_float64(query: Tensor, keys: Tensor, values: Tensor, view: AttentionView) -> Tensor:
    """The formula, row by row and head by head."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for m in range(query.shape[0]):
        slots = torch.cat((view.prefix, view.rows[view.visible[m]]))
        for h in range(query.shape[1]):
            kv = h // (query.shape[1] // keys.shape[1])
            k, v = keys[slots, kv].double(), values[slots, kv].double()
            weights = torch.softmax(k @ query[m, h].double() / query.shape[2] ** 0.5, dim=0)
            out[m, h] = weights @ v
    return out


def random_tree(rows: int, seed: int) -> Tensor:
    """[rows, rows] bool: each row sees itself and the ancestors of a random tree."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = int(torch.randint(0, row, (1,), generator=generator))
        visible[row] |= visible[parent]
    return visible


def tree_view(prefix: int, rows: int, *, scattered: bool, seed: int = 0) -> AttentionView:
    slots = torch.arange(prefix + rows) + 5
    if scattered:
        slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: prefix + rows]
    return AttentionView(slots[:prefix], slots[prefix:], random_tree(rows, seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [0, 1, 7, 40])
def test_a_view_may_have_a_length_of_its_own(backend: str, length: int) -> None:
    """What lies beyond it in the buffer is not read, NaN included; what lies before it is, NaN included."""
    query, keys, values = tensors(6)
    whole = tree_view(40, 6, scattered=True)
    keys[whole.prefix[length:]], values[whole.prefix[length:]] = float("nan"), float("nan")
    known = AttentionView(whole.prefix[:length], whole.rows, whole.visible)
    asked = replace(whole, length=torch.tensor([length]))
    with dispatch.use_backend(backend):
        ours = dispatch.attention(query, keys, values, asked)
        torch.testing.assert_close(ours, reference.attention(query, keys, values, known))
        if length:
            values[whole.prefix[length - 1]] = float("nan")
            assert dispatch.attention(query, keys, values, replace(asked)).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("prefix", "rows"), [(0, 1), (0, 7), (63, 1), (64, 1), (130, 17), (200, 43)])
def test_equals_the_formula_in_float64(backend: str, prefix: int, rows: int, scattered: bool) -> None:
    """Prefix lengths around the block of 64, trees, plain decoding, slots in order and scattered."""
    query, keys, values = tensors(rows)
    view = tree_view(prefix, rows, scattered=scattered)
    with dispatch.use_backend(backend):
        ours = dispatch.attention(query, keys, values, view)
    assert ours.shape == query.shape and ours.dtype == query.dtype
    torch.testing.assert_close(ours.double(), in_float64(query, keys, values, view), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_comes_in_the_dtype_that_is_asked_for(backend: str) -> None:
    """Queries in fp32 for scores, and a result in the 16 bits of the next product, rounded once."""
    query, keys, values = tensors(9)
    view = tree_view(40, 9, scattered=True)
    with dispatch.use_backend(backend):
        ours = dispatch.attention(query, keys, values, view, torch.float16)
        assert torch.equal(ours, dispatch.attention(query, keys, values, view).half())


@settings(max_examples=40, deadline=None)
@given(prefix=st.integers(0, 140), rows=st.integers(1, 24), scattered=st.booleans(), seed=st.integers(0, 999))
def test_both_backends_agree(prefix: int, rows: int, scattered: bool, seed: int) -> None:
    """Whatever the prefix, the tree and the slots."""
    query, keys, values = tensors(rows, seed=seed)
    view = tree_view(prefix, rows, scattered=scattered, seed=seed)
    results = []
    for backend in BACKENDS:
        with dispatch.use_backend(backend):
            results.append(dispatch.attention(query, keys, values, view))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=2e-6)


def test_equals_scaled_dot_product_attention() -> None:
    """PyTorch's own grouped attention with the view's bias as mask."""
    query, keys, values = tensors(9)
    view = tree_view(40, 9, scattered=True)
    theirs = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[view.slots].transpose(0, 1)[None],
        values[view.slots].transpose(0, 1)[None],
        attn_mask=~view.hidden,
        enable_gqa=True,
    )
    ours = reference.attention(query, keys, values, view)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_queries_and_keys_do_not_overflow(backend: str, dtype: torch.dtype) -> None:
    """Expectations row 7: Q and K of magnitude 1e3 give products far beyond fp16's 65,504; Q is scaled first and
    everything accumulated in fp32, so the result is finite and that of fp64 up to one rounding of the output.
    """
    query, keys, values = tensors(5, scale=1e3, dtype=dtype)
    view = tree_view(100, 5, scattered=False)
    products = torch.einsum("mhd,shd->mhs", query.double(), keys.double().repeat_interleave(3, dim=1))
    assert products.abs().max() > 65_504
    with dispatch.use_backend(backend):
        ours = dispatch.attention(query, keys, values, view)
    expected = in_float64(query, keys, values, view)
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_long_prompts_are_attended_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a prefill chunk are bounded; splitting its rows changes nothing that shows."""
    query, keys, values = tensors(50)
    view = tree_view(100, 50, scattered=True)
    whole = reference.attention(query, keys, values, view)
    monkeypatch.setattr(reference, "ATTENTION_SCORES", 7 * HEADS * 150)
    calls: list[int] = []
    attend = reference._attend

    def counting(scaled: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        calls.append(scaled.shape[0])
        return attend(scaled, k, v, hidden)

    monkeypatch.setattr(reference, "_attend", counting)
    torch.testing.assert_close(reference.attention(query, keys, values, view), whole, rtol=1e-5, atol=1e-6)
    assert calls == [7] * 7 + [1]


@pytest.mark.parametrize("junk", [50.0, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_not_granted_do_not_matter(backend: str, junk: float) -> None:
    """Expectations row 6: K and V of siblings and foreign slots, NaN included, leave a row's bits alone."""
    query, keys, values = tensors(6)
    view = tree_view(30, 6, scattered=True, seed=4)
    with dispatch.use_backend(backend):
        before = dispatch.attention(query, keys, values, view)
        for row in range(6):
            foreign = torch.ones(SLOTS, dtype=torch.bool)
            foreign[view.prefix] = False
            foreign[view.rows[view.visible[row]]] = False
            k, v = keys.clone(), values.clone()
            k[foreign], v[foreign] = junk, -junk
            assert torch.equal(dispatch.attention(query, k, v, view)[row], before[row])


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("prefix", [0, 10, 61, 127])
def test_exact_rows_do_not_depend_on_where_ancestors_sit(rows: int, prefix: int) -> None:
    """A row of a tree, and the same query alone in row 0 with its ancestors in the prefix, give the same bits."""
    query, keys, values = tensors(rows)
    view = tree_view(prefix, rows, scattered=True, seed=prefix)
    with dispatch.use_backend("exact"):
        in_tree = dispatch.attention(query, keys, values, view)
        for row in range(rows):
            path = view.rows[view.visible[row]]
            alone = AttentionView(
                torch.cat((view.prefix, path[:-1])), path[-1:], torch.ones(rows, 1, dtype=torch.bool)
            )
            repeated = query[row].expand(rows, -1, -1).contiguous()
            assert torch.equal(dispatch.attention(repeated, keys, values, alone)[0], in_tree[row])


def test_view_knows_contiguous_slots_and_open_rows() -> None:
    """The short cuts are taken where they hold, and only there."""
    ones = torch.ones(1, 1, dtype=torch.bool)
    straight = AttentionView(torch.arange(3, 9), torch.tensor([9]), ones)
    assert straight.contiguous_range == (3, 10) and straight.is_open
    pool = torch.randn(20, 2)
    assert straight.read(pool).data_ptr() == pool[3].data_ptr()
    for prefix, rows in ([3, 4, 6], [7]), ([4, 3, 5], [6]), ([3, 4, 5], [2]):
        view = AttentionView(torch.tensor(prefix), torch.tensor(rows), ones)
        assert view.contiguous_range is None
        assert torch.equal(view.read(pool), pool[torch.tensor(prefix + rows)])
    tree = AttentionView(torch.arange(3), torch.arange(3, 5), torch.tensor([[True, False], [True, True]]))
    assert not tree.is_open
    assert torch.equal(~tree.hidden, torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool))


def test_backends_are_chosen_by_name() -> None:
    """`use_backend` gives the earlier one back, even after an error; an unknown name lists the known ones."""
    assert dispatch.current_backend() == "reference"

    def fail_inside() -> None:
        with dispatch.use_backend("exact"):
            raise RuntimeError(dispatch.current_backend())

    with pytest.raises(RuntimeError, match="exact"):
        fail_inside()
    assert dispatch.current_backend() == "reference"
    with pytest.raises(UsageError) as caught:
        dispatch.set_backend("fast")
    assert "fast" in caught.value.message and "reference" in (caught.value.hint or "")
