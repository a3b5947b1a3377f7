"""The demo model's GGUF file: tensors, tokenizer and chat template as transformers reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from treeeagle_edge.checkpoint.gguf import GGUFCheckpoint, canonical_name
from treeeagle_edge.tokenizer.codec import Tokenizer, load_tokenizer

TEXTS = [
    "Why is the sky blue?",
    " leading space, trailing space ",
    'for i in range(10):\n\tif i % 2 == 0:\n\t\tprint(f"{i:>4}")  # 3.14159\n',
    "In 2024, 1,234,567 people paid $99.99 (about 12%).",
    "runs   of      spaces\n\n\n\nand\r\nlines\t\t\ttabs",
    "It's what they'll say: \"we've DON'T\" — naïve café … e\u0301",
    "日本語のテキストと中文，混在。한국어도",
    "👩‍👩‍👧‍👦 🇫🇷 🎉🎉 ❤️",
    "Привет, мир! שלום עולם مرحبا",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|",
    "a" * 300,
    "",
]


@pytest.fixture(scope="module")
def ours(demo_gguf: Path) -> Tokenizer:
    return load_tokenizer(demo_gguf)


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)


def test_ids_and_text_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs) == 49_152
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_ids_of_the_evaluation_prompts(ours: Tokenizer, theirs: Any, shared_data: Path) -> None:
    lines = [
        line
        for file in sorted((shared_data / "questions").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    texts = [turn for line in lines for turn in json.loads(line)["turns"]]
    assert len(texts) > 10
    differing = [text for text in texts if ours.encode(text) != theirs.encode(text, add_special_tokens=False)]
    # A run of spaces before a digit is one token to SmolLM's own tokenizer; transformers' conversion cuts it.
    assert all("  " in text for text in differing) and len(differing) < len(texts) / 10


def test_rendered_prompts_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    """Expectations row 33: the tokenizer's own chat template, exactly, the default system prompt included."""
    user = {"role": "user", "content": "Why is the sky blue? <&>  \n"}
    answer = {"role": "assistant", "content": "Because of scattering."}
    system = {"role": "system", "content": "Be brief."}
    for messages in ([user], [system, user], [user, answer, user], [system, user, answer]):
        for generate in (True, False):
            rendered = ours.render(messages, add_generation_prompt=generate)
            assert rendered == theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate
            )
    assert "You are a helpful AI assistant named SmolLM" in ours.render([user])


def test_stop_ids(ours: Tokenizer) -> None:
    """Expectations row 16: answers of the demo model end at <|im_end|>, its turn token."""
    assert ours.stop_ids == {2} and ours.decode([2], skip_special=False) == "<|im_end|>"


@pytest.mark.slow
def test_every_tensor_equals_transformers(demo_gguf: Path, transformers_demo: Any) -> None:
    state = dict(transformers_demo.named_parameters())
    checkpoint = GGUFCheckpoint(demo_gguf)
    assert checkpoint.names() == state.keys()
    for name, value in state.items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, value.detach()), name
    config, theirs = checkpoint.config, transformers_demo.config
    assert (
        config.rope.theta == theirs.rope_parameters["rope_theta"]
        and config.rms_norm_eps == theirs.rms_norm_eps
    )
    assert config.max_position == theirs.max_position_embeddings and config.tie_word_embeddings


def test_tensors_and_raw_blocks_equal_the_gguf_package(demo_gguf: Path) -> None:
    """Every block is where the package's reader finds it; Q and K have a head's even rows before its odd."""
    checkpoint = GGUFCheckpoint(demo_gguf)
    heads = {"attn_q": checkpoint.config.num_heads, "attn_k": checkpoint.config.num_kv_heads}
    seen = set()
    for stored in gguf.GGUFReader(demo_gguf).tensors:
        name, rows = canonical_name(stored.name), np.asarray(stored.data)
        kind = stored.name.split(".")[-2]
        if kind in heads:
            rows = np.concatenate([part[half::2] for part in np.split(rows, heads[kind]) for half in (0, 1)])
        raw = checkpoint.raw(name)
        assert (raw is None) == (rows.ndim == 1)
        if raw is not None:
            assert raw[0] == stored.tensor_type.name and np.array_equal(raw[1], rows), name
        if kind not in seen:  # one of each kind: dequantising all takes long
            assert np.array_equal(gguf.dequantize(rows, stored.tensor_type), checkpoint.tensor(name)), name
        seen.add(kind)
    assert len(seen) == 11


def test_loading_costs_little(demo_gguf: Path) -> None:
    """Processor time, which other programs on the machine do not stretch as they stretch the clock."""
    program = (
        "import sys, time, pathlib, {imports}\n"
        "path, start = pathlib.Path(sys.argv[1]), {start}\n"
        "{work}\n"
        "print(time.process_time() - start)"
    )

    def cost(imports: str, start: str, work: str) -> float:
        text = program.format(imports=imports, start=start, work=work)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", text, str(demo_gguf)]
        return float(
            subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        )

    tokenizer = cost(
        "os", "0", "from treeeagle_edge.tokenizer.codec import load_tokenizer; load_tokenizer(path)"
    )
    assert tokenizer < 1.0  # measured 0.35 s, imports included
    opener = "treeeagle_edge.checkpoint.gguf"
    read = f"opened = {opener}.GGUFCheckpoint(path)\nfor name in opened.names(): opened.tensor(name)"
    assert cost(opener, "time.process_time()", read) < 2.5  # measured 0.8 s
