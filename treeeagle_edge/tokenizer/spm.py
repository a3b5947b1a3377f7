"""Sentencepiece's BPE with byte fallback as a `tokenizers` object, and reading it from a tokenizer.model."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from treeeagle_edge.errors import InputError

# Kinds of piece, numbered alike in sentencepiece_model.proto and in `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_BPE_MODEL = 2  # TrainerSpec.model_type
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


@dataclass(frozen=True)
class Pieces:
    """A scored vocabulary; entry i of each list belongs to id i."""

    tokens: Sequence[str]  # a space is written ▁
    scores: Sequence[float]  # the better of two merges scores higher
    kinds: Sequence[int]
    unknown_id: int = 0
    space_prefix: bool = True  # a space is put before a text


def spm_backend(pieces: Pieces, merges: Sequence[tuple[str, ...]] | None = None) -> Backend:
    """The tokenizer of `pieces`, in the form of Llama 2's tokenizer.json; None: merges by score.

    The space before a text is added to each stretch between special tokens, as sentencepiece did in training.
    Raises ValueError for merges that do not fit the vocabulary.
    """
    listed = merges_of(pieces.tokens, pieces.scores) if merges is None else merges
    options = {"unk_token": pieces.tokens[pieces.unknown_id], "fuse_unk": True, "byte_fallback": True}
    backend = Backend(bpe_model(pieces.tokens, listed, **options))
    replace = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = replace
        backend.decoder = decoders.Sequence(steps)
    return backend


def bpe_model(tokens: Sequence[str], merges: Sequence[tuple[str, ...]], **options: Any) -> BPE:
    """Byte-pair encoding over `tokens`. Raises ValueError where a merge's parts or result are no tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        return BPE(vocab=vocab, merges=cast("Any", merges), **options)  # it refuses what is no pair
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from error


def add_special(backend: Backend, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Make control tokens special; user-defined ones are matched whole in a text too, and decoded."""
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        added = [AddedToken(token, normalized=False, special=special) for token in found]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every cut of a token into two tokens, best score first.

    Of equal scores the longer left part is first, then the longer right part, as `transformers` orders them.
    """
    index_of = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, index in index_of.items():
        cuts = [
            (index_of[token[:at]], index_of[token[at:]], token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in index_of and token[at:] in index_of
        ]
        cuts.sort(key=lambda cut: cut[:2])
        found += [(scores[index], len(left), len(right), left, right) for _, _, left, right in cuts]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def read_spm_model(path: Path) -> Pieces | None:
    """The vocabulary of a tokenizer.model, which is a protocol buffer (sentencepiece_model.proto).

    None where it is not the kind that Llama-type models use: BPE without Unicode normalisation. Raises InputError
    for a file that is damaged or no tokenizer.model.
    """
    try:
        return _parse(path.read_bytes())
    except (IndexError, struct.error, ValueError) as error:
        raise InputError(f"{path} is damaged or no sentencepiece model", "download the file again") from error


def _parse(data: bytes) -> Pieces | None:
    tokens, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode("utf-8"))
            scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
            kinds.append(piece.get(3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if UNKNOWN not in kinds:
        raise ValueError("no unknown token")
    charsmap, dummy_prefix, squeeze_spaces = normalizer.get(2), normalizer.get(3, 1), normalizer.get(4, 1)
    if trainer.get(3) != _BPE_MODEL or charsmap or squeeze_spaces:
        return None
    return Pieces(tokens, scores, kinds, kinds.index(UNKNOWN), bool(dummy_prefix))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer message: an int for a varint, else the bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value: Any
            value, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64, _BYTES):
            size = {_FIXED32: 4, _FIXED64: 8}.get(wire)
            if size is None:
                size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise IndexError("field past the end")
        else:
            raise ValueError(f"wire type {wire}")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise ValueError("varint too long")
