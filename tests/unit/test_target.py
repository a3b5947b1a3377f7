"""Loading and running a target: what is checked, what is promised about rows, sizes and dtypes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from target_passes import in_pieces, tree_in_exact_passes
from torch import Tensor

from treeeagle_edge.checkpoint.opening import Checkpoint, open_checkpoint
from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.model.target import Target, compute_dtype, exact_rows, load_target
from treeeagle_edge.tree import DraftTree

CPU = torch.device("cpu")
PROMPT = torch.randint(3, 320, (75,), generator=torch.Generator().manual_seed(5))
# the root, three siblings, and a path of four: rows of every depth
TREE = DraftTree(
    tokens=(11, 21, 22, 23, 31, 32, 41, 51, 33, 34),
    parents=(-1, 0, 0, 0, 1, 3, 5, 6, 2, 2),
    depths=(0, 1, 1, 1, 2, 2, 3, 4, 2, 2),
    log_probs=(0.0,) + (-1.0,) * 9,
)


class FakeCheckpoint:
    """Tensors from a dict, under the config of a real checkpoint."""

    def __init__(self, real: Checkpoint, changes: dict[str, Tensor | None]) -> None:
        self.path = real.path
        self.config = real.config
        self.generation: GenerationDefaults = real.generation
        self._tensors = {name: real.tensor(name) for name in real.names()} | changes

    def names(self) -> frozenset[str]:
        return frozenset(name for name, tensor in self._tensors.items() if tensor is not None)

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        assert tensor is not None
        return tensor


def load(folder: Path, bits: int = 32, context: int = 256) -> Target:
    return load_target(open_checkpoint(folder), bits=bits, context=context, device=CPU)


def test_missing_and_misshapen_tensors_are_named(tiny_checkpoint: Path) -> None:
    """One sentence with the tensor's name and the shapes."""
    real = open_checkpoint(tiny_checkpoint)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(InputError) as caught:
        load_target(FakeCheckpoint(real, {name: None}), bits=32, context=64, device=CPU)
    assert name in caught.value.message and "[64, 128]" in caught.value.message
    with pytest.raises(InputError) as caught:
        load_target(FakeCheckpoint(real, {name: torch.zeros(64, 127)}), bits=32, context=64, device=CPU)
    assert "[64, 127]" in caught.value.message and "[64, 128]" in caught.value.message


def test_cuda_without_cuda_is_refused(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a tensor is read, with a hint."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotRunError) as caught:
        load_target(open_checkpoint(tiny_checkpoint), bits=8, context=64, device=torch.device("cuda"))
    assert "cpu" in (caught.value.hint or "")


def test_a_tied_embedding_is_held_once(tiny_checkpoint: Path) -> None:
    """At 32 bits the bytes are those of the file's tensors and the rotary tables; narrower ones take less."""
    checkpoint = open_checkpoint(tiny_checkpoint)
    stored = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
    target = load(tiny_checkpoint)
    tables = target.nbytes - stored
    # cosine and sine of 256 positions and a margin, 8 frequencies, fp32
    assert tables == 2 * (256 + 64) * 8 * 4
    sizes = [load(tiny_checkpoint, bits).nbytes for bits in (32, 16, 8, 4)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_dtypes(tiny_checkpoint: Path) -> None:
    """Logits are fp32 at every width; features have the compute dtype, which is that of the KV store."""
    for bits in (32, 16, 8, 4):
        target = load(tiny_checkpoint, bits)
        logits, features = in_pieces(target, PROMPT[:9], 4, taps=(0, 2))
        expected = torch.float32 if bits == 32 else torch.bfloat16
        assert logits.dtype == torch.float32 and logits.shape == (9, 320)
        assert features.dtype == target.dtype == target.kv_dtype == expected and features.shape == (9, 128)
        assert target.embed(PROMPT[:3]).dtype == expected
        assert (target.bits, target.context, target.device) == (bits, 256, CPU)


@pytest.mark.parametrize(("card", "llama"), [(1, torch.bfloat16), (0, torch.float16)])
def test_qwen2_never_runs_in_fp16(monkeypatch: pytest.MonkeyPatch, card: int, llama: torch.dtype) -> None:
    """Expectations row 5: activations of the Qwen2 family overflow fp16, so it runs in bf16 on every card.

    The card that is asked is the one of the run, whichever is current.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(7, 5), (8, 0)][device.index])
    cuda = torch.device("cuda", card)
    assert compute_dtype(16, cuda, "qwen2") == compute_dtype(4, cuda, "qwen2") == torch.bfloat16
    assert compute_dtype(16, cuda, "llama") == llama
    assert compute_dtype(32, cuda, "qwen2") == torch.float32
    assert compute_dtype(8, CPU, "llama") == torch.bfloat16


def test_the_tap_after_the_last_layer_is_normalised(tiny_checkpoint: Path) -> None:
    """hidden_states[num_layers] of `transformers` is the output of the final norm; so is ours."""
    target = load(tiny_checkpoint)
    logits, features = in_pieces(target, PROMPT[:5], 5, taps=(2,))
    assert torch.equal(target.logits(features), logits)
    assert target.config.num_layers == 2


def test_scales_of_minicpm_reach_the_logits(tiny_checkpoint: Path) -> None:
    """logit_scale multiplies the normalised hidden state inside `logits`, not in what `forward` hands out."""
    real = FakeCheckpoint(open_checkpoint(tiny_checkpoint), {})
    plain = load_target(real, bits=32, context=64, device=CPU)
    real.config = dataclasses.replace(real.config, logit_scale=0.25)
    scaled = load_target(real, bits=32, context=64, device=CPU)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(scaled.logits(hidden), plain.logits(hidden) * 0.25)


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_exact_passes_do_not_depend_on_the_tree(tiny_checkpoint: Path, bits: int) -> None:
    """Expectations row 28: greedy differed from plain decoding because other M took other kernels. With a fixed number
    of rows and the exact backend, a token's logits have the same bits as a node among siblings and alone in row 0
    behind its committed ancestors, wherever the slots lie.
    """
    rows = exact_rows(len(TREE))
    order = torch.randperm(120, generator=torch.Generator().manual_seed(2))
    together, alone = tree_in_exact_passes(load(tiny_checkpoint, bits), PROMPT, TREE, rows, order)
    assert torch.equal(together, alone)
    assert len({tuple(row.tolist()) for row in together}) == len(TREE), (
        "rows must differ for this to show anything"
    )


def test_exact_rows_are_multiples_of_eight() -> None:
    """The smallest multiple that holds all rows."""
    assert [exact_rows(n) for n in (1, 8, 9, 17, 64)] == [8, 8, 16, 24, 64]
