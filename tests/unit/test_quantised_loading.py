"""What a load holds at full precision while it quantises: a few tensors at a time, never the checkpoint."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.model.target import load_target

LAYERS = 12


class Watched:
    """A checkpoint that counts the bytes of the tensors it gave away and that are still held."""

    def __init__(self, path: Path) -> None:
        self._inner = open_checkpoint(path)
        self.path, self.config, self.generation = path, self._inner.config, self._inner.generation
        self.held = self.peak = self.read = 0

    def names(self) -> frozenset[str]:
        return self._inner.names()

    def raw(self, name: str) -> None:
        return None

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._inner.tensor(name)
        self.held += tensor.nbytes
        self.read += tensor.nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, nbytes: int) -> None:
        self.held -= nbytes


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of twelve layers in fp16, in several shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("sharded")
    generator_state = torch.get_rng_state()
    torch.manual_seed(5)
    LlamaForCausalLM(config).half().save_pretrained(folder, max_shard_size="1MB")
    torch.set_rng_state(generator_state)
    return folder


def shard_sizes(folder: Path) -> list[int]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return [(folder / name).stat().st_size for name in sorted(set(index["weight_map"].values()))]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_quantising_needs_less_memory_than_one_shard(sharded: Path, bits: int, kernels: str) -> None:
    """Expectations row 1: CPU RAM too small to quantise. The tensors that are held unquantised stay below one shard."""
    watched = Watched(sharded)
    if kernels == "native":
        if loader.problem() is not None:
            pytest.skip("native kernels need a C++ compiler")
        from treeeagle_edge.kernels.native.team import Team
        from treeeagle_edge.model.native_target import load_native_target

        load_native_target(watched, Team(1), bits=bits, context=64, max_rows=8)
    else:
        load_target(watched, bits=bits, context=64, device=torch.device("cpu"))
    sizes = shard_sizes(sharded)
    assert len(sizes) >= 3 and watched.read == pytest.approx(sum(sizes), rel=0.05)
    assert watched.peak < min(sizes[:-1]) / 2
