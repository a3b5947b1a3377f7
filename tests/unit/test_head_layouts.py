"""The two spellings of a head on disk: what each says is understood, and what does not run here is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CONFIG, VOCAB, head_tensors, tiny_target
from torch import Tensor

from treeeagle_edge.checkpoint.head import open_head
from treeeagle_edge.checkpoint.head_layouts import TAP_KEY
from treeeagle_edge.errors import InputError
from treeeagle_edge.model_config import RopeConfig

DRAFT_VOCAB = 24
LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "vocab_size": VOCAB,
}
SPECULATORS = {  # as the published heads of that layout are
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "draft_vocab_size": DRAFT_VOCAB,
    "norm_before_residual": True,
    "target_hidden_size": None,
    TAP_KEY: None,
    "tie_word_embeddings": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYER,
}


def speculators(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**SPECULATORS, **changes, "transformer_layer_config": {**LAYER, **(layer or {})}}


def flat(**changes: Any) -> dict[str, Any]:
    return {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, **changes}


def save(folder: Path, config: dict[str, Any], more: dict[str, Tensor] | None = None) -> Path:
    """A random head whose tensors are spelt as `config`'s layout has them."""
    tensors = head_tensors(draft_vocab=DRAFT_VOCAB)
    if "speculators_model_type" in config:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    folder.mkdir(exist_ok=True)
    save_file({**tensors, **(more or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_speculators_head_opens(tmp_path: Path) -> None:
    """Those heads bring the target's embedding along; it is shared, and does not count as the head's own."""
    target = tiny_target()
    embedding = {"embed_tokens.weight": target.embed(torch.arange(VOCAB)).clone().bfloat16()}
    opened = open_head(save(tmp_path / "head", speculators(), embedding), CONFIG, target.embed)
    config = opened.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 8)
    assert (config.draft_vocab_size, config.rms_norm_eps) == (DRAFT_VOCAB, 1e-5)
    assert config.taps == CONFIG.default_taps
    assert config.norm_before_residual and not config.norm_output
    assert config.rope == RopeConfig(theta=500_000.0)
    assert opened.embedding is None and not config.own_embedding
    assert opened.notes == ()
    raw = head_tensors(draft_vocab=DRAFT_VOCAB)
    assert torch.equal(opened.tensors["layers.0.mlp.up_proj.weight"], raw["midlayer.mlp.up_proj.weight"])
    assert torch.equal(opened.target_ids, torch.arange(DRAFT_VOCAB) + raw["d2t"])


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        (speculators(**{TAP_KEY: [1, 3, 4]}), (1, 3, 4)),
        (speculators(**{TAP_KEY: []}), (2, 3, 3)),
        (flat(eagle_config={TAP_KEY: [1, 3, 4]}), (2, 4, 5)),
        (flat(eagle_config={"use_aux_hidden_state": True}), (2, 3, 3)),
        (flat(**{TAP_KEY: [2, 3, 3]}), (2, 3, 3)),
        (flat(**{TAP_KEY: [1, 2, 2]}), (2, 3, 3)),
    ],
    ids=["by input", "none", "by output", "not said", "default by input", "default by output"],
)
def test_tapped_layers_become_indices_of_hidden_states(
    tmp_path: Path, config: dict[str, Any], taps: tuple[int, ...]
) -> None:
    """CONFIG has six layers: the default is 2, 3, 3."""
    assert open_head(save(tmp_path / "head", config), CONFIG).config.taps == taps


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SCALED = RopeConfig(
    theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        (
            speculators({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}),
            7e5,
        ),
        (speculators({"rope_theta": None}), 10_000.0),
        (speculators({"rope_scaling": LLAMA3}), SCALED),
        (flat(rope_scaling=LLAMA3), SCALED),
        (flat(rope_theta=None), 10_000.0),
    ],
)
def test_rotary_settings_are_the_heads_own(
    tmp_path: Path, config: dict[str, Any], rope: RopeConfig | float
) -> None:
    opened = open_head(save(tmp_path / "head", config), CONFIG).config
    assert opened.rope == (rope if isinstance(rope, RopeConfig) else RopeConfig(theta=rope))
    assert opened.rope_theta == opened.rope.theta


def test_norm_output_is_obeyed_in_both_layouts(tmp_path: Path) -> None:
    """SpecForge once meant something else by it, so a flat config that says it gets a notice."""
    nested = open_head(save(tmp_path / "nested", speculators(norm_output=True)), CONFIG)
    assert nested.config.norm_output and nested.notes == ()
    plain = open_head(save(tmp_path / "flat", flat(norm_output=True, norm_before_residual=True)), CONFIG)
    assert plain.config.norm_output and plain.config.norm_before_residual
    assert "SpecForge" in plain.notes[0]


def test_a_speculators_head_that_leaves_the_residual_open_gets_a_notice(tmp_path: Path) -> None:
    config = speculators()
    del config["norm_before_residual"]
    opened = open_head(save(tmp_path / "head", config), CONFIG)
    assert not opened.config.norm_before_residual
    assert "norm_before_residual" in opened.notes[0]


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (speculators(norm_before_fc=True), {}, "needs norm_before_fc"),
        (speculators(fc_norm=True), {}, "needs fc_norm"),
        (flat(eagle_config={"norm_before_fc": True}), {}, "needs norm_before_fc"),
        (flat(), {"fc_norm.0.weight": torch.ones(32)}, "needs fc_norm"),
        (speculators(), {"input_norm.weight": torch.ones(96)}, "needs norm_before_fc"),
        (speculators(), {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, "needs q_norm"),
        (flat(), {"midlayer.self_attn.k_norm.weight": torch.ones(8)}, "needs k_norm"),
        (flat(eagle_config={"use_aux_hidden_state": False}), {}, "use_aux_hidden_state"),
        (speculators({"hidden_act": "gelu"}), {}, "hidden_act gelu"),
        (speculators({"partial_rotary_factor": 0.5}), {}, "partial_rotary_factor"),
        (speculators(), {"layers.1.mlp.up_proj.weight": torch.ones(1)}, "layers.1.mlp.up_proj.weight"),
        (speculators(speculators_model_type="dflash"), {}, "kind dflash, not eagle3"),
        ({**SPECULATORS, "transformer_layer_config": None}, {}, "lacks transformer_layer_config"),
        (speculators({"hidden_size": 33}), {}, "hidden_size 33, its tensors and the target say 32"),
        (speculators(target_hidden_size=64), {}, "target_hidden_size 64"),
        (flat(**{TAP_KEY: [0, 2, 4]}), {}, r"layers \(0, 2, 4\).* input or their output"),
        (speculators(**{TAP_KEY: "2,3"}), {}, "no list of layers"),
        (speculators(**{TAP_KEY: [2, 3]}), {}, "takes 3 features, but 2 tapped"),
    ],
)  # fmt: skip
def test_what_does_not_run_here_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_head(save(tmp_path / "head", config, more), CONFIG)
    assert caught.value.hint
