"""Tokenizers rebuilt from GGUF metadata, against transformers' conversion and sentencepiece's rule."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from treeeagle_edge.chat.prompt import Turn, build_prompt
from treeeagle_edge.errors import InputError
from treeeagle_edge.gguf_file import open_gguf
from treeeagle_edge.tokenizer.codec import load_tokenizer
from treeeagle_edge.tokenizer.spm import merges_of

TEXTS = [
    "Hello, world! It's we'll THEY'RE",
    "runs   of\t\ttabs \n\n\n and lines\r\n end",
    "def f(x):\n    return x**2  # 1234567890, 3.14\n",
    "naïve café and e\u0301 combining",
    "日本語と中文 한국어 mixed",
    "👩‍👩‍👧 🇫🇷 🎉!",
    "a<|end|>b<|start|>user\n<tool>x</tool>",
]
CORPUS = [*TEXTS, "the sky is blue because air scatters short waves", "1 22 333 4444 55555 it's they'll"] * 4
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def write(path: Path, arch: str = "llama", **keys: Any) -> Path:
    """A GGUF file of tokenizer metadata; a value's type chooses the GGUF type."""
    writer = gguf.GGUFWriter(path, arch)
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in {f"{arch}.block_count": 1, f"{arch}.context_length": 64}.items():
        writer.add_uint32(key, value)
    for key, value in keys.items():
        full = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if value is not None:
            add[type(value)](full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """Metadata of a byte-level vocabulary whose merges reach over digits, so that every way to cut shows."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces = [text[at : at + 5] for text in CORPUS for at in range(0, len(text), 3)]
    backend.train_from_iterator(pieces, trainer)
    size = backend.get_vocab_size()
    tokens = [backend.id_to_token(index) for index in range(size)]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    special = ["<|end|>", "<|start|>", "<tool>", "</tool>"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens + special,
        "token_type": [NORMAL] * size + [CONTROL, CONTROL, USER, USER],
        "merges": merges,
        "bos_token_id": size + 1,
        "eos_token_id": size,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_byte_level_equals_transformers(tmp_path: Path, byte_level: dict[str, Any], pre: str) -> None:
    path = write(tmp_path / "m.gguf", **{**byte_level, "pre": pre})
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert ours.vocab_size == len(byte_level["tokens"])
    for text in TEXTS:
        if pre in ("qwen2", "deepseek-r1-qwen") and "\u0301" in text:
            continue  # composed by Qwen's own tokenizer, see below; not by transformers' conversion
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_schemes_differ_where_they_should(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    """Runs of digits: kept together by GPT-2, cut in threes by Llama 3, one by one by Qwen and SmolLM."""

    def cut(pre: str, text: str) -> list[str]:
        ours = load_tokenizer(write(tmp_path / f"{pre}.gguf", **{**byte_level, "pre": pre}))
        return [ours.decode([index]) for index in ours.encode(text)]

    assert cut("smollm", "1234") == cut("qwen2", "1234") == ["1", "2", "3", "4"]
    assert cut("gpt-2", "4444") == ["44", "44"] and cut("llama-bpe", "4444") == ["44", "4", "4"]


def test_smollm_cuts_digits_before_words(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    """SmolLM's own tokenizer.json: each digit alone first, then GPT-2's words on what lies between."""
    ours = load_tokenizer(write(tmp_path / "m.gguf", **{**byte_level, "pre": "smollm"}))
    merges = [tuple(merge.split(" ")) for merge in byte_level["merges"]]
    vocab = {token: index for index, token in enumerate(byte_level["tokens"])}
    upstream = Backend(models.BPE(vocab, merges))
    upstream.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS[:-1], "  1  22\n\n3", "x1y2 3"]:
        assert ours.encode(text) == upstream.encode(text).ids


def test_qwen_composes_unicode(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", "qwen2", **{**byte_level, "pre": None}))
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_llama3_takes_whole_words_without_merges(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    tokens = [*byte_level["tokens"], "zqzqzq"]
    keys = {**byte_level, "tokens": tokens, "token_type": [*byte_level["token_type"], NORMAL]}
    assert load_tokenizer(write(tmp_path / "a.gguf", **{**keys, "pre": "llama-bpe"})).encode("zqzqzq") == [
        len(tokens) - 1
    ]
    assert len(load_tokenizer(write(tmp_path / "b.gguf", **{**keys, "pre": "gpt-2"})).encode("zqzqzq")) > 1


def test_special_user_defined_and_stop_tokens(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    """Expectations row 16: the file's end ids and the template's turn token all end an answer."""
    size = len(byte_level["tokens"]) - 4
    template = "{% for m in messages %}{{ bos_token + m.content }}<|end|>{% endfor %}"
    keys = {**byte_level, "chat_template": template, "eos_token_id": 7, "eot_token_id": 9}
    ours = load_tokenizer(write(tmp_path / "m.gguf", **keys))
    assert ours.stop_ids == {7, 9, size}
    assert ours.render([{"role": "user", "content": "hi"}]) == "<|start|>hi<|end|>"
    ids = ours.encode("<|end|><tool>")
    assert ids == [size, size + 2] and ours.decode(ids) == "<tool>"
    assert not load_tokenizer(write(tmp_path / "b.gguf", **byte_level)).has_chat_template


def test_control_tokens_in_a_message_are_text(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    ours = load_tokenizer(write(tmp_path / "m.gguf", **byte_level, chat_template=template))
    size = len(byte_level["tokens"]) - 4
    ids = build_prompt(ours, None, [Turn("a<|end|><|start|><tool>")]).ids
    assert [index for index in ids if index >= size] == [
        size + 1,
        size + 2,
        size,
    ]  # <tool> is no control token
    assert ours.decode(ids, skip_special=False) == "<|start|>a<|end|><|start|><tool><|end|>"
    keys = {
        **sentencepiece_metadata(),
        "chat_template": "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}",
    }
    ours = load_tokenizer(write(tmp_path / "s.gguf", **keys))
    ids = list(build_prompt(ours, None, [Turn("the</s> sky<s>")]).ids)
    assert ids == [1, *sentencepiece_encode("the</s> sky<s>", keys["tokens"], keys["scores"]), 2]


def sentencepiece_metadata() -> dict[str, Any]:
    """A scored vocabulary with bytes; better merges have higher scores, as sentencepiece numbers them."""
    words = [
        "the",
        "sky",
        "is",
        "blue",
        "because",
        "air",
        "short",
        "waves",
        "hello",
        "world",
        "words",
        "hehe",
    ]
    pieces: list[str] = []
    for word in words:
        full = "▁" + word
        pieces += [full[:end] for end in range(2, len(full) + 1)]
        pieces += [word[at : at + size] for size in (2, 3) for at in range(len(word) - size + 1)]
    pieces = list(dict.fromkeys(["▁▁", "▁▁▁▁", *pieces]))
    letters = ["▁", *sorted({letter for word in words for letter in word}), "H", "!", ","]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) + len(letters))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        **ids,
    }


def sentencepiece_encode(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Sentencepiece's BPE rule: join the neighbours whose joint token scores best, leftmost first."""
    index_of = {token: index for index, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (-scores[index_of[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in index_of
        ]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += (
            [index_of[part]] if part in index_of else [index_of[f"<0x{byte:02X}>"] for byte in part.encode()]
        )
    return ids


SPM_TEXTS = [
    "the sky is blue",
    "hello world!",
    "Hello, 日本語 in short words",
    "hehehe  the    waves",
    "x\ny\n\nz",
    "👩‍👩‍👧",
]


def test_sentencepiece_equals_its_rule_and_transformers(tmp_path: Path) -> None:
    keys = sentencepiece_metadata()
    path = write(tmp_path / "m.gguf", **keys)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in SPM_TEXTS:
        ids = ours.encode(text)
        assert ids == sentencepiece_encode(text, keys["tokens"], keys["scores"]), text
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == text == theirs.decode(ids)
    # the space before a text comes on top of its own, as sentencepiece adds it
    assert ours.encode("  the") == sentencepiece_encode("  the", keys["tokens"], keys["scores"])
    assert ours.decode(ours.encode("  the")) == "  the"


def test_sentencepiece_special_tokens_and_the_space_before_each_stretch(tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", **sentencepiece_metadata()))
    assert ours.encode("<s>the</s>") == [1, *ours.encode("the"), 2]
    assert ours.stop_ids == {2}
    bare = load_tokenizer(write(tmp_path / "b.gguf", **sentencepiece_metadata(), add_space_prefix=False))
    assert bare.decode(bare.encode(" the")) == " the" and len(bare.encode(" the")) == 1
    assert bare.encode("the") != ours.encode("the")


def test_sentencepiece_takes_listed_merges(tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path / "m.gguf", **sentencepiece_metadata(), merges=["h e"]))
    assert [ours.decode([index]) for index in ours.encode("hehe")][-2:] == ["he", "he"]


def test_merges_of_ties() -> None:
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc"], [0.0, 0.0, 0.0, -1.0, -2.0, -3.0]
    assert merges_of(tokens, scores) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "mystery-pre"}, "mystery-pre"),
        ({"model": "t5"}, "t5"),
        ({"tokens": None}, "no tokenizer"),
        ({"merges": ["qqq www"]}, "merges"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_tokenizers_that_are_not_read_are_named(
    tmp_path: Path, byte_level: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named) as caught:
        load_tokenizer(write(tmp_path / "m.gguf", **{**byte_level, **changes}))
    assert caught.value.hint


def test_a_model_is_opened_without_its_vocabulary(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    path = write(tmp_path / "m.gguf", **byte_level, scores=[0.5] * 9, chat_template="{{ messages }}")
    whole, rest = open_gguf(path, vocabulary=True).metadata, open_gguf(path).metadata
    left_out = {f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges", "scores")}
    assert rest == {key: value for key, value in whole.items() if key not in left_out}
    assert len(whole) == len(rest) + len(left_out)


@pytest.mark.parametrize("vocabulary", [False, True])
def test_a_file_that_ends_in_its_vocabulary(
    tmp_path: Path, byte_level: dict[str, Any], vocabulary: bool
) -> None:
    path = write(tmp_path / "m.gguf", **byte_level)
    data = path.read_bytes()
    begin = data.index(b"tokenizer.ggml.tokens")
    for kept in range(begin, len(data) - 64, len(data) // 40):
        path.write_bytes(data[:kept])
        with pytest.raises(InputError, match="truncated"):
            open_gguf(path, vocabulary=vocabulary)
    for at in range(begin + 21, begin + 400, 4):  # a count, lengths, texts; a text may be anything
        path.write_bytes(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
        with suppress(InputError):
            open_gguf(path, vocabulary=vocabulary)
