"""What a decoder of the Llama family is made of, read from a Hugging Face config or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

# The matrices of a decoder layer, by the names Hugging Face's Llama gives them.
LINEARS = (
    *(f"self_attn.{which}_proj" for which in "qkvo"),
    *(f"mlp.{which}_proj" for which in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class StoredWidth:
    """How a repository that is already quantised by bitsandbytes stores the matrices of its layers."""

    bits: int  # 4 or 8
    name: str  # "NF4", "FP4" or "LLM.int8"
    plain: tuple[str, ...] = ()  # modules kept as floats, such as "model.layers.3.mlp.down_proj"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters (Su et al., arXiv 2104.09864) and the scaling a checkpoint declares.

    kind: "default", "linear", "dynamic", "llama3", "longrope" or "yarn", in the words of `transformers`.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    short_factor: tuple[float, ...] | None = None  # longrope, [head_dim / 2]
    long_factor: tuple[float, ...] | None = None  # longrope, [head_dim / 2]
    attention_factor: float | None = None  # longrope, yarn; None means the formula of the paper
    # [head_dim / 2], GGUF's `rope_freqs`: inverse frequencies are divided by them
    freq_divisors: tuple[float, ...] | None = None


# GGUF's types that native kernels hold as they are, and their bits
BLOCK_BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}


@dataclass(frozen=True)
class StoredBlocks:
    """The matrices of a GGUF file that are stored in one of `BLOCK_BITS`."""

    layers: tuple[tuple[str, int, int], ...]  # type, rows and columns of those in the layers
    bits: int | None  # of most of the layers' weights; None where most are stored in other ways
    embedding: str | None  # its type; None: another one
    lm_head: str | None  # the embedding's where it is tied


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one target, independent of the file format it came from."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "minicpm"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position: int  # longest context of the checkpoint, already capped by a sliding window
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False  # q, k, v carry a bias (Qwen2)
    output_bias: bool = False  # o_proj carries one too (attention_bias of Llama configs)
    qk_norm: bool = False  # RMSNorm over head_dim of q and k (Qwen3)
    embedding_scale: float = 1.0  # MiniCPM scale_emb
    residual_scale: float = 1.0  # MiniCPM scale_depth / sqrt(num_layers)
    logit_scale: float = 1.0  # MiniCPM dim_model_base / hidden_size: multiplies the normalised hidden state
    stored: StoredWidth | None = None  # None: the weights do not come quantised
    # what stays as a GGUF file stores it; of the file rather than the model, hence not compared
    blocks: StoredBlocks | None = field(default=None, compare=False)
    rotation: str | None = None  # the config entry that says that hidden states are rotated; None: none does

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Name of `LINEARS` -> (out, in) of the matrices of one decoder layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
        return dict(zip(LINEARS, [*shapes, (inner, hidden), (inner, hidden), (hidden, inner)], strict=True))

    @property
    def default_taps(self) -> tuple[int, int, int]:
        """Indices into `hidden_states` (0 = embeddings) that an EAGLE-3 head reads unless it says otherwise."""
        return (2, self.num_layers // 2, self.num_layers - 3)
