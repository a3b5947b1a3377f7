"""Shapes of well-known targets and the EAGLE-3 head that goes with each, so that a plan needs no download.

The figures are those of the public config.json files. A checkpoint on disk always wins over this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig, RopeConfig


@dataclass(frozen=True)
class KnownModel:
    """A target that can be planned for by name, with the head trained for it where there is one."""

    config: ModelConfig
    head_name: str | None = None
    head: HeadConfig | None = None


def _llama31_rope(factor: float) -> RopeConfig:
    return RopeConfig(
        theta=500_000.0,
        kind="llama3",
        factor=factor,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def decoder(
    family: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    max_position: int,
    *,
    head_dim: int = 128,
    rope: RopeConfig | None = None,
    eps: float = 1e-5,
    tied: bool = False,
) -> ModelConfig:
    """Shapes of a decoder, with the biases and norms of its family."""
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=eps,
        max_position=max_position,
        rope=rope or RopeConfig(),
        tie_word_embeddings=tied,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    rope = RopeConfig(theta=1_000_000.0)
    return decoder(
        "qwen3", hidden, intermediate, layers, heads, 8, 151_936, 40_960, rope=rope, eps=1e-6, tied=tied
    )


def _minicpm4_8b() -> ModelConfig:
    return ModelConfig(
        family="minicpm",
        hidden_size=4096,
        intermediate_size=16_384,
        num_layers=32,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=73_448,
        rms_norm_eps=1e-6,
        max_position=32_768,
        rope=RopeConfig(kind="longrope", original_max_position=32_768),
        tie_word_embeddings=False,
        embedding_scale=12.0,
        residual_scale=1.4 / 32**0.5,
        logit_scale=256 / 4096,
    )


def usual_head(target: ModelConfig, *, draft_vocab: int, theta: float = 10_000.0) -> HeadConfig:
    """The shapes that most EAGLE-3 heads have: one layer as wide as the target's, and the usual three taps."""
    return HeadConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_taps=len(target.default_taps),
        taps=target.default_taps,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=theta,
    )


def _with_head(
    config: ModelConfig, name: str, *, draft_vocab: int = 32_000, theta: float = 10_000.0
) -> KnownModel:
    return KnownModel(config, name, usual_head(config, draft_vocab=draft_vocab, theta=theta))


def _table() -> dict[str, KnownModel]:
    llama31_8b = decoder("llama", 4096, 14_336, 32, 32, 8, 128_256, 131_072, rope=_llama31_rope(8.0))
    llama2_7b = decoder("llama", 4096, 11_008, 32, 32, 32, 32_000, 4096)
    llama2_13b = decoder("llama", 5120, 13_824, 40, 40, 40, 32_000, 4096)
    vicuna13_7b = decoder("llama", 4096, 11_008, 32, 32, 32, 32_000, 2048, eps=1e-6)
    vicuna13_13b = decoder("llama", 5120, 13_824, 40, 40, 40, 32_000, 2048, eps=1e-6)
    million = RopeConfig(theta=1_000_000.0)
    qwen2_7b = decoder("qwen2", 3584, 18_944, 28, 28, 4, 152_064, 32_768, rope=million, eps=1e-6)
    smollm2 = decoder(
        "llama", 576, 1536, 30, 9, 3, 49_152, 8192, head_dim=64, rope=RopeConfig(theta=100_000.0), tied=True
    )
    return {
        "smollm2-135m": _with_head(smollm2, "smollm2-135m-eagle3", draft_vocab=10_240, theta=100_000.0),
        "meta-llama/Llama-3.1-8B-Instruct": _with_head(llama31_8b, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _with_head(
            llama31_8b, "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"
        ),
        "meta-llama/Llama-3.2-1B-Instruct": KnownModel(
            decoder(
                "llama",
                2048,
                8192,
                16,
                32,
                8,
                128_256,
                131_072,
                head_dim=64,
                rope=_llama31_rope(32.0),
                tied=True,
            )
        ),
        "meta-llama/Llama-3.2-3B-Instruct": KnownModel(
            decoder("llama", 3072, 8192, 28, 24, 8, 128_256, 131_072, rope=_llama31_rope(32.0), tied=True)
        ),
        "meta-llama/Llama-2-7b-chat-hf": KnownModel(llama2_7b),
        "meta-llama/Llama-2-13b-chat-hf": KnownModel(llama2_13b),
        "lmsys/vicuna-7b-v1.3": KnownModel(vicuna13_7b),
        "lmsys/vicuna-13b-v1.3": _with_head(vicuna13_13b, "yuhuili/EAGLE3-Vicuna1.3-13B"),
        "lmsys/vicuna-7b-v1.5": KnownModel(llama2_7b),
        "lmsys/vicuna-13b-v1.5": KnownModel(llama2_13b),
        "mistralai/Mistral-7B-Instruct-v0.3": KnownModel(
            decoder("mistral", 4096, 14_336, 32, 32, 8, 32_768, 32_768, rope=million)
        ),
        "Qwen/Qwen2-7B-Instruct": KnownModel(qwen2_7b),
        "Qwen/Qwen2.5-7B-Instruct": KnownModel(qwen2_7b),
        "Qwen/Qwen3-1.7B": _with_head(
            _qwen3(2048, 6144, 28, 16, tied=True), "AngelSlim/Qwen3-1.7B_eagle3", theta=1_000_000.0
        ),
        "Qwen/Qwen3-4B": _with_head(
            _qwen3(2560, 9728, 36, 32, tied=True), "AngelSlim/Qwen3-4B_eagle3", theta=1_000_000.0
        ),
        "Qwen/Qwen3-8B": _with_head(
            _qwen3(4096, 12_288, 36, 32, tied=False), "AngelSlim/Qwen3-8B_eagle3", theta=1_000_000.0
        ),
        "Qwen/Qwen3-14B": _with_head(
            _qwen3(5120, 17_408, 40, 40, tied=False), "AngelSlim/Qwen3-14B_eagle3", theta=1_000_000.0
        ),
        "openbmb/MiniCPM4-8B": _with_head(
            _minicpm4_8b(), "linglingdan/Eagle3_for_MiniCPM4", draft_vocab=15_000
        ),
    }


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(_table())


def known_heads() -> tuple[str, ...]:
    """Names of the heads in the table."""
    return tuple(known.head_name for known in KNOWN_MODELS.values() if known.head_name is not None)


def find_known(name: str) -> KnownModel | None:
    """The entry for a model name, whatever its upper and lower case; None where the table has none."""
    wanted = name.strip().rstrip("/").lower()
    return next((known for key, known in KNOWN_MODELS.items() if key.lower() == wanted), None)
