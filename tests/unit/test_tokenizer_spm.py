"""tokenizer.model, the protocol buffer of sentencepiece: read by ourselves, as its directories hold nothing else."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from treeeagle_edge.errors import InputError
from treeeagle_edge.tokenizer.codec import load_tokenizer
from treeeagle_edge.tokenizer.spm import read_spm_model


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """A protocol buffer message of (field number, value), in which a length fits two bytes."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += bytes([number << 3 | 2, len(value) & 0x7F | 0x80, len(value) >> 7]) + value
        elif isinstance(value, float):
            out += bytes([number << 3 | 5]) + struct.pack("<f", value)
        else:
            out += bytes([number << 3, value])
    return out


def write_spm(path: Path, *, model_type: int = 2, squeeze: int = 0) -> list[str]:
    """A tokenizer.model as sentencepiece_model.proto defines it; gives its tokens."""
    merged = ["▁t", "▁th", "▁the", "ll", "ello", "lo", "He", "Hello", "he"]
    letters = ["▁", *"theloHw,!"]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<mask>": 4}
    tokens = [*kinds, *(f"<0x{value:02X}>" for value in range(256)), *merged, *letters]
    kinds |= {token: 6 for token in tokens if token.startswith("<0x")}
    pieces = [
        message((1, token.encode()), (2, -float(rank)), (3, kinds.get(token, 1)))
        for rank, token in enumerate(tokens)
    ]
    trainer, normalizer = message((3, model_type)), message((1, b"identity"), (3, 1), (4, squeeze))
    path.write_bytes(message(*((1, piece) for piece in pieces), (2, trainer), (3, normalizer)))
    return tokens


def test_vicuna_style_directories_hold_only_a_sentencepiece_model(tmp_path: Path) -> None:
    tokens = write_spm(tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": len(tokens)}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    ours = load_tokenizer(tmp_path)

    def pieces(text: str) -> list[str]:
        return [(*tokens, "<pad>")[index] for index in ours.encode(text)]

    # "ll" ranks before "ello", so it is joined first
    assert pieces("the Hello") == ["▁the", "▁", "He", "ll", "o"]
    assert pieces("  the") == ["▁", "▁", "▁the"]
    assert pieces("é</s>") == ["▁", "<0xC3>", "<0xA9>", "</s>"]
    assert pieces("<mask><pad>the") == ["<mask>", "<pad>", "▁the"]
    assert ours.decode(ours.encode("  the é Hello")) == "  the é Hello"
    assert ours.stop_ids == {2}


SENTENCES = ["Hello, world!", "why 日本語 blue 👩‍👩‍👧 ok", "  two  spaces"]


def test_an_original_sentencepiece_model_gives_its_ids(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [*SENTENCES, "the sky is blue, 0123456789", "日本語 words"] * 20
    (tmp_path / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=3,
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = load_tokenizer(tmp_path)
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in SENTENCES:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.stop_ids == {2}


@pytest.mark.parametrize("damaged", [b"not a model", b"", b"\x0a\xff", b"\x80" * 20, b"\x0a\x05\x0d\x00"])
def test_a_damaged_model_is_named(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(damaged)
    with pytest.raises(InputError, match="damaged") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint


def test_other_kinds_are_left_to_transformers(tmp_path: Path) -> None:
    """Unigram models, and those that change the text before cutting it, have rules of their own."""
    path = tmp_path / "tokenizer.model"
    write_spm(path)
    assert read_spm_model(path) is not None
    write_spm(path, model_type=1)
    assert read_spm_model(path) is None
    write_spm(path, squeeze=1)
    assert read_spm_model(path) is None
