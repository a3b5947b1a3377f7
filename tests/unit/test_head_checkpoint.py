"""Head checkpoints: shapes decide, contradictions are named, nothing is guessed silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CONFIG, VOCAB, head_tensors, tiny_target
from torch import Tensor

from treeeagle_edge.checkpoint.head import open_head, read_head_config
from treeeagle_edge.errors import InputError
from treeeagle_edge.kernels.reference_layers import rotate
from treeeagle_edge.model.head import Head

DRAFT_VOCAB = 24
HEADER = {"num_attention_heads": 4, "rms_norm_eps": 1e-5}


def save(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None, *, binary: bool = False
) -> Path:
    folder.mkdir(exist_ok=True)
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**HEADER, **(config or {})}))
    return folder


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_both_file_kinds_load(tmp_path: Path, binary: bool) -> None:
    tensors = head_tensors(draft_vocab=DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    checkpoint = open_head(save(tmp_path / "head", tensors, binary=binary), CONFIG)
    config = checkpoint.config
    assert (config.hidden_size, config.num_taps, config.taps) == (32, 3, (2, 3, 3))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_theta == 10_000.0
    assert torch.equal(checkpoint.target_ids, torch.arange(DRAFT_VOCAB) + tensors["d2t"])
    assert checkpoint.embedding is None


def test_draft_vocabulary_comes_from_the_tensor(tmp_path: Path) -> None:
    """Expectations row 2: a config without draft_vocab_size is no reason to fail."""
    folder = save(tmp_path / "head", head_tensors(draft_vocab=DRAFT_VOCAB))
    assert read_head_config(folder, CONFIG).draft_vocab_size == DRAFT_VOCAB


def test_all_zero_d2t_is_refused_unless_vocabularies_are_equal(tmp_path: Path) -> None:
    """Expectations row 3: all zero is right only where draft and target ids are the same."""
    small = head_tensors(draft_vocab=DRAFT_VOCAB)
    small["d2t"] = torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
    with pytest.raises(InputError, match="d2t is all zero"):
        open_head(save(tmp_path / "small", small), CONFIG)
    full = {**head_tensors(), "d2t": torch.zeros(VOCAB, dtype=torch.int64)}
    checkpoint = open_head(save(tmp_path / "full", full), CONFIG)
    assert torch.equal(checkpoint.target_ids, torch.arange(VOCAB))


def test_layers_are_counted_in_the_file(tmp_path: Path) -> None:
    """Expectations row 40: a config that claims the target's layer count does not matter."""
    folder = save(tmp_path / "head", head_tensors(), {"num_hidden_layers": 40})
    assert open_head(folder, CONFIG).config.num_taps == 3


def test_the_rotary_table_follows_the_planned_context(tmp_path: Path) -> None:
    """Expectations row 18: a head whose config says 8 positions drafts far beyond them."""
    target = tiny_target(context=600)
    checkpoint = open_head(save(tmp_path / "head", head_tensors(), {"max_position_embeddings": 8}), CONFIG)
    head = Head(
        checkpoint, target.embed, slots=4, context=600, dtype=torch.float32, device=torch.device("cpu")
    )
    positions = torch.tensor([0, 599])
    rotated = rotate(torch.ones(2, 1, 8), *head._rope.at(positions).rows)
    assert torch.isfinite(rotated).all()
    assert not torch.allclose(rotated[0], rotated[1])


def test_absolute_d2t_is_accepted_with_a_notice(tmp_path: Path) -> None:
    tensors = head_tensors(draft_vocab=DRAFT_VOCAB)
    absolute = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    absolute[-1] = VOCAB - 1
    checkpoint = open_head(save(tmp_path / "head", {**tensors, "d2t": absolute}), CONFIG)
    assert torch.equal(checkpoint.target_ids, absolute)
    assert "absolute" in checkpoint.notes[0]


def test_an_embedding_equal_to_the_targets_is_shared(tmp_path: Path) -> None:
    """Expectations row 30: another one is kept, and one that looks random is reported."""
    target = tiny_target()
    copy = target.embed(torch.arange(VOCAB)).clone()
    shared = open_head(
        save(tmp_path / "copy", {**head_tensors(), "embed_tokens.weight": copy.half()}), CONFIG, target.embed
    )
    assert shared.embedding is None
    noise = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(3))
    own = open_head(
        save(tmp_path / "own", {**head_tensors(), "embed_tokens.weight": noise}), CONFIG, target.embed
    )
    assert own.embedding is not None
    assert "random" in own.notes[0]


def change(name: str, value: Tensor | None) -> dict[str, Tensor]:
    tensors = head_tensors(draft_vocab=DRAFT_VOCAB)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (change("fc.weight", None), {}, "lacks fc.weight"),
        (change("d2t", None), {}, "has no d2t"),
        (change("d2t", torch.full((DRAFT_VOCAB,), VOCAB)), {}, "outside the target's vocabulary"),
        (change("d2t", torch.zeros(DRAFT_VOCAB)), {}, "d2t is torch.float32"),
        (
            change("fc.weight", torch.zeros(32, 100)),
            {},
            "100 features, no multiple of the target's hidden size 32",
        ),
        (change("fc.weight", torch.zeros(32, 64)), {}, "takes 2 features, but 3 tapped"),
        (
            change("midlayer.mlp.down_proj.weight", torch.zeros(32, 47)),
            {},
            r"has shape \(32, 47\), expected \(32, 48\)",
        ),
        (change("fc.bias", torch.zeros(32)), {}, "EAGLE-1 or EAGLE-2"),
        (change("midlayer.hidden_norm.weight", None), {}, "lacks layers.0.hidden_norm.weight"),
        (
            change("midlayer.mlp.up_proj.bias", torch.zeros(48)),
            {},
            "no known layout has: layers.0.mlp.up_proj.bias",
        ),
        (change("embed_tokens.weight", torch.zeros(50, 32)), {}, "50 rows, the target's vocabulary 40"),
        (head_tensors(), {"hidden_size": 99}, "hidden_size 99, its tensors and the target say 32"),
        (head_tensors(), {"vocab_size": 41}, "vocab_size 41"),
        (head_tensors(), {"rms_norm_eps": "small"}, "wrong kind: could not convert string to float"),
        (head_tensors(), {"rope_theta": "high"}, "wrong kind"),
        (head_tensors(), {"rope_scaling": 3}, "wrong kind"),
        (head_tensors(), {"max_position_embeddings": float("inf")}, "wrong kind"),
        (change("norm.weight", torch.tensor(1.0)), {}, "wrong kind"),
        (head_tensors(), {"num_attention_heads": 5}, "num_attention_heads 5"),
        (head_tensors(), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "taps layers"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_head(save(tmp_path / "head", tensors, config), CONFIG)
    assert caught.value.hint


def test_nested_layer_ids_are_layer_outputs(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "head", head_tensors(), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    )
    assert open_head(folder, CONFIG).config.taps == (1, 3, 5)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no head at"):
        open_head(tmp_path / "absent", CONFIG)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no head weights"):
        open_head(tmp_path / "empty", CONFIG)
    folder = save(tmp_path / "head", head_tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot read the head's weights"):
        open_head(folder, CONFIG)
    folder = save(tmp_path / "binary", head_tensors(), binary=True)
    (folder / "pytorch_model.bin").write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot read the head's weights"):
        open_head(folder, CONFIG)
    (folder / "pytorch_model.bin").write_text("root:x:0:0:root:/root:/bin/bash\n")
    with pytest.raises(InputError, match="cannot read the head's weights"):
        open_head(folder, CONFIG)
    (folder / "pytorch_model.bin").write_bytes(b'cos\nsystem\n(S"true"\ntR.')
    with pytest.raises(InputError, match=r"it is no table of tensors, or holds more than that$"):
        open_head(folder, CONFIG)
    folder = save(tmp_path / "config", head_tensors())
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        open_head(folder, CONFIG)
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="GGUF head"):
        open_head(tmp_path / "head.gguf", CONFIG)
