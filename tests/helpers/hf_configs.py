"""The shapes that the public config.json files of well-known models declare, in the words of those files."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_LLAMA_31: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_2: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
}
_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
_VICUNA_13 = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-06}  # of version 1.3, after the first Llama
_QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "max_window_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }


HF_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA_31,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        **_LLAMA_31,
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "rope_scaling": {**_LLAMA_31["rope_scaling"], "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-2-7b-chat-hf": {**_LLAMA_2, **_7B},
    "meta-llama/Llama-2-13b-chat-hf": {**_LLAMA_2, **_13B},
    "lmsys/vicuna-7b-v1.5": {**_LLAMA_2, **_7B},
    "lmsys/vicuna-13b-v1.5": {**_LLAMA_2, **_13B},
    "lmsys/vicuna-7b-v1.3": {**_LLAMA_2, **_7B, **_VICUNA_13},
    "lmsys/vicuna-13b-v1.3": {**_LLAMA_2, **_13B, **_VICUNA_13},
    "Qwen/Qwen2-7B-Instruct": {**_QWEN2_7B, "sliding_window": 131_072},
    "Qwen/Qwen2.5-7B-Instruct": {**_QWEN2_7B, "sliding_window": 131_072},
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40),
    "openbmb/MiniCPM4-8B": {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": 73_448,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-06,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": False,
        "rope_scaling": {  # 64 factors each, which no byte of a plan depends on
            "rope_type": "longrope",
            "long_factor": [1.0] * 64,
            "short_factor": [1.0] * 64,
            "original_max_position_embeddings": 32_768,
        },
    },
}
