"""Layers in several places: the same bits as in one, and no operation reads tensors of two places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_answers import PROMPT, answer
from target_passes import causal_pass
from tiny_models import CONFIG, CPU, RandomCheckpoint, tiny_head
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treeeagle_edge.engine import device_start
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.kernels.tree_view import TreeView
from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model import target as target_module
from treeeagle_edge.model import target_places
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.model.target_places import layer_runs, moved_view
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

HOME, OTHER = CPU, torch.device("cpu:0")  # two names of one device are two places
SPLITS = {
    "two": (HOME,) * 2 + (OTHER,) * 4,
    "one layer": (HOME,) * 5 + (OTHER,),
    "none at home": (OTHER,) * 6,
    "and back": (HOME,) * 2 + (OTHER,) * 2 + (HOME,) * 2,
}
TAPS = (0, 2, 3, 6)
SHAPE = TreeShape(depth=4, branching=3, nodes=8)


def placed(places: tuple[torch.device, ...] | None, bits: int = 32, **fields: Any) -> Target:
    checkpoint = RandomCheckpoint(replace(CONFIG, **fields))
    return load_target(checkpoint, bits=bits, context=128, device=HOME, places=places)


def store_of(target: Target, slots: int) -> KVStore:
    config = target.config
    return KVStore.allocate_over(
        target.layer_devices, slots, config.num_kv_heads, config.head_dim, target.kv_dtype
    )


def passes(target: Target) -> tuple[list[Tensor], KVStore]:
    """A prompt in two pieces, then a tree: logits and features of each, and what was stored."""
    store, ids, order = (
        store_of(target, 24),
        torch.arange(16) * 7 % 40,
        torch.randperm(24, generator=seeded()),
    )
    outputs = [causal_pass(target, store, ids[a:b], a, order, TAPS) for a, b in ((0, 9), (9, 16))]
    slots = order[16:20]
    tree = TreeView(order[:16], slots, [-1, 0, 0, 1], 4)
    outputs.append(target.forward(ids[:4], torch.tensor([16, 17, 17, 18]), slots, tree, store, TAPS))
    return [part for output in outputs for part in (output.logits, output.features)], store


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(2)


class OnePlaceAtATime(TorchDispatchMode):
    """Knows of each storage in which place it lies; raises where an operation reads those of two."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, str] = {}
        self.kept: list[Tensor] = []  # so that no address is used twice
        self.seen: set[str] = set()

    def put(self, tensor: Tensor, place: str) -> Tensor:
        self.places[tensor.untyped_storage().data_ptr()] = place
        self.kept.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = {self.places.get(each.untyped_storage().data_ptr()) for each in tensors((args, kwargs))} - {
            None
        }
        assert len(found) <= 1, f"{func} reads tensors of {found}"
        result = func(*args, **(kwargs or {}))
        for place in found:
            assert place is not None
            self.seen.add(place)
            for each in tensors(result):
                self.put(each, place)
        return result


def tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def test_runs_are_the_layers_that_follow_each_other_in_a_place() -> None:
    runs = layer_runs(SPLITS["and back"])
    assert [(run.device, run.layers) for run in runs] == [
        (HOME, range(2)),
        (OTHER, range(2, 4)),
        (HOME, range(4, 6)),
    ]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_logits_features_and_keys_are_those_of_one_place(split: str, bits: int) -> None:
    whole, whole_store = passes(placed(None, bits))
    parts, store = passes(placed(SPLITS[split], bits))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
    for pair, other_pair in zip(whole_store.layers(), store.layers(), strict=True):
        assert torch.equal(pair[0], other_pair[0]) and torch.equal(pair[1], other_pair[1])
    assert store.nbytes == whole_store.nbytes
    assert len(store.rest) == len(layer_runs(SPLITS[split])) - 1


def test_the_scales_of_a_family_are_kept_where_the_stream_moves() -> None:
    """MiniCPM multiplies residual branches: the sum before a move has no norm that would do it."""
    scales = {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 0.25}
    whole, _ = passes(placed(None, **scales))
    parts, _ = passes(placed(SPLITS["two"], **scales))
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def engine_of(places: tuple[torch.device, ...] | None, *, exact: bool = False) -> Engine:
    target = placed(places)
    slots = 128 + SHAPE.nodes + 33
    return Engine(target, tiny_head(target, slots=slots), context=128, slots=slots, tree=SHAPE, exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("split", ["two", "none at home"])
def test_text_is_that_of_one_place_with_the_tree_and_without(split: str, exact: bool) -> None:
    for params in (
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=7),
    ):
        whole = [answer(engine_of(None, exact=exact), params, speculate=on) for on in (False, True)]
        parts = [answer(engine_of(SPLITS[split], exact=exact), params, speculate=on) for on in (False, True)]
        assert parts == whole and whole[0] == whole[1]


def test_no_operation_reads_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, tables, keys and values lie where their layer does; only `moved` crosses, as a copy."""
    target = placed(SPLITS["two"])
    store, watch = store_of(target, 24), OnePlaceAtATime()
    names = {HOME: "home", OTHER: "other"}

    def copied(tensor: Tensor, device: torch.device) -> Tensor:
        here = watch.places.get(tensor.untyped_storage().data_ptr())
        if here == names[device]:
            return tensor
        moves.append((here, names[device], tensor.numel()))
        # the copy is the one operation that may cross
        watch.places.pop(tensor.untyped_storage().data_ptr(), None)
        copy = tensor.clone()
        if here is not None:
            watch.put(tensor, here)
        return watch.put(copy, names[device])

    moves: list[tuple[str | None, str, int]] = []
    monkeypatch.setattr(target_places, "moved", copied)
    monkeypatch.setattr("treeeagle_edge.model.target.moved", copied)
    weights = target._weights
    for tensor in (weights.embedding, weights.final_norm, weights.lm_head.weight):  # type: ignore[attr-defined]
        watch.put(tensor, "home")
    for layer, place, (keys, values) in zip(
        weights.layers, target.layer_devices, store.layers(), strict=True
    ):
        own = [layer.input_norm, layer.mlp_norm, keys, values]
        own += [part.weight for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]  # type: ignore[attr-defined]
        for tensor in own:
            watch.put(tensor, names[place])
    for run, rope in zip(target._runs, target._ropes, strict=True):
        for tensor in (rope.cos, rope.sin):
            watch.put(tensor, names[run.device])
    rows = [watch.put(tensor, "home") for tensor in (torch.arange(5), torch.arange(5), torch.arange(5))]
    view = AttentionView(
        *(watch.put(t, "home") for t in (torch.arange(0), torch.arange(5), torch.ones(5, 5).tril() > 0))
    )
    with watch:
        output = target.forward(rows[0], rows[1], rows[2], view, store, (1, 4))
    assert {watch.places[part.untyped_storage().data_ptr()] for part in (output.logits, output.features)} == {
        "home"
    }
    assert watch.seen == {"home", "other"}
    stream = 5 * CONFIG.hidden_size
    assert [move for move in moves if move[2] == stream] == [
        ("home", "other", stream),  # the stream
        ("other", "home", stream),  # the tap after four layers
        ("other", "home", stream),  # the stream
    ]


def test_a_tensor_of_another_place_would_be_noticed() -> None:
    watch = OnePlaceAtATime()
    one, other = watch.put(torch.ones(2), "home"), watch.put(torch.ones(2), "other")
    with watch, pytest.raises(AssertionError, match="reads tensors of"):
        one + other


def test_a_device_apart_takes_no_tensor_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that only claim to lie on two devices: PyTorch itself refuses to mix them."""
    home, apart = CPU, torch.device("meta")
    for name in ("treeeagle_edge.model.target", "treeeagle_edge.model.linear"):  # no program runs on meta
        monkeypatch.setattr(f"{name}.check_bits", lambda bits, device: None)
    with FakeTensorMode():
        places = [apart if place == OTHER else home for place in SPLITS["two"]]
        target = load_target(RandomCheckpoint(), bits=32, context=128, device=home, places=places)
        store, ids = store_of(target, 24), torch.arange(5)
        length = torch.zeros(1, dtype=torch.int64)  # with it, no view looks at a value
        view = AttentionView(ids[:1], ids, torch.ones(5, 5, dtype=torch.bool), length)
        output = target.forward(ids, ids, ids, view, store, (1, 4))
        assert {part.device for part in (output.logits, output.features)} == {home}
        assert [part.keys.device for part in (store, *store.rest)] == [home, apart]
        assert [layer.mlp_norm.device for layer in target._weights.layers] == places
        target._next_norms = (*target._next_norms[:-1], target._weights.final_norm)  # home's, read elsewhere
        with pytest.raises(RuntimeError, match="meta"):
            target.forward(ids, ids, ids, view, store, (1, 4))


def test_activations_have_the_dtype_that_every_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 where one of the cards lacks bf16, and the question is put to each card itself."""
    cards = [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(8, 6), (7, 5)][device.index])
    assert target_module._common_dtype(4, cards[:1], "llama") == torch.bfloat16
    assert target_module._common_dtype(4, cards, "llama") == torch.float16
    assert target_module._common_dtype(4, cards, "qwen2") == torch.bfloat16
    assert target_module._common_dtype(32, cards, "llama") == torch.float32


def test_rounds_stay_on_the_device_only_where_all_layers_lie_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.device("cuda:0"), torch.device("cuda:1")
    monkeypatch.setattr(device_start, "serving", lambda operation: "triton")
    for layers, stays in (((one, one), True), ((one, other), False), ((other, other), False)):
        target: Any = SimpleNamespace(device=one, layer_devices=layers)
        assert device_start.can_stay_on_device(target) == stays


def test_views_move_as_what_they_are() -> None:
    slots = torch.arange(4)
    tree = moved_view(TreeView(slots[:2], slots[2:], [-1, 0], 2), OTHER)
    assert isinstance(tree, TreeView) and torch.equal(tree.visible, torch.ones(2, 2).tril().bool())
    batch = moved_view(BatchView(slots, slots + 1), OTHER)
    assert isinstance(batch, BatchView) and torch.equal(batch.slots[3], torch.tensor([3, 4, 5, 6]))
    length = torch.tensor([2])
    plain = moved_view(AttentionView(slots, slots, torch.ones(4, 4, dtype=torch.bool), length), OTHER)
    assert isinstance(plain, AttentionView) and plain.length is not None and int(plain.length) == 2
    same = AttentionView(slots, slots, torch.ones(4, 4, dtype=torch.bool))
    assert moved_view(same, slots.device) is same


def test_non_finite_rows_are_cleaned_in_every_place() -> None:
    target = placed(SPLITS["two"])
    store = store_of(target, 4)
    for keys, values in store.layers():
        keys[1], values[2] = float("nan"), float("inf")
    store.zero_non_finite(torch.tensor([1, 2]))
    assert all(torch.isfinite(part).all() for pair in store.layers() for part in pair)


def test_prompts_are_read_again_from_what_was_kept() -> None:
    engine, whole = engine_of(SPLITS["two"]), engine_of(None)
    params = SamplingParams(max_tokens=12)
    first = answer(engine, params)
    again = [*PROMPT, *first]
    rounds = list(engine.generate(again, params))
    assert rounds[0].cached_tokens > len(PROMPT)
    expected = list(whole.generate(again, params))
    assert [i for r in rounds for i in r.ids] == [i for r in expected for i in r.ids]
