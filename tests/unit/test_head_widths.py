"""A quantised draft head, and a quantised lm_head: near the floats they stand for, and the text is the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIG, CPU, RandomCheckpoint
from torch import Tensor

from treeeagle_edge.checkpoint.head import open_head
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model import linear as linears
from treeeagle_edge.model.head import Head, HeadOutput
from treeeagle_edge.model.linear import CudaInt8Linear, DenseLinear, Int8Linear, Nf4Linear
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.torch_bytes import embedding_bytes
from treeeagle_edge.runtime import load_runtime
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.model_names import BUNDLED_HEADS
from treeeagle_edge.widths import choose_widths

DEMO = KNOWN_MODELS["smollm2-135m"]
LINEARS = ("_fc", "_qkv", "_o", "_gate_up", "_down", "_lm_head")


def bundled_head(bits: int, dtype: torch.dtype = torch.bfloat16) -> Head:
    checkpoint = open_head(BUNDLED_HEADS / "smollm2-135m-eagle3", DEMO.config)
    table = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    return Head(checkpoint, lambda ids: table[ids], slots=32, context=64, dtype=dtype, device=CPU, bits=bits)


def drafted(head: Head) -> tuple[HeadOutput, HeadOutput]:
    """A pass over five true features, then one over a level of three nodes."""
    features = torch.randn(5, 3 * 576, generator=torch.Generator().manual_seed(1))
    slots = torch.arange(8)
    prompt = AttentionView(slots[:0], slots[:5], torch.ones(5, 5, dtype=torch.bool).tril())
    first = head.extend(features, slots[:5], slots[:5], slots[:5], prompt, 8)
    level = AttentionView(slots[:5], slots[5:], torch.eye(3, dtype=torch.bool))
    hidden = first.hidden.expand(3, -1)
    return first, head.step(hidden, slots[5:], torch.full((3,), 5), slots[5:], level, 8)


@pytest.mark.parametrize(("bits", "limit", "shared"), [(16, 0.03, 7), (8, 0.1, 6), (4, 0.45, 2)])
def test_a_quantised_head_drafts_nearly_what_the_floats_do(bits: int, limit: float, shared: int) -> None:
    """Expectations row 29: the head's width is its own. Every matrix is quantised, its own lm_head too."""
    exact, head = bundled_head(32, torch.float32), bundled_head(bits)
    kind = {16: DenseLinear, 8: Int8Linear, 4: Nf4Linear}[bits]
    assert all(isinstance(getattr(head, name), kind) for name in LINEARS)
    for expected, got in zip(drafted(exact), drafted(head), strict=True):
        assert got.hidden.dtype == torch.bfloat16 and got.log_probs.dtype == torch.float32
        apart = (got.hidden.float() - expected.hidden).norm() / expected.hidden.norm()
        assert 0 < float(apart) < limit
        for ours, theirs in zip(got.ids.tolist(), expected.ids.tolist(), strict=True):
            assert len({*ours} & {*theirs}) >= shared, "of the eight likeliest of 10,240"


def test_the_int8_head_of_a_card_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product of CUDA in the place of the CPU's, and features beyond fp16 (expectations row 5)."""
    plain = drafted(bundled_head(32, torch.float32))
    monkeypatch.setattr(linears, "Int8Linear", lambda w, b: CudaInt8Linear(w, b, CPU, torch.bfloat16))
    head = bundled_head(8)
    assert all(isinstance(getattr(head, name), CudaInt8Linear) for name in LINEARS)
    for expected, got in zip(plain, drafted(head), strict=True):
        assert float((got.hidden.float() - expected.hidden).norm() / expected.hidden.norm()) < 0.1
    loud = head._fc(torch.full((1, 3 * 576), 1e5, dtype=torch.bfloat16))
    assert torch.isfinite(loud).all() and float(loud.abs().max()) > torch.finfo(torch.float16).max


def loaded(bits: int, lm_head: int | None, *, tied: bool) -> Target:
    checkpoint = RandomCheckpoint(replace(CONFIG, vocab_size=320, tie_word_embeddings=tied))
    return load_target(checkpoint, bits=bits, context=64, device=CPU, lm_head_bits=lm_head)


def logits(target: Target) -> Tensor:
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).to(target.dtype)
    return target.logits(hidden)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("bits", "lm_head"), [(16, 8), (8, 8), (8, 16), (4, 16), (4, 8)])
def test_lm_head_has_the_width_that_was_asked_for(bits: int, lm_head: int, tied: bool) -> None:
    """The embedding stays as it is, for look-ups; what is held is what the plan counts, up to the bytes of scales."""
    target, exact = loaded(bits, lm_head, tied=tied), loaded(32, None, tied=tied)
    kind = Int8Linear if lm_head == 8 else DenseLinear
    assert type(target._weights.lm_head) is kind
    ids = torch.arange(320)
    assert torch.equal(target.embed(ids), exact.embed(ids).to(torch.bfloat16))
    got, expected = logits(target), logits(exact)
    assert got.dtype == torch.float32
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.012
    tables = target._weights.embedding.nbytes
    if not (isinstance(target._weights.lm_head, DenseLinear) and tied):
        tables += target._weights.lm_head.nbytes
    planned = embedding_bytes(target.config, choose_widths(bits, "cpu", native=False, lm_head=lm_head))
    assert tables <= planned <= tables + 2 * 320
    assert (target._weights.nbytes - tables) == sum(layer.nbytes for layer in target._weights.layers) + 4 * 32


@pytest.mark.parametrize(
    "widths",
    [
        {"bits": 16, "head_bits": 8},
        {"bits": 32, "head_bits": 4},
        {"bits": 8, "head_bits": 4, "lm_head_bits": 16},
    ],
)
def test_a_run_has_the_widths_and_the_text_is_the_targets(demo_gguf: Path, widths: dict[str, int]) -> None:
    """Whatever the head is stored at, a tree gives the text of plain decoding; its width is said."""
    runtime = load_runtime(
        RunSettings(
            model=str(demo_gguf),
            head="smollm2-135m-eagle3",
            kernels="torch",
            device="cpu",
            context=128,
            threads=1,
            nodes=6,
            depth=3,
            exact=widths["bits"] != 32,
            **widths,  # type: ignore[arg-type]
        )
    )
    assert runtime.plan.widths.head == widths["head_bits"]
    assert runtime.plan.widths.lm_head == widths.get("lm_head_bits", widths["bits"])
    prompt = runtime.tokenizer.encode("The capital of France is")
    texts = []
    for speculate in (False, True):
        rounds = list(
            runtime.engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24), speculate=speculate)
        )
        texts.append([token for step in rounds for token in step.ids])
    assert texts[0] == texts[1] and len(texts[0]) == 24
    assert sum(step.accepted for step in rounds) >= 5, "the head foresees nothing"
