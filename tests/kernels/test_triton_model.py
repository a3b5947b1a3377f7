"""Target and head on the Triton kernels give what they give on the reference, and an engine the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_engines import KINDS, make, with_oracle
from engine_answers import PROMPT
from engine_answers import answer as engine_answer
from replayed_capture import ReplayedCapture
from target_passes import in_pieces
from tiny_models import CONFIG as SIX_LAYERS
from tiny_models import RandomCheckpoint, tiny_engine, tiny_head
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import DEVICE, TOLERANCE, needs_triton

from treeeagle_edge.drafting.round_shapes import RoundShape
from treeeagle_edge.drafting.shape_choice import OneShape
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.head import Head, HeadOutput
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton import launch

pytestmark = needs_triton
# The interpreter takes long for each layer and head. A first, a middle and a last layer are all kinds that there are;
# engines, whose tests are about rounds, have one group of heads.
LAYERS = 3
CONFIG = replace(SIX_LAYERS, num_layers=LAYERS)
ENGINE = replace(CONFIG, num_heads=2, num_kv_heads=1)
TAPS = (0, 1, 2, 3)
QWEN3 = replace(CONFIG, family="qwen3", qk_norm=True, residual_scale=0.7, embedding_scale=1.5)
IDS = torch.arange(11) * 7 % CONFIG.vocab_size


@pytest.fixture(autouse=True)
def _reference_afterwards() -> Iterator[None]:
    yield
    dispatch.leave_out(())
    dispatch.set_backend("reference")


def loaded(config: ModelConfig, bits: int) -> Target:
    return load_target(RandomCheckpoint(config, seed=3), bits=bits, context=64, device=DEVICE)


def device_engine(**options: Any) -> Engine:
    return make(config=ENGINE, **options)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize(("config", "bits", "piece"), [(CONFIG, 32, 5), (QWEN3, 32, 11), (QWEN3, 16, 5)])
def test_a_target_gives_the_logits_and_features_of_the_reference(
    config: ModelConfig, bits: int, piece: int
) -> None:
    """All rows at once, several, and the last alone; with the norm of each head and the scales of its family."""
    target = loaded(config, bits)
    expected = in_pieces(target, IDS, piece, taps=TAPS)
    with dispatch.use_backend("triton"):
        ours = in_pieces(target, IDS, piece, taps=TAPS)
    for mine, theirs in zip(ours, expected, strict=True):
        # three layers of roundings on the way
        assert relative_error(mine, theirs) < 3 * TOLERANCE[target.dtype]


def drafted(head: Head) -> tuple[HeadOutput, HeadOutput]:
    """A prompt of nine rows, then a level of three."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(9, 3 * CONFIG.hidden_size, generator=generator)
    slots = torch.randperm(40, generator=generator)[:12]
    prompt, causal = torch.arange(9), torch.ones(9, 9, dtype=torch.bool).tril()
    first = head.extend(features, prompt, prompt, slots[:9], AttentionView(slots[:0], slots[:9], causal), 40)
    view = AttentionView(slots[:9], slots[9:], torch.eye(3, dtype=torch.bool))
    parents, tokens = first.hidden.expand(3, -1).contiguous(), torch.tensor([4, 5, 6])
    before = parents.clone()
    level = head.step(parents, tokens, torch.full((3,), 9), slots[9:], view, 40)
    assert torch.equal(parents, before)
    return first, level


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiny head is made on the CPU")
@pytest.mark.parametrize(("before_residual", "norm_output"), [(False, False), (True, True)])
def test_a_head_gives_the_scores_of_the_reference(before_residual: bool, norm_output: bool) -> None:
    head = tiny_head(loaded(CONFIG, 32), slots=40)
    head.config = replace(head.config, norm_before_residual=before_residual, norm_output=norm_output)
    expected = drafted(head)
    with dispatch.use_backend("triton"):
        ours = drafted(head)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine.ids[:, :5], theirs.ids[:, :5])
        assert relative_error(mine.log_probs, theirs.log_probs) < 4 * TOLERANCE[torch.float32]
        assert relative_error(mine.hidden, theirs.hidden) < 4 * TOLERANCE[torch.float32]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiny engine is made on the CPU")
def test_an_engine_says_the_same_with_and_without_a_tree() -> None:
    engine = tiny_engine(config=ENGINE)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    expected = engine_answer(engine, greedy, speculate=False)
    assert len(set(expected)) > 3
    with_oracle(engine, expected, 2)
    with dispatch.use_backend("triton"):
        assert engine_answer(engine, greedy, speculate=False) == expected
        rounds = list(engine.generate(PROMPT, greedy))
    assert [token for one in rounds for token in one.ids] == expected
    assert sum(one.accepted for one in rounds) > 3


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiny head is made on the CPU")
def test_rounds_on_the_device_give_the_text_of_the_reference() -> None:
    """Lengths are read by the kernels, with padded rows and scratch rows in between."""
    params = replace(KINDS["everything"], max_tokens=7)
    expected = engine_answer(device_engine(on_device=False), params, speculate=False)
    engine = device_engine()
    with_oracle(engine, expected, 2)
    with dispatch.use_backend("triton"), launch.counted() as counter:
        assert engine_answer(engine, params) == expected
    assert counter["prefix_kernel"] > 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiny head is made on the CPU")
def test_a_branch_gives_the_text_of_the_reference() -> None:
    """Beside a tree: its rows see their own ancestors through the table, with rows of no node before and behind."""
    params = SamplingParams(max_tokens=9, banned_ids=frozenset(range(2, CONFIG.vocab_size)))
    expected = engine_answer(device_engine(on_device=False), params, speculate=False)
    engine = device_engine(shape=TreeShape(depth=4, branching=3, nodes=16))
    shape = RoundShape(TreeShape(depth=2, branching=2, nodes=3), 3)
    with dispatch.use_backend("triton"):
        rounds = list(engine.generate(PROMPT, params, choice=OneShape(shape)))
    assert [token for one in rounds for token in one.ids] == expected
    assert sum(one.looked_up_accepted for one in rounds) > 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tiny head is made on the CPU")
def test_replayed_launches_give_the_text_of_the_reference() -> None:
    """With the arguments and grids that they had when they were captured, at another length and in other slots."""
    params = replace(KINDS["sampling"], max_tokens=9)
    expected = engine_answer(device_engine(on_device=False), params, speculate=False)
    capture = ReplayedCapture(launches=True)
    engine = device_engine(shape=TreeShape(depth=2, branching=2, nodes=3), graphs=capture)
    with_oracle(engine, expected, 1)
    with dispatch.use_backend("triton"):
        assert engine_answer(engine, params) == expected
    assert capture.replayed > 3 and engine.notes == ()


def test_no_layer_converts_what_a_kernel_gives() -> None:
    """What a pass converts is the embedding on the way in and the logits on the way out."""

    class Conversions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            # in inference mode `to` arrives as it was called
            if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
                self.count += found.dtype != args[0].dtype
            return found

    target = loaded(CONFIG, 16)
    view = AttentionView(IDS[:0], torch.arange(11), torch.ones(11, 11, dtype=torch.bool).tril())
    store = KVStore.allocate(LAYERS, 11, CONFIG.num_kv_heads, CONFIG.head_dim, target.dtype, DEVICE)
    with dispatch.use_backend("triton"), Conversions() as seen:
        target.forward(IDS, torch.arange(11), torch.arange(11), view, store, ())
    assert seen.count == 2


def launches(target: Target) -> dict[str, int]:
    with dispatch.use_backend("triton"), launch.counted() as counter:
        in_pieces(target, IDS, 11)
    return dict(counter)


def test_a_pass_launches_each_kernel_once_a_layer_and_what_is_left_out_not_at_all() -> None:
    target = loaded(CONFIG, 32)
    whole = {
        "ancestor_table_kernel": 1,
        "ancestors_kernel": LAYERS,
        "write_kernel": LAYERS,
        "rms_norm_kernel": 2 * LAYERS + 1,
        "silu_gate_kernel": LAYERS,
    }
    assert launches(target) == whole
    dispatch.leave_out({"silu_gate", "add_rms_norm"})
    del whole["silu_gate_kernel"]
    assert launches(target) == {**whole, "rms_norm_kernel": 1}
    dispatch.leave_out(dispatch.OPERATIONS)
    assert launches(target) == {}
    expected = in_pieces(target, IDS, 11)[0]
    with dispatch.use_backend("triton"):
        assert torch.equal(in_pieces(target, IDS, 11)[0], expected)
