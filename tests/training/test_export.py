"""Written heads: both layouts give back the head that was written, and nothing half-written is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_head import random_head
from safetensors.torch import load_file
from tiny_models import CONFIG, CPU, VOCAB, tiny_target

from treeeagle_edge.checkpoint.head import HeadCheckpoint, open_head
from treeeagle_edge.checkpoint.head_layouts import TAP_KEY
from treeeagle_edge.errors import CannotRunError, InputError, UsageError
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model.head import Head
from treeeagle_edge.model_config import RopeConfig
from treeeagle_edge.training.export import LAYOUTS, write_head

FLAGS = {"norm_before_residual": True, "norm_output": True}
LLAMA3 = RopeConfig(
    theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def write(folder: Path, head: HeadCheckpoint, layout: str, **options: Any) -> Path:
    tensors = dict(head.tensors)
    if head.embedding is not None:
        tensors["embed_tokens.weight"] = head.embedding
    options = {"dtype": torch.float32, "target_name": "some/model", **options}
    write_head(folder, head.config, tensors, head.target_ids, layout=layout, **options)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def scores(checkpoint: HeadCheckpoint) -> list[torch.Tensor]:
    """What a head computes over a prompt and one row drafted after it."""
    target = tiny_target()
    head = Head(checkpoint, target.embed, slots=8, context=64, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(4, checkpoint.config.num_taps * CONFIG.hidden_size, generator=generator)
    tokens, slots = torch.randint(0, VOCAB, (5,), generator=generator), torch.arange(5)
    view = AttentionView(slots[:0], slots[:4], torch.ones(4, 4, dtype=torch.bool).tril())
    first = head.extend(features, tokens[:4], slots[:4], slots[:4], view, 24)
    view = AttentionView(slots[:4], slots[4:], torch.ones(1, 1, dtype=torch.bool))
    second = head.step(first.hidden, tokens[4:], slots[4:], slots[4:], view, 24)
    return [first.log_probs, first.ids, first.hidden, second.log_probs, second.ids, second.hidden]


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        *((layout, {}) for layout in LAYOUTS),
        *((layout, {"draft_vocab": VOCAB}) for layout in LAYOUTS),
        *((layout, {"taps": (1, 3, 5)}) for layout in LAYOUTS),
        *((layout, {"taps": (1, 2, 3, 4)}) for layout in LAYOUTS),
        *((layout, {"own_embedding": True}) for layout in LAYOUTS),
        *((layout, {"rope_theta": 5e5, "scaled_rope": LLAMA3}) for layout in LAYOUTS),
        ("speculators", FLAGS),
    ],
)
def test_a_written_head_is_the_head_again(tmp_path: Path, layout: str, fields: dict[str, Any]) -> None:
    """Config, ids and tensors to the bit. Scores may round otherwise: a mapped file is aligned as it likes."""
    head = random_head(**fields)
    again = open_head(
        write(tmp_path / "head", head, layout, default_taps=CONFIG.default_taps), CONFIG, tiny_target().embed
    )
    assert again.config == head.config
    assert torch.equal(again.target_ids, head.target_ids)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in head.tensors.items())
    assert [note for note in again.notes if "looks random" not in note] == []
    for ours, theirs in zip(scores(again), scores(head), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_safeailab_layout(tmp_path: Path) -> None:
    head = random_head(rope_theta=5e5)
    folder = write(
        tmp_path / "head", head, "safeailab", dtype=torch.float16, default_taps=CONFIG.default_taps,
        extra={"eos_token_id": 2, "max_position_embeddings": 512, "hidden_size": 1},
    )  # fmt: skip
    stored, config = load_file(folder / "model.safetensors"), config_of(folder)
    assert "midlayer.self_attn.q_proj.weight" in stored and not any("layers.0" in name for name in stored)
    assert stored["fc.weight"].dtype == torch.float16
    assert torch.equal(torch.arange(24) + stored["d2t"], head.target_ids)
    assert stored["t2d"].dtype == torch.bool
    assert stored["t2d"].nonzero().flatten().tolist() == head.target_ids.tolist()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]) == (32, 24, VOCAB)
    assert (config["rope_theta"], config["rms_norm_eps"], config["torch_dtype"]) == (5e5, 1e-5, "float16")
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (2, 512)
    assert "eagle_config" not in config and "rope_scaling" not in config


def test_taps_are_said_unless_they_are_known_to_be_the_default(tmp_path: Path) -> None:
    head = random_head()
    config = config_of(write(tmp_path / "unknown", head, "safeailab"))
    assert config["eagle_config"] == {TAP_KEY: [1, 2, 2]}
    other = random_head(taps=(1, 3, 5))
    config = config_of(write(tmp_path / "other", other, "safeailab", default_taps=CONFIG.default_taps))
    assert config["eagle_config"] == {TAP_KEY: [0, 2, 4]}


def test_the_speculators_layout(tmp_path: Path) -> None:
    """The keys that speculators and vLLM look for, each where they look for it."""
    folder = write(tmp_path / "head", random_head(**FLAGS), "speculators", target_name="some/model")
    stored, config = load_file(folder / "model.safetensors"), config_of(folder)
    assert "layers.0.self_attn.q_proj.weight" in stored and not any("midlayer" in name for name in stored)
    assert stored["d2t"].shape == (24,) and stored["t2d"].shape == (VOCAB,)
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 24
    assert config[TAP_KEY] == [2, 3, 3]
    assert config["norm_before_residual"] is True and config["norm_output"] is True
    assert config["norm_before_fc"] is False and config["fc_norm"] is False
    wanted = config["speculators_config"]
    assert wanted["verifier"]["name_or_path"] == "some/model"
    assert wanted["proposal_methods"][0]["speculative_tokens"] == 3
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, VOCAB)
    assert "model_type" not in config  # vLLM would take the file for a model of its own


def test_what_a_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    for flag in FLAGS:
        with pytest.raises(InputError, match=f"safeailab layout has no {flag}"):
            write(tmp_path / "head", random_head(**{flag: True}), "safeailab")
    with pytest.raises(UsageError, match="unknown head layout gguf"):
        write(tmp_path / "head", random_head(), "gguf")
    assert not (tmp_path / "head").exists()


@every_layout
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "head", random_head(), layout)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(before) == ["config.json", "model.safetensors"]

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("treeeagle_edge.training.shards.save_file", full)
    for place in (folder, tmp_path / "new"):
        with pytest.raises(CannotRunError, match="cannot be written") as caught:
            write(place, random_head(seed=9), layout)
        assert caught.value.hint
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list((tmp_path / "new").iterdir()) == []


def test_a_place_that_takes_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotRunError, match=r"config\.json cannot be written: .*"):
        write(tmp_path / "file" / "head", random_head(), "safeailab")


@every_layout
def test_overwriting_another_head(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / "head", random_head(), layout)
    head = random_head(seed=8, draft_vocab=20)
    again = open_head(write(folder, head, layout, default_taps=CONFIG.default_taps), CONFIG)
    assert again.config == replace(head.config, own_embedding=False)
    assert torch.equal(again.tensors["fc.weight"], head.tensors["fc.weight"])
