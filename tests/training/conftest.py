"""A tiny target that is deep enough to have three layers tapped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def deep_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny_checkpoint`, of six layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("deep") / "deep-llama"
    shutil.copytree(tiny_checkpoint, folder)
    config = LlamaConfig.from_pretrained(folder, num_hidden_layers=6)
    state = torch.get_rng_state()
    torch.manual_seed(21)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    torch.set_rng_state(state)
    return folder
