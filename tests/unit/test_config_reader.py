"""config.json to ModelConfig: every family, every spelling, and refusals by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from treeeagle_edge.config.reader import model_config_from_json, read_config
from treeeagle_edge.errors import InputError

PLACE = Path("some-model")
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def config_of(**changes: Any):
    return model_config_from_json({**BASE, **changes}, PLACE)


def refusal(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        config_of(**changes)
    assert caught.value.hint
    assert not caught.value.message.endswith(".")
    return caught.value.message


def test_llama_shapes_and_defaults() -> None:
    config = config_of()
    assert (config.family, config.head_dim, config.num_kv_heads, config.max_position) == ("llama", 16, 2, 512)
    assert (config.rope.theta, config.rope.kind) == (10_000.0, "default")
    assert not (config.attention_bias or config.output_bias or config.qk_norm or config.tie_word_embeddings)


def test_missing_key_value_heads_means_one_each() -> None:
    assert config_of(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "family", "bias", "output_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", "llama", True, True, False),
        ("MistralForCausalLM", "mistral", False, False, False),
        ("Qwen2ForCausalLM", "qwen2", True, False, False),
        ("Qwen3ForCausalLM", "qwen3", True, True, True),
    ],
)
def test_families_read_attention_bias_as_transformers_does(
    architecture: str, family: str, bias: bool, output_bias: bool, qk_norm: bool
) -> None:
    config = config_of(architectures=[architecture], attention_bias=True, head_dim=16)
    assert (config.family, config.attention_bias, config.output_bias, config.qk_norm) == (
        family,
        bias,
        output_bias,
        qk_norm,
    )


def test_qwen2_has_a_bias_without_saying_so() -> None:
    config = config_of(architectures=["Qwen2ForCausalLM"])
    assert config.attention_bias and not config.output_bias


def test_head_dim_is_explicit_where_given_and_128_for_a_silent_qwen3() -> None:
    assert config_of(head_dim=32).head_dim == 32
    assert config_of(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_minicpm_scales() -> None:
    config = config_of(architectures=["MiniCPMForCausalLM"], scale_emb=12, scale_depth=1.4, dim_model_base=16)
    assert config.embedding_scale == 12.0
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(4))
    assert config.logit_scale == pytest.approx(16 / 64)


def test_minicpm_without_its_scales_is_refused() -> None:
    said = refusal(architectures=["MiniCPMForCausalLM"], scale_emb=12, scale_depth=1.4)
    assert "dim_model_base" in said


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_every_spelling(spelling: str, key: str) -> None:
    scaling = {
        spelling: "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    where = {key: {**scaling, "rope_theta": 500_000.0}} if key == "rope_parameters" else {key: scaling}
    rope = config_of(rope_theta=500_000.0, **where).rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 500_000.0, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (1.0, 4.0, 128)


def test_theta_of_rope_parameters_wins() -> None:
    rope = config_of(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope
    assert (rope.theta, rope.kind) == (1e6, "default")


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_factors(kind: str) -> None:
    scaling = {
        "type": kind,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
    }
    rope = config_of(rope_scaling=scaling).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("longrope", 4.0, 128)
    assert rope.short_factor == (1.0,) * 8 and rope.long_factor == (2.0,) * 8
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 1.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "attention_factor": 1.25,
        },
    ],
)
def test_attention_factor_equals_transformers(scaling: dict[str, Any]) -> None:
    parameters = {**scaling, "rope_theta": 10_000.0, "original_max_position_embeddings": 128}
    theirs = LlamaConfig(**{**BASE, "rope_parameters": dict(parameters)})
    expected = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")[1]
    assert config_of(rope_parameters=parameters).rope.attention_factor == pytest.approx(expected)


def test_yarn_and_dynamic_stretch_the_context() -> None:
    yarn = config_of(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert yarn.max_position == 2048
    assert yarn.rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)
    assert config_of(rope_scaling={"type": "dynamic", "factor": 2.0}).max_position == 1024


def test_vicuna_16k_names_its_context_apart() -> None:
    config = config_of(max_sequence_length=2048, rope_scaling={"type": "linear", "factor": 4.0})
    assert (config.max_position, config.rope.kind, config.rope.factor) == (2048, "linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, 64),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 512),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False}, 512),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            64,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            512,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            64,
        ),
        ({"sliding_window": 64}, 512),  # Llama has none, whatever the key says
    ],
)
def test_sliding_window_caps_the_context_where_it_is_used(changes: dict[str, Any], longest: int) -> None:
    assert config_of(**changes).max_position == longest


def test_block_sparse_minicpm_is_capped_where_it_is_dense() -> None:
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    config = config_of(architectures=["MiniCPMForCausalLM"], sparse_config={"dense_len": 256}, **scales)
    assert config.max_position == 256


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("MambaForCausalLM", "recurrent"),
        ("JambaForCausalLM", "recurrent"),
        ("Qwen3NextForCausalLM", "recurrent"),
        ("FalconH1ForCausalLM", "recurrent"),
        ("RwkvForCausalLM", "recurrent"),
        ("MixtralForCausalLM", "mixture of experts"),
        ("Qwen2MoeForCausalLM", "mixture of experts"),
        ("Qwen3MoeForCausalLM", "mixture of experts"),
        ("DeepseekV3ForCausalLM", "mixture of experts"),
        ("T5ForConditionalGeneration", "encoder-decoder"),
        ("BartForConditionalGeneration", "encoder-decoder"),
        ("BertForMaskedLM", "encoder"),
        ("MiniCPM3ForCausalLM", "latent attention"),
        ("Qwen2VLForConditionalGeneration", "multimodal"),
        ("Gemma2ForCausalLM", "not supported"),
        ("LlamaForSequenceClassification", "not supported"),
    ],
)
def test_other_architectures_are_refused_by_name(architecture: str, reason: str) -> None:
    """Expectations row 41: a recurrent target, which cannot rewind, is refused by name; so are others."""
    said = refusal(architectures=[architecture])
    assert architecture in said and reason in said


def test_a_head_given_as_the_model_is_called_a_head() -> None:
    assert "draft head" in refusal(architectures=["LlamaForCausalLMEagle3"])
    assert "draft head" in refusal(draft_vocab_size=50)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_quantised_repositories_are_refused_by_method(method: str) -> None:
    """Expectations row 37: an existing quantization_config is detected and refused with advice."""
    with pytest.raises(InputError, match=method) as caught:
        config_of(quantization_config={"quant_method": method})
    assert "unquantised repository" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_local_experts": 8}, "8 experts"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "mystery"}}, "mystery"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 8}}, "beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -3}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 for num_hidden_layers"),
        ({"intermediate_size": 2**40}, "for intermediate_size"),
        ({"max_position_embeddings": float("inf")}, "wrong kind"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"rms_norm_eps": "small"}, "wrong kind"),
        ({"rope_scaling": "linear"}, "wrong kind"),
        ({"architectures": None, "model_type": None}, "no architecture"),
        ({"architectures": None, "model_type": "mamba2"}, "mamba2"),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**changes)


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert config_of(architectures=None, model_type="qwen3").family == "qwen3"


def test_directories_that_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(InputError) as caught:
        read_config(tmp_path)
    assert "x.gguf" in str(caught.value.hint)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(InputError, match="LoRA adapter") as caught:
        read_config(tmp_path)
    assert "org/base" in str(caught.value.hint)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="no JSON object"):
        read_config(tmp_path)


def test_reading_a_config_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    program = (
        "import sys, pathlib; from treeeagle_edge.config.reader import read_config;"
        "assert read_config(pathlib.Path(sys.argv[1])).hidden_size == 64;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
