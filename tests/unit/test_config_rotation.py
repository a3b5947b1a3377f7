"""Which files and entries say that a checkpoint's hidden states are rotated, and which do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treeeagle_edge.config.reader import read_config
from treeeagle_edge.errors import InputError
from treeeagle_edge.hub.repository import RemoteFile, Repository, files_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DESCRIPTION = "quant_model_description.json"


def rotation(folder: Path, said: dict[str, Any] | None = None, **files: Any) -> str | None:
    config = CONFIG if said is None else {**CONFIG, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_config(folder).rotation


@pytest.mark.parametrize(
    ("said", "entry"),
    [
        ({**NF4, "rotation": "spinquant"}, "rotation"),
        ({**NF4, "pre_processing": [{"name": "QuaRot", "online": False}]}, "name"),
        ({**NF4, "algorithms": ["smooth", "quarot"]}, "algorithms"),
        ({**NF4, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        ({**NF4, "online_hadamard": True}, "online_hadamard"),
    ],
)
def test_config_json_says_so(tmp_path: Path, said: dict[str, Any], entry: str) -> None:
    assert rotation(tmp_path, said) == f"{entry} in quantization_config of config.json"


@pytest.mark.parametrize(
    ("name", "content", "entry"),
    [
        ("quant_model_description", {"model_quant_type": "FLOAT", "is_rot_used": True}, "is_rot_used"),
        (
            "quant_model_description",
            {"optional": {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}},
            "quarot",
        ),
        ("quant_model_description_w8a8", {"is_rot_used": True}, "is_rot_used"),
        ("quantize_config", {"bits": 4, "rotation": {"mode": "random"}}, "rotation"),
        ("quantization_config", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ],
)
def test_a_file_beside_it_says_so(tmp_path: Path, name: str, content: dict[str, Any], entry: str) -> None:
    assert rotation(tmp_path, **{name: content}) == f"{entry} in {name}.json"


@pytest.mark.parametrize(
    ("said", "files"),
    [
        (None, {}),
        (NF4, {}),
        ({**NF4, "transform_config": {}, "rotation": None}, {}),  # as compressed-tensors writes it for none
        ({**NF4, "rotation": "none", "use_hadamard": False}, {}),
        ({**NF4, "llm_int8_skip_modules": ["rotary_emb"]}, {}),
        (None, {"quant_model_description": {"is_rot_used": False, "optional": {"quarot": {}}}}),
        (None, {"quantize_config": {"bits": 4, "desc_act": True}}),
        (None, {"quant_model_description": "{"}),  # damaged: no weight depends on it
        (None, {"tokenizer_config": {"rotation": True}}),
    ],
)
def test_nothing_says_so(tmp_path: Path, said: dict[str, Any] | None, files: dict[str, Any]) -> None:
    assert rotation(tmp_path, said, **files) is None


def test_methods_that_are_not_read_stay_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"already quantised \(compressed-tensors\)"):
        rotation(tmp_path, {"quant_method": "compressed-tensors", "transform_config": {"R1": {}}})


def test_the_files_that_say_so_are_fetched_with_a_model() -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors", DESCRIPTION, "README.md")
    files = files_of(Repository("org/name", "1", tuple(RemoteFile(name, 1, "") for name in names)), "model")
    assert {file.name for file in files} == set(names) - {"README.md"}
