"""Reads an EAGLE-3 head (arXiv 2503.01840) in either layout of `head_layouts`, and checks it against its target.

The shapes of its tensors decide what it is. A config that says something else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.head_files import locate_head, read_head_json, read_head_tensors
from treeeagle_edge.checkpoint.head_layouts import NO_HEAD_HINT, REQUIRED, CanonicalHead, canonical_head
from treeeagle_edge.config.rope import rope_from_config
from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig

_SAME_EMBEDDING = 0.999  # mean cosine: the same numbers but for rounding
_RANDOM_EMBEDDING = 0.1  # mean cosine: no direction in common with the target's


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head's tensors by canonical name, checked against its target."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]  # without d2t and embed_tokens; dtypes as stored
    target_ids: Tensor  # [Vd] int64, target id of each draft id
    embedding: Tensor | None  # [V, H] where the head keeps its own, None where the target's serves
    notes: tuple[str, ...]


def open_head(
    path: Path, target: ModelConfig, target_embed: Callable[[Tensor], Tensor] | None = None
) -> HeadCheckpoint:
    """Load and check the head in folder `path` (or the weight file itself) for `target`.

    `target_embed` maps [M] ids to the target's [M, Ht] embeddings, so that a head's embedding that repeats
    them is shared. Raises InputError, naming the key and both numbers, when the file is damaged, not an
    EAGLE-3 head that runs here, or made for another target.
    """
    folder, weights = locate_head(path)
    declared = read_head_json(folder / "config.json")
    stored = read_head_tensors(weights)
    try:
        head = canonical_head(stored, declared, target, weights)
        config = _derive_config(head, target, weights)
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InputError(
            f"the config or the tensors of the head in {folder} are of the wrong kind: {reason_of(error)}",
            "fetch the head again",
        ) from error
    tensors = head.tensors
    _cross_check(config, head.declared, folder)
    target_ids, notes = _draft_to_target(tensors.get("d2t"), config)
    notes = (*head.notes, *notes)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and target_embed is not None and embedding.shape[1] == target.hidden_size:
        likeness = _likeness(embedding, target_embed)
        if likeness > _SAME_EMBEDDING:
            embedding = None
        elif likeness < _RANDOM_EMBEDDING:
            notes = (*notes, "the head's own embed_tokens looks random; expect low acceptance")
    if embedding is None and config.hidden_size != target.hidden_size:
        raise InputError(
            f"the head is {config.hidden_size} wide, the target {target.hidden_size}, and it brings no embed_tokens",
            NO_HEAD_HINT,
        )
    config = replace(config, own_embedding=embedding is not None)
    kept = {name: tensors[name] for name in REQUIRED}
    return HeadCheckpoint(config, kept, target_ids, embedding, notes)


def read_head_config(path: Path, target: ModelConfig) -> HeadConfig:
    """Shapes only, for the memory plan. Same errors as `open_head`."""
    return open_head(path, target).config


def _derive_config(head: CanonicalHead, target: ModelConfig, weights: Path) -> HeadConfig:
    tensors, declared = head.tensors, head.declared
    hidden = tensors["norm.weight"].shape[0]
    fc_in = tensors["fc.weight"].shape[1]
    q_rows = tensors["layers.0.self_attn.q_proj.weight"].shape[0]
    k_rows = tensors["layers.0.self_attn.k_proj.weight"].shape[0]
    intermediate = tensors["layers.0.mlp.gate_proj.weight"].shape[0]
    draft_vocab = tensors["lm_head.weight"].shape[0]
    embedding = tensors.get("embed_tokens.weight")
    heads, head_dim = _heads(declared, q_rows, k_rows)
    shapes = {
        "fc.weight": (hidden, fc_in),
        "layers.0.self_attn.q_proj.weight": (q_rows, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (k_rows, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (k_rows, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, q_rows),
        "layers.0.mlp.gate_proj.weight": (intermediate, hidden),
        "layers.0.mlp.up_proj.weight": (intermediate, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, intermediate),
        "lm_head.weight": (draft_vocab, hidden),
        **{
            f"layers.0.{n}.weight": (hidden,)
            for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise InputError(
                f"{name} in {weights} has shape {tuple(tensors[name].shape)}, expected {shape}",
                "fetch the head again",
            )
    if fc_in % target.hidden_size:
        raise InputError(
            f"fc.weight takes {fc_in} features, no multiple of the target's hidden size {target.hidden_size}",
            f"this head was trained for another model; {NO_HEAD_HINT}",
        )
    num_taps = fc_in // target.hidden_size
    _check_taps(head.taps, num_taps, target)
    vocab = embedding.shape[0] if embedding is not None else target.vocab_size
    if vocab != target.vocab_size:
        raise InputError(
            f"embed_tokens.weight has {vocab} rows, the target's vocabulary {target.vocab_size}",
            f"this head was trained for another model; {NO_HEAD_HINT}",
        )
    longest = int(declared.get("max_position_embeddings") or target.max_position)
    rope = rope_from_config(declared, longest, weights.parent)  # its own: a head never inherits the target's
    return HeadConfig(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        num_taps=num_taps,
        taps=head.taps,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=float(declared.get("rms_norm_eps", 1e-6)),
        rope_theta=rope.theta,
        own_embedding=embedding is not None,
        scaled_rope=None if rope.kind == "default" else rope,
        norm_before_residual=bool(declared.get("norm_before_residual")),
        norm_output=bool(declared.get("norm_output")),
    )


def _heads(declared: Mapping[str, Any], q_rows: int, k_rows: int) -> tuple[int, int]:
    """(query heads, head_dim): shapes give only products, so one of the two must be declared."""
    heads = declared.get("num_attention_heads")
    head_dim = declared.get("head_dim") or (q_rows // heads if isinstance(heads, int) and heads > 0 else None)
    if not isinstance(head_dim, int) or head_dim < 1 or q_rows % head_dim or k_rows % head_dim:
        raise InputError(
            f"num_attention_heads {heads} and head_dim {declared.get('head_dim')} do not fit"
            f" q_proj with {q_rows} rows and k_proj with {k_rows}",
            "the head's config.json is missing or belongs to another head",
        )
    return q_rows // head_dim, head_dim


def _check_taps(taps: tuple[int, ...], num_taps: int, target: ModelConfig) -> None:
    if len(taps) != num_taps:
        raise InputError(
            f"fc.weight takes {num_taps} features, but {len(taps)} tapped layers are declared", NO_HEAD_HINT
        )
    if not all(0 <= tap < target.num_layers for tap in taps):
        raise InputError(f"the head taps layers {taps}, but the target has {target.num_layers}", NO_HEAD_HINT)


def _cross_check(config: HeadConfig, declared: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError where the config contradicts the tensors.

    num_hidden_layers is not looked at: exporters copy the target's.
    """
    for key, actual in (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_attention_heads", config.num_heads),
        ("num_key_value_heads", config.num_kv_heads),
        ("draft_vocab_size", config.draft_vocab_size),
        ("target_hidden_size", config.target_hidden_size),
        ("vocab_size", config.vocab_size),
    ):
        value = declared.get(key)
        if value is not None and value != actual:
            raise InputError(
                f"the head's config says {key} {value}, its tensors and the target say {actual}",
                f"check {folder / 'config.json'}: it belongs to another head or target",
            )


def _draft_to_target(d2t: Tensor | None, config: HeadConfig) -> tuple[Tensor, tuple[str, ...]]:
    """[Vd] target ids from the offsets d2t (target = draft + d2t[draft]), or from an absolute map."""
    draft_vocab, vocab = config.draft_vocab_size, config.vocab_size
    draft_ids = torch.arange(draft_vocab)
    if d2t is None:
        if draft_vocab != vocab:
            raise InputError(
                f"the head has no d2t, but its {draft_vocab} draft ids are not the {vocab} of the target",
                NO_HEAD_HINT,
            )
        return draft_ids, ()
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.shape != (draft_vocab,):
        raise InputError(
            f"d2t is {d2t.dtype} of shape {tuple(d2t.shape)}, expected integers of shape ({draft_vocab},)",
            NO_HEAD_HINT,
        )
    d2t = d2t.long()
    if draft_vocab < vocab and not d2t.any():
        raise InputError(
            f"d2t is all zero although the draft vocabulary {draft_vocab} is smaller than {vocab}",
            NO_HEAD_HINT,
        )
    offsets = draft_ids + d2t
    if _valid_ids(offsets, vocab):
        return offsets, ()
    if _valid_ids(d2t, vocab):
        return d2t, ("the head's d2t holds absolute ids instead of offsets; read as such",)
    raise InputError(
        "d2t maps draft ids outside the target's vocabulary or to the same id twice", NO_HEAD_HINT
    )


def _valid_ids(ids: Tensor, vocab: int) -> bool:
    """Strictly increasing, hence unique, and inside the vocabulary."""
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab


def _likeness(embedding: Tensor, target_embed: Callable[[Tensor], Tensor]) -> float:
    """Mean cosine similarity of a sample of rows: 1 for a copy, whatever its precision; 0 for untrained numbers."""
    rows = torch.linspace(0, embedding.shape[0] - 1, min(embedding.shape[0], 512)).long()
    theirs = target_embed(rows).float().cpu()
    return float(torch.nn.functional.cosine_similarity(embedding[rows].float(), theirs, dim=-1).mean())
