"""The table of known models says what their config.json files say, so that a plan by name is the plan of the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hf_configs import HF_CONFIGS

from treeeagle_edge.config.reader import read_config
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning.known_models import KNOWN_MODELS, find_known
from treeeagle_edge.profiling.table import MODELS
from treeeagle_edge.sources.model_names import bundled_heads, is_repository


def shapes(config: ModelConfig) -> ModelConfig:
    """All but the factors of longrope, which the table leaves out."""
    rope = replace(config.rope, short_factor=None, long_factor=None, attention_factor=None)
    return replace(config, rope=rope)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_a_config_file_gives_the_shapes_of_the_table(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIGS[name]))
    assert shapes(read_config(tmp_path)) == shapes(KNOWN_MODELS[name].config)


def test_every_model_of_the_page_of_plans_is_held_to_its_config_file() -> None:
    assert set(MODELS) <= set(HF_CONFIGS)


def test_a_head_fits_the_model_it_stands_beside() -> None:
    for name, known in KNOWN_MODELS.items():
        if known.head is None:
            assert known.head_name is None, name
            continue
        assert known.head_name in bundled_heads() or is_repository(str(known.head_name)), name
        head = known.head
        assert (head.target_hidden_size, head.vocab_size) == (
            known.config.hidden_size,
            known.config.vocab_size,
        )
        assert all(0 < tap < known.config.num_layers for tap in head.taps), name


def test_names_are_told_apart_in_any_case() -> None:
    assert len({name.lower() for name in KNOWN_MODELS}) == len(KNOWN_MODELS)
    assert all(find_known(name.upper()) is known for name, known in KNOWN_MODELS.items())
