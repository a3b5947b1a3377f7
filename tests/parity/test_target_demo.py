"""The demo model: our fp32 against `transformers` on the same GGUF, and what the narrower widths cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from target_passes import in_pieces, tree_in_exact_passes
from torch import Tensor

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.model.target import Target, exact_rows, load_target
from treeeagle_edge.tree import DraftTree

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
# the rendered prompt "What is the capital of France?" with the model's own system turn, and an answer's tokens
PROMPT = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198"
)
ANSWER = "1780 314 260 3575 282 4649 47 2 198 1 520 9531 198 504 3575 282 4649 314 7042 30 2"
IDS = torch.tensor([int(token) for token in f"{PROMPT} {ANSWER}".split()])
TREE = DraftTree(
    tokens=(504, 3575, 314, 282, 260, 4649, 3575, 7042),
    parents=(-1, 0, 0, 1, 2, 3, 4, 5),
    depths=(0, 1, 1, 2, 2, 3, 3, 4),
    log_probs=(0.0,) + (-1.0,) * 7,
)
TAPS = (0, 2, 15, 27)


def load(path: Path, bits: int) -> Target:
    return load_target(open_checkpoint(path), bits=bits, context=512, device=CPU)


@pytest.fixture(scope="module")
def fp32(demo_gguf: Path) -> Target:
    return load(demo_gguf, 32)


@pytest.fixture(scope="module")
def reference_logits(fp32: Target) -> Tensor:
    """[N, V] of our fp32 target, prompt in one pass."""
    return in_pieces(fp32, IDS, len(IDS))[0]


@pytest.fixture(scope="module")
def oracle(transformers_demo: Any) -> tuple[Tensor, Tensor]:
    """Logits and tapped hidden states of `transformers` reading the GGUF itself."""
    with torch.inference_mode():
        output = transformers_demo(IDS[None], output_hidden_states=True)
    return output.logits[0], torch.cat([output.hidden_states[tap][0] for tap in TAPS], dim=-1)


@pytest.mark.parametrize("piece", [len(IDS), 1])
def test_logits_equal_transformers(fp32: Target, oracle: tuple[Tensor, Tensor], piece: int) -> None:
    """fp32, as one pass and token by token; logits reach 40, and the difference measured 9e-5."""
    logits, features = in_pieces(fp32, IDS, piece, taps=TAPS)
    assert float((logits - oracle[0]).abs().max()) <= 5e-4
    relative = (features - oracle[1]).abs().max() / oracle[1].abs().max()
    assert float(relative) <= 1e-6


# (KL in nats, share of equal argmax) allowed over all tokens
COSTS = {16: (0.005, 0.95), 8: (0.03, 0.9), 4: (2.4, 0.45)}


@pytest.mark.parametrize("bits", sorted(COSTS))
def test_narrow_weights_cost_what_they_should(demo_gguf: Path, reference_logits: Tensor, bits: int) -> None:
    """Against fp32 of the file's values. Measured: KL 0.0011, 0.0072 and 1.21, equal argmax 100, 96 and 62 %.

    4 bits cost that much because the file's values are 4-bit already, on another grid than NF4's, and most of these
    tokens are the template's, which the model hardly predicts: on the tokens of a longer answer it was 0.19 and 80 %.
    A product in fp32 with the dequantised NF4 weights costs the same, so it is the format and not the kernel.
    """
    logits, _ = in_pieces(load(demo_gguf, bits), IDS, len(IDS))
    expected = reference_logits.log_softmax(-1)
    divergence = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).mean()
    agreement = (logits.argmax(-1) == reference_logits.argmax(-1)).float().mean()
    most, least = COSTS[bits]
    assert 1e-6 < float(divergence) <= most
    assert float(agreement) >= least


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_exact_passes_do_not_depend_on_the_tree(demo_gguf: Path, fp32: Target, bits: int) -> None:
    """Expectations row 28, on a real model: a token's logits have the same bits as a node of a tree and alone."""
    target = fp32 if bits == 32 else load(demo_gguf, bits)
    order = torch.arange(len(IDS) + 2 * len(TREE)).flip(0)
    together, alone = tree_in_exact_passes(target, IDS, TREE, exact_rows(len(TREE)), order)
    assert torch.equal(together, alone)
