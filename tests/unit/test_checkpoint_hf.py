"""Hugging Face directories: whole, sharded, pickled, and every way in which they arrive broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.errors import InputError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def make(family: str, **changes: object) -> torch.nn.Module:
    """A random model of `transformers`."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def assert_same(path: Path, model: torch.nn.Module) -> None:
    checkpoint = open_checkpoint(path)
    state = model.state_dict()
    if checkpoint.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert checkpoint.names() == state.keys()
    for name, value in state.items():
        assert torch.equal(checkpoint.tensor(name), value), name


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make("Llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"head_dim": 16}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_every_tensor_of_every_family(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    model = make(family, **changes)
    model.save_pretrained(tmp_path)
    assert_same(tmp_path, model)


def test_shards_and_stored_dtype(tmp_path: Path) -> None:
    model = make("Llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(tmp_path, model)
    assert open_checkpoint(tmp_path).tensor("model.norm.weight").dtype == torch.bfloat16


def test_pickled_weights_whole_and_sharded(llama: Path) -> None:
    model = make("Llama")
    (llama / "model.safetensors").unlink()
    state = model.state_dict()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(state, llama / "pytorch_model.bin")
    assert_same(llama, model)
    (llama / "pytorch_model.bin").unlink()
    halves = (list(state)[::2], list(state)[1::2])
    for number, names in enumerate(halves):
        torch.save({name: state[name] for name in names}, llama / f"part{number}.bin")
    index = {
        "weight_map": {name: f"part{number}.bin" for number, names in enumerate(halves) for name in names}
    }
    (llama / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(llama, model)


def test_pickle_that_runs_code_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("x")}, llama / "pytorch_model.bin")
    with pytest.raises(InputError, match="more than tensors"):
        open_checkpoint(llama)


def test_tied_embedding_ignores_a_stored_copy(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path)  # untied weights under a config that ties
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "lm_head.weight" not in open_checkpoint(tmp_path).names()


def test_silent_minicpm_follows_its_file(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", **scales}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.config.tie_word_embeddings and "lm_head.weight" in checkpoint.names()


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert caught.value.hint
    return caught.value.message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in complaint(tmp_path) and "missing" in complaint(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 700, -10])
def test_truncated_safetensors(llama: Path, kept: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "truncated" in complaint(llama)


def test_truncated_pickle(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    torch.save({"a": torch.ones(100)}, llama / "pytorch_model.bin")
    file = llama / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:300])
    assert "truncated" in complaint(llama)


def test_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "no weights" in complaint(llama)


def test_an_index_that_leaves_its_directory(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "other.safetensors")
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "outside" in complaint(llama)
    index.write_text(json.dumps({}))
    assert "weight_map" in complaint(llama)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 3}, "lacks the tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"vocab_size": 65}, "[64, 32]"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"num_key_value_heads": 3}, "3 key heads"),
    ],
)
def test_a_config_of_another_model(llama: Path, change: dict[str, object], named: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **change}))
    assert named in complaint(llama)


def test_biases_that_the_config_does_not_declare(tmp_path: Path) -> None:
    make("Llama", attention_bias=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    assert "bias" in complaint(tmp_path) and "more" in complaint(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path: Path, llama: Path) -> None:
    assert "does not exist" in complaint(tmp_path / "nowhere")
    assert "without a config" in complaint(llama / "model.safetensors")
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "zip", llama))
    assert "zip archive" in complaint(archive)


def test_generation_defaults(llama: Path) -> None:
    file = llama / "generation_config.json"
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [5, 6]}
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    file.write_text(json.dumps(sampling))
    found = open_checkpoint(llama).generation
    assert (found.temperature, found.top_p, found.top_k, found.stop_ids) == (0.6, 0.9, 20, {5, 6, 7})
    file.write_text(json.dumps({**sampling, "do_sample": False}))
    found = open_checkpoint(llama).generation
    assert (found.temperature, found.top_p, found.top_k, found.stop_ids) == (None, None, None, {5, 6, 7})
    file.unlink()
    assert open_checkpoint(llama).generation.stop_ids == {7}
