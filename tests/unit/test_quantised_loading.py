"""What a load holds while it quantises: a few tensors at full precision, pages of one shard, never the checkpoint."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.checkpoint.tensor_shapes import expected_shapes
from treeeagle_edge.config.reader import read_config
from treeeagle_edge.hardware.memory_watch import MemoryWatch
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.model import linear
from treeeagle_edge.model.target import load_target
from treeeagle_edge.model.target_weights import load_weights

LAYERS = 12
MB = 1 << 20
SHARD = 32 * MB


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


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 320 MB in shards of some 32 MB, whose ends lie within layers; pickled, too."""
    folder = tmp_path_factory.mktemp("large")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
        "intermediate_size": 2816, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": 4000, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in expected_shapes(read_config(folder)).items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD - 6 * MB:
            shards.append({})
        shards[-1][name] = torch.full(shape, 0.25, dtype=torch.bfloat16)
    single = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[request.param]
    index = {name: f"part-{number:02}" for number, shard in enumerate(shards) for name in shard}
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": index}))
    for number, shard in enumerate(shards):
        (save_file if request.param == "safetensors" else torch.save)(shard, folder / f"part-{number:02}")
    assert len(shards) >= 10
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody keeps the peak of resident memory")
@pytest.mark.parametrize("bits", [8, 16])
def test_loading_for_a_card_leaves_no_shard_behind_in_memory(
    large: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expectations row 1: on the way to a card the process has the pages of one shard, and little beside them.

    Tensors without memory stand for those on the card.
    """
    monkeypatch.setattr(linear, "check_bits", lambda bits, device: None)
    card = torch.device("meta")
    linear.bitsandbytes_module()  # what importing it takes is no part of a load
    gc.collect()
    watch = MemoryWatch()
    before = watch.current()
    weights = load_weights(open_checkpoint(large), bits=bits, device=card, dtype=torch.bfloat16)
    assert weights.nbytes > 150 * MB and weights.layers[-1].down.nbytes
    assert watch.peak() - before < SHARD + 48 * MB
