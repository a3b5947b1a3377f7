"""Each family of targets against `transformers`, on tiny random checkpoints made here: logits and features in fp32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from target_passes import in_pieces
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.model.target import Target, load_target

TOLERANCE = 1e-4  # max abs difference of logits, fp32
CONTEXT = 96
IDS = torch.randint(0, 199, (41,), generator=torch.Generator().manual_seed(7))
TAPS = (0, 2, 3)

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama2": LlamaConfig(**SIZES | {"num_key_value_heads": 6}),
    "llama3": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}),
    "llama3.1": LlamaConfig(**SIZES, rope_parameters=LLAMA3_SCALING),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True),
    "llama-linear": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "mistral": MistralConfig(**SIZES, head_dim=16, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2.5": Qwen2Config(
        **SIZES | {"rms_norm_eps": 1e-6}, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "smollm2": LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
}


def random_model(config: PreTrainedConfig, seed: int = 3) -> PreTrainedModel:
    """A model whose norms, biases and logits are far from trivial: a fresh one has zeros, ones and logits near 0."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.5 * noise
        elif "embed" in name:
            parameter.data = noise
        else:
            parameter.data = 1.5 * noise / math.sqrt(parameter.shape[1])
    model.tie_weights()
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Target]:
    """The model of `transformers`, and ours loaded from what it saved."""
    model = random_model(FAMILIES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, load_target(open_checkpoint(folder), bits=32, context=CONTEXT, device=torch.device("cpu"))


@torch.no_grad()
def expected(model: PreTrainedModel, ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    """Logits [N, V], and hidden_states at TAPS side by side."""
    output = model(ids[None], output_hidden_states=True)
    return output.logits[0], torch.cat([output.hidden_states[tap][0] for tap in TAPS], dim=-1)


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


@pytest.mark.parametrize("piece", [41, 13, 1])
def test_logits_and_features_equal_transformers(pair: tuple[PreTrainedModel, Target], piece: int) -> None:
    """A whole prompt in one pass, in chunks, and token by token, through slots in order."""
    model, target = pair
    logits, features = expected(model)
    assert logits.std() > 0.5, "logits this small would hide a difference"
    ours, taps = in_pieces(target, IDS, piece, taps=TAPS)
    assert ours.dtype == torch.float32
    assert largest(ours - logits) <= TOLERANCE
    assert largest(taps - features) <= TOLERANCE


def test_scattered_slots_give_the_same(pair: tuple[PreTrainedModel, Target]) -> None:
    """Slots in any order: reading goes by the list, not by the place."""
    model, target = pair
    order = torch.randperm(97, generator=torch.Generator().manual_seed(1))[: len(IDS)]
    ours, _ = in_pieces(target, IDS, 13, order=order)
    assert largest(ours - expected(model)[0]) <= TOLERANCE


# -- MiniCPM: not in transformers, so a Llama with the scales folded into its weights is the oracle

HALF = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
    "long_factor": [2.0 + 0.7 * i for i in range(HALF)],
    "original_max_position_embeddings": 64,
}


def minicpm_folder(folder: Path, llama: PreTrainedModel, rope: dict[str, Any] | None) -> Path:
    """Save `llama` as a MiniCPM whose scales undo what is folded in here: what it computes stays the same."""
    layers, hidden = SIZES["num_hidden_layers"], SIZES["hidden_size"]
    scale_emb, scale_depth, base = 12.0, 1.4, 16
    residual = scale_depth / math.sqrt(layers)
    state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    state["model.embed_tokens.weight"] /= scale_emb
    for name in state:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] /= residual
    state["lm_head.weight"] *= hidden / base
    llama.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "scale_emb": scale_emb,
        "scale_depth": scale_depth,
        "dim_model_base": base,
        "tie_word_embeddings": False,
    }
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    config |= {"rope_theta": 10_000.0}
    if rope is not None:
        config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("piece", [41, 1])
def test_minicpm_equals_a_llama_with_folded_scales(tmp_path: Path, piece: int) -> None:
    """scale_emb on embeddings, scale_depth / sqrt(layers) on both branches, dim_model_base / hidden on the head."""
    llama = random_model(LlamaConfig(**SIZES))
    folder = minicpm_folder(tmp_path, llama, None)
    target = load_target(open_checkpoint(folder), bits=32, context=CONTEXT, device=torch.device("cpu"))
    logits, features = expected(llama)
    ours, taps = in_pieces(target, IDS, piece, taps=TAPS)
    assert largest(ours - logits) <= TOLERANCE
    assert largest(taps - features) <= TOLERANCE
    assert largest(target.embed(IDS) * 12.0 - features[:, : SIZES["hidden_size"]]) <= TOLERANCE


@pytest.mark.parametrize(("context", "length"), [(64, 41), (65, 41), (128, 100)])
def test_longrope_factors_follow_the_planned_context(tmp_path: Path, context: int, length: int) -> None:
    """Short factors while the planned context fits the original 64, long ones beyond, whatever the prompt's length."""
    llama = random_model(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10_000.0} | LONGROPE))
    folder = minicpm_folder(tmp_path, llama, LONGROPE)
    target = load_target(open_checkpoint(folder), bits=32, context=context, device=torch.device("cpu"))
    # transformers chooses by the prompt; a Llama whose two lists are the one we must take shows which that is
    factors = LONGROPE["short_factor" if context <= 64 else "long_factor"]
    fixed = {"rope_theta": 10_000.0} | LONGROPE | {"short_factor": factors, "long_factor": factors}
    oracle = random_model(LlamaConfig(**SIZES, rope_parameters=fixed))
    ids = torch.arange(length) * 7 % 199
    ours, _ = in_pieces(target, ids, 32)
    assert largest(ours - expected(oracle, ids)[0]) <= TOLERANCE
