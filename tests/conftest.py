"""What several test files share: the demo model, a tiny checkpoint, and a home folder that is nobody's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches a hub; read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Other tests run beside this process: a thread without work must not keep a core from them by waiting awake.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPOSITORY = Path(__file__).resolve().parent.parent
# `python -m pytest` puts the working folder on the path; transformers would take our `kernels` for a package it knows
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != REPOSITORY]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a process for each core that has 3 GB of memory, four at most; only one beside a card."""
    from treeeagle_edge.hardware.detection import detect

    here = detect()
    return max(1, min(here.cpu.cores, here.ram.available // 3_000_000_000, 4)) if here.gpu is None else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip where there is no CUDA device; torch is only imported when there is such a test."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models whose matrices have 32 columns: threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nobodys_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and configuration of each test lie in a folder of its own; the cache stays, it holds the demo model."""
    home = tmp_path_factory.mktemp("xdg")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file, fetched by the package's own code where it is missing. Torch gets two threads."""
    import torch

    from treeeagle_edge.sources.demo_model import fetch_demo_model

    torch.set_num_threads(2)
    return fetch_demo_model()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Evaluation data that lies beside the repository; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TREEEAGLE_SHARED", REPOSITORY.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"no evaluation data at {folder}")
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TINY_TEXT = [
    "The sky is blue because air scatters short waves of light more than long ones.",
    "Write a function that adds two numbers and returns the sum of them.",
    "one two three four five six seven eight nine ten",
]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte-level tokenizer and a chat template, as a Hugging Face directory.

    hidden 64, 4 query and 2 KV heads of 16, tied embeddings, fp32. End tokens: id 0 in the tokenizer, ids 0 and 2 in
    generation_config.json (`<|endoftext|>` and `<|im_end|>`).
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet)
    raw.train_from_iterator(TINY_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=specials[0], bos_token=specials[1])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=0,
    )
    generator_state = torch.get_rng_state()
    torch.manual_seed(20)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    torch.set_rng_state(generator_state)
    ends = {"bos_token_id": 1, "eos_token_id": [0, 2], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    return folder
