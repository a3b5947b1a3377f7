"""GGUF metadata to ModelConfig: what it says, what the tensors add, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from treeeagle_edge.config.reader import read_config
from treeeagle_edge.errors import InputError


def write_gguf(
    path: Path, arch: str = "llama", *, tensors: dict[str, np.ndarray] | None = None, **keys: Any
) -> Path:
    """A GGUF file of metadata and the few tensors that a config is read from."""
    writer = gguf.GGUFWriter(path, arch)
    shapes = {
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 4,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 512,
    }
    for key, value in {**shapes, **keys}.items():
        if value is None:
            continue
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key if key.startswith("split.") else f"{arch}.{key}", value)
    for name, data in {"token_embd.weight": np.zeros((100, 64), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_shapes(tmp_path: Path) -> None:
    keys = {"rope.freq_base": 5e5, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16}
    config = read_config(write_gguf(tmp_path / "a.gguf", **keys))
    assert (config.family, config.hidden_size, config.num_layers, config.num_heads) == ("llama", 64, 4, 4)
    assert (config.head_dim, config.num_kv_heads, config.vocab_size) == (16, 2, 100)
    assert (config.max_position, config.rope.theta, config.tie_word_embeddings) == (512, 5e5, True)
    assert config.rms_norm_eps == pytest.approx(1e-5)


def test_gguf_tensors_decide_what_the_metadata_leaves_open(tmp_path: Path) -> None:
    vector = np.ones(64, np.float32)
    tensors = {
        "output.weight": np.zeros((100, 64), np.float32),
        "blk.0.attn_q.bias": vector,
        "blk.0.attn_output.bias": vector,
        "blk.0.attn_q_norm.weight": np.ones(16, np.float32),
        "rope_freqs.weight": np.arange(1, 9, dtype=np.float32),
    }
    config = read_config(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    assert config.attention_bias and config.output_bias and config.qk_norm and not config.tie_word_embeddings
    assert config.rope.freq_divisors == tuple(float(i) for i in range(1, 9))


def test_gguf_scaling_kinds(tmp_path: Path) -> None:
    linear = read_config(
        write_gguf(tmp_path / "a.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    )
    assert (linear.rope.kind, linear.rope.factor) == ("linear", 4.0)
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 512,
    }
    config = read_config(write_gguf(tmp_path / "b.gguf", "qwen2", **yarn))
    assert (config.family, config.rope.kind, config.max_position) == ("qwen2", "yarn", 2048)
    factors = {
        f"rope_factors_{which}.weight": np.full(8, scale, np.float32)
        for which, scale in (("short", 1), ("long", 2))
    }
    config = read_config(
        write_gguf(
            tmp_path / "c.gguf", "minicpm", tensors=factors, **{"rope.scaling.original_context_length": 128}
        )
    )
    assert (config.rope.kind, config.rope.factor, config.rope.long_factor) == ("longrope", 4.0, (2.0,) * 8)


def test_gguf_minicpm_scales_new_and_old(tmp_path: Path) -> None:
    keys = {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 4.0}
    config = read_config(write_gguf(tmp_path / "a.gguf", "minicpm", **keys))
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 0.5, 0.25)
    old = read_config(write_gguf(tmp_path / "b.gguf", "minicpm"))
    assert (old.embedding_scale, old.residual_scale, old.logit_scale) == (12.0, 0.7, 4.0)


@pytest.mark.parametrize(
    "arch", ["mamba", "jamba", "rwkv7", "qwen3next", "qwen3moe", "t5", "minicpm3", "gemma3"]
)
def test_gguf_architectures_are_refused_by_name(tmp_path: Path, arch: str) -> None:
    """Expectations row 41: hybrid and recurrent targets are refused by name, in GGUF files too."""
    with pytest.raises(InputError, match=arch):
        read_config(write_gguf(tmp_path / "a.gguf", arch))


def test_gguf_heads_are_sent_to_their_original(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draft head") as caught:
        read_config(write_gguf(tmp_path / "a.gguf", "eagle3"))
    assert "Hugging Face" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"expert_count": 8}, "8 experts"),
        ({"block_count": None}, "does not say llama.block_count"),
        ({"block_count": 10**9}, "says 1000000000 for llama.block_count"),
        ({"attention.head_count": [4, 2, 4, 4]}, "different shapes"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"rope.scaling.type": "mystery"}, "mystery"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"rope.freq_base": "high"}, "wrong kind"),
    ],
)
def test_gguf_metadata_that_does_not_run_is_refused(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_config(write_gguf(tmp_path / "a.gguf", **keys))
