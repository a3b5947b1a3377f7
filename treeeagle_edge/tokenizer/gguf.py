"""The tokenizer inside a GGUF file, rebuilt from its metadata with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from treeeagle_edge.config.generation_defaults import gguf_generation_defaults
from treeeagle_edge.errors import InputError
from treeeagle_edge.gguf_file import open_gguf
from treeeagle_edge.tokenizer.codec import Tokenizer
from treeeagle_edge.tokenizer.spm import Pieces, add_special, bpe_model, spm_backend

_ANOTHER = "take another GGUF file of the model"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# How byte-level vocabularies cut text before merging, and the values of `tokenizer.ggml.pre` for each scheme.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCHEMES = {
    "gpt2": ("gpt-2", "default"),
    "digits": ("smollm", "starcoder", "refact", "command-r"),  # each digit alone, then as GPT-2
    "llama3": ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"),
    "tekken": ("tekken",),
}
_SCHEME_OF = {name: scheme for scheme, names in _SCHEMES.items() for name in names}
_SPLITS = {"llama3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Raises InputError for a file without a tokenizer, and by name for a kind that is not read."""
    metadata = open_gguf(path, vocabulary=True).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise InputError(f"{path} holds no tokenizer", "take a GGUF file converted with its tokenizer")
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise InputError(
            f"{path} has a tokenizer of kind {model}, which is not read",
            "use the model's original Hugging Face directory",
        )
    try:
        backend = builders[model](metadata, path)
    except (ValueError, IndexError) as error:
        raise InputError(f"{path} has merges that do not fit its vocabulary", _ANOTHER) from error
    add_special(backend, tokens, metadata.get("tokenizer.ggml.token_type") or ())
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _NAMED.items()}
    special_tokens = {
        name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)
    }
    return Tokenizer(
        backend,
        template=metadata.get("tokenizer.chat_template"),
        special_tokens=special_tokens,
        stop_ids=gguf_generation_defaults(metadata).stop_ids,
    )


def _byte_level(metadata: Mapping[str, Any], path: Path) -> Backend:
    """GPT-2's byte-level BPE, cut as the model's own tokenizer cuts."""
    default = "qwen2" if str(metadata.get("general.architecture")).startswith("qwen") else "default"
    pre = metadata.get("tokenizer.ggml.pre", default)
    scheme = _SCHEME_OF.get(pre)
    if scheme is None:
        raise InputError(
            f"{path} cuts text by the rules {pre}, which are not known here",
            "use the model's original Hugging Face directory",
        )
    # Llama 3 and Tekken take a word that is in the vocabulary as it is, whether merges lead to it or not.
    tokens, merges = metadata["tokenizer.ggml.tokens"], _listed_merges(metadata)
    backend = Backend(bpe_model(tokens, merges, ignore_merges=scheme in ("llama3", "tekken")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=scheme in ("gpt2", "digits"))
    if scheme in _SPLITS:
        cut = pre_tokenizers.Split(Regex(_SPLITS[scheme]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    elif scheme == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    else:
        backend.pre_tokenizer = byte_level
    if scheme == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> Backend:
    """Sentencepiece's BPE, whose merges are in the scores unless the file lists them."""
    scores = metadata.get("tokenizer.ggml.scores")
    tokens = metadata["tokenizer.ggml.tokens"]
    if not scores or len(scores) != len(tokens):
        raise InputError(f"{path} has no scores for its vocabulary", _ANOTHER)
    pieces = Pieces(
        tokens,
        scores,
        kinds=metadata.get("tokenizer.ggml.token_type") or (),
        unknown_id=int(metadata.get("tokenizer.ggml.unknown_token_id", 0)),
        space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )
    listed = _listed_merges(metadata)
    return spm_backend(pieces, listed or None)


def _listed_merges(metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The pairs that the file lists. Their parts are tokens, so the vocabulary's own strings stand for them."""
    token_of = {token: token for token in metadata["tokenizer.ggml.tokens"]}
    cuts = (merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", ()))
    return [tuple(token_of.get(part, part) for part in parts) for parts in cuts]
