"""Which model architectures run here, and the reason that the others are refused with."""

from __future__ import annotations

from treeeagle_edge.errors import InputError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiniCPMForCausalLM": "minicpm",
}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "minicpm": "minicpm"}

MOST_LAYERS, MOST_WIDTH = 10_000, 2**31 - 1  # beyond these a config is damaged; each layer is looked at
SUPPORTED_HINT = "use a Llama 2/3, Vicuna, Mistral, Qwen2/2.5, Qwen3, MiniCPM 1/2/4 or SmolLM2 model"

_RECURRENT = "a hybrid or recurrent model, whose state cannot go back to an earlier token"
_EXPERTS = "a mixture of experts"
_ENCODER_DECODER = "an encoder-decoder"
_LATENT = "a model with multi-head latent attention"
_VISION = "a multimodal model"
_ENCODER = "an encoder without a text decoder"

# Fragments of lower-case names without punctuation, the more telling ones first.
_REASONS = (
    ("minicpm3", _LATENT),
    ("qwen3next", _RECURRENT),
    ("qwen35", _RECURRENT),
    ("mamba", _RECURRENT),
    ("jamba", _RECURRENT),
    ("bamba", _RECURRENT),
    ("zamba", _RECURRENT),
    ("falconh1", _RECURRENT),
    ("rwkv", _RECURRENT),
    ("recurrentgemma", _RECURRENT),
    ("granitemoehybrid", _RECURRENT),
    ("granitehybrid", _RECURRENT),
    ("nemotronh", _RECURRENT),
    ("lfm2", _RECURRENT),
    ("plamo2", _RECURRENT),
    ("xlstm", _RECURRENT),
    ("kimilinear", _RECURRENT),
    ("moe", _EXPERTS),
    ("mixtral", _EXPERTS),
    ("deepseek", _EXPERTS),
    ("gptoss", _EXPERTS),
    ("llama4", _EXPERTS),
    ("dbrx", _EXPERTS),
    ("grok", _EXPERTS),
    ("minimax", _EXPERTS),
    ("arctic", _EXPERTS),
    ("t5", _ENCODER_DECODER),
    ("bart", _ENCODER_DECODER),
    ("pegasus", _ENCODER_DECODER),
    ("marian", _ENCODER_DECODER),
    ("whisper", _ENCODER_DECODER),
    ("m2m100", _ENCODER_DECODER),
    ("bert", _ENCODER),
    ("mllama", _VISION),
    ("llava", _VISION),
    ("vl", _VISION),
    ("conditionalgeneration", _VISION),
)


def unsupported(name: str, where: str) -> InputError:
    """The error to raise for the architecture `name` of the file `where`, which does not run here."""
    plain = "".join(character for character in name.lower() if character.isalnum())
    if "eagle" in plain:
        return InputError(
            f"{where} is a draft head ({name}), not a model to chat with",
            "give it with --head, and the model it was trained for with --model",
        )
    reason = next((why for fragment, why in _REASONS if fragment in plain), None)
    sentence = (
        f"{name} is {reason}, which is not supported"
        if reason
        else f"the architecture {name} is not supported"
    )
    return InputError(f"{sentence} ({where})", SUPPORTED_HINT)


def family_of(architecture: str, where: str) -> str:
    """The family that runs Hugging Face's `architecture` ("LlamaForCausalLM"). Raises InputError by name."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise unsupported(architecture, where)
    return family


def gguf_family_of(architecture: str, where: str) -> str:
    """The family that runs a GGUF `general.architecture` such as "llama". Raises InputError by name."""
    family = GGUF_FAMILIES.get(architecture)
    if family is not None:
        return family
    if architecture == "eagle3":
        raise InputError(
            f"{where} is a draft head (GGUF architecture eagle3), which is not read in this format",
            "use the head's original Hugging Face directory with --head",
        )
    raise unsupported(architecture, where)
