"""Tokenizers of Hugging Face directories: ids, text and templates as in transformers, stop ids, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from treeeagle_edge.config.generation_defaults import GenerationDefaults, read_generation_defaults
from treeeagle_edge.errors import InputError
from treeeagle_edge.tokenizer.codec import load_tokenizer

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "runs   of\t\ttabs \n\n\n and lines\r\n",
    "def f(x):\n    return x**2  # 1234567890\n",
    "naïve café, e\u0301 combining",
    "日本語と中文 한국어",
    "👩‍👩‍👧 🇫🇷 🎉!",
    "a<|im_end|>b<|im_start|>user\n",
    "</s> [INST] hi [/INST] <s>",
]
CHAT = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "why is the sky blue?  \n"},
    {"role": "assistant", "content": " Because. 日本語"},
    {"role": "user", "content": "and\nred?"},
]
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant take part') }}{% endif %}{% endfor %}"
)
WITH_EVERYTHING = (
    "{%- set ns = namespace(found=false) %}"
    "{%- for m in messages %}{%- if loop.index0 > 2 %}{% break %}{% endif %}"
    "{%- set ns.found = true %}{{ m | tojson }}\n{{ m.content | trim | upper }}{%- endfor %}\n"
    "{{ strftime_now('%Y') | length }} {{ ns.found }} {{ tools is none }} {{ documents }} {{ missing }}\n"
    "{{ unk_token }}"
    "{% if not tools %}   none\n{% endif %}   {{ messages[0].content | tojson(indent=2) }}"
)


def byte_level() -> Backend:
    """GPT-2's kind, special tokens included."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def llama2_like() -> Backend:
    """Llama 2's kind: spaces as a letter, bytes for what the vocabulary lacks."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    letters = ["▁", *sorted(set("Hello, world! why is the sky blue? leading and trailing 0123456789"))]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "l"), ("H", "e"), ("He", "ll"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *letters, *("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(path: Path, kind: str, template: Any = None, **settings: Any) -> Path:
    """A directory as `transformers` writes it; a list of templates is written the older way."""
    backend = byte_level() if kind == "byte-level" else llama2_like()
    names = (
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>") if kind == "byte-level" else ("<s>", "</s>", "<unk>")
    )
    tokens = dict(zip(("bos_token", "eos_token", "unk_token"), names, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **{**tokens, **settings})
    if isinstance(template, str):
        fast.chat_template = template
    fast.save_pretrained(path)
    if isinstance(template, list):
        edit(path / "tokenizer_config.json", chat_template=template)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


@pytest.mark.parametrize("kind", ["byte-level", "llama-2"])
def test_ids_and_text_equal_transformers(tmp_path: Path, kind: str) -> None:
    ours = load_tokenizer(save(tmp_path, kind))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
    if kind == "byte-level":
        assert ours.encode("<|im_end|>") == [2] and ours.decode([2]) == ""
        assert ours.decode([2], skip_special=False) == "<|im_end|>"
    else:
        assert ours.encode("</s>") == [2]


@pytest.mark.parametrize("kind", ["byte-level", "llama-2"])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, WITH_EVERYTHING])
@pytest.mark.parametrize("generate", [True, False])
def test_rendered_prompts_equal_transformers(
    tmp_path: Path, kind: str, template: str, generate: bool
) -> None:
    """Expectations row 33: acceptance falls when the prompt drifts; the tokenizer's own template, exactly."""
    ours = load_tokenizer(save(tmp_path, kind, template))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.has_chat_template
    for messages in (CHAT, CHAT[1:], CHAT[1:2]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        rendered = ours.render(messages, add_generation_prompt=generate)
        assert rendered == expected
        assert ours.encode(rendered) == theirs.encode(expected, add_special_tokens=False)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]
    ours = load_tokenizer(save(tmp_path, "byte-level", named))
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(CHAT, tokenize=False)
    assert ours.render(CHAT, add_generation_prompt=False) == expected
    edit(tmp_path / "tokenizer_config.json", chat_template=[*named[:1], {"name": "rag", "template": "x"}])
    assert not load_tokenizer(tmp_path).has_chat_template


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    save(tmp_path, "byte-level", CHATML)
    edit(tmp_path / "tokenizer_config.json", chat_template="old")
    assert (tmp_path / "chat_template.jinja").is_file()
    assert load_tokenizer(tmp_path).render(CHAT).startswith("<|im_start|>system")


def test_no_template(tmp_path: Path) -> None:
    ours = load_tokenizer(save(tmp_path, "byte-level"))
    assert not ours.has_chat_template
    with pytest.raises(InputError, match="no chat template") as caught:
        ours.render(CHAT)
    assert "--raw" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate.') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "chat template"),
        ("{{ 1 + messages }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{% for i in range(10**9) %}x{% endfor %}", "range too big"),
        ("{{ 1 // 0 }}", "chat template"),
    ],
)
def test_a_template_that_refuses(tmp_path: Path, template: str, said: str) -> None:
    ours = load_tokenizer(save(tmp_path, "byte-level", template))
    with pytest.raises(InputError, match=said) as caught:
        ours.render(CHAT)
    assert "--raw" in str(caught.value.hint)


def test_a_broken_template(tmp_path: Path) -> None:
    save(tmp_path, "byte-level", CHATML)
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(InputError, match="line 2"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("value", [{"temperature": "hot"}, {"temperature": 99}, {"top_p": 7}, {"top_k": []}])
def test_sampling_that_cannot_be_is_refused_by_the_file_that_asks_for_it(tmp_path: Path, value) -> None:
    """The person gave no such option, and would look for it in vain."""
    (tmp_path / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(
        InputError, match=r"generation_config\.json asks for sampling that cannot be"
    ) as caught:
        read_generation_defaults(tmp_path, {})
    assert caught.value.hint
    (tmp_path / "generation_config.json").write_text(json.dumps({**value, "do_sample": False}))
    assert read_generation_defaults(tmp_path, {}) == GenerationDefaults()


def test_a_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": -1}')
    assert read_generation_defaults(tmp_path, {}) == GenerationDefaults(temperature=0.6, top_k=0)


def test_llama3_stops_at_its_turn_token(tmp_path: Path) -> None:
    """Expectations row 16: Llama 3's end of turn is named in generation_config.json only; answers stop there.

    Stop set = generation_config + tokenizer + the template's turn token.
    """
    backend = byte_level()
    backend.add_special_tokens(["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end_of_text|>")
    fast.save_pretrained(tmp_path)
    end_of_text, eot, eom = fast.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"])
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end_of_text}))
    assert load_tokenizer(tmp_path).stop_ids == {end_of_text}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end_of_text, eom, eot]}))
    assert load_tokenizer(tmp_path).stop_ids == {end_of_text, eom, eot}
    (tmp_path / "generation_config.json").unlink()
    template = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    edit(tmp_path / "tokenizer_config.json", chat_template=template)
    assert load_tokenizer(tmp_path).stop_ids == {end_of_text, eot}


def test_turn_tokens_count_only_where_they_are_one_special_token(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<|im_end|><end_of_turn>"
    ours = load_tokenizer(save(tmp_path, "byte-level", template, eos_token="<|endoftext|>"))
    assert ours.stop_ids == {0, 2}  # <end_of_turn> is just text to this vocabulary
    assert load_tokenizer(save(tmp_path / "b", "byte-level", "x", eos_token="<|endoftext|>")).stop_ids == {0}


def test_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    """Older directories add tokens in tokenizer_config.json; they must stay whole, with transformers' ids."""
    save(tmp_path, "byte-level")
    size = load_tokenizer(tmp_path).vocab_size
    added = {
        str(size): {"content": "<think>", "special": False},
        str(size + 1): {"content": "<|extra|>", "special": True},
    }
    edit(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder=added,
        eos_token={"__type": "AddedToken", "content": "<|extra|>"},
    )
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<think>b<|extra|>"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode("<think><|extra|>") == [size, size + 1] and size + 1 in ours.stop_ids
    assert (
        ours.decode(ours.encode(text))
        == theirs.decode(ours.encode(text), skip_special_tokens=True)
        == "a<think>b"
    )


def test_special_tokens_map_of_older_directories(tmp_path: Path) -> None:
    save(tmp_path, "byte-level", "{{ bos_token }}")
    edit(tmp_path / "tokenizer_config.json", bos_token=None, eos_token=None)
    tokens = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    ours = load_tokenizer(tmp_path)
    assert ours.render(CHAT) == "<|im_start|>" and 2 in ours.stop_ids


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, "byte-level")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    whole = backend.encode("Hello, world!", add_special_tokens=False).ids
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("Hello, world!") == whole and len(whole) > 2


def test_vocabulary_and_merges_files_are_converted(tmp_path: Path) -> None:
    backend = byte_level()
    backend.model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ours = load_tokenizer(tmp_path)
    for text in TEXTS[:-2]:
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert ours.stop_ids == {0}


def complaint(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load_tokenizer(path)
    assert caught.value.hint
    return caught.value


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no tokenizer" in complaint(tmp_path).message
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    assert "damaged" in complaint(tmp_path).message
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("[]")
    assert "cannot be converted" in complaint(tmp_path).message


def test_loading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save(tmp_path, "byte-level", CHATML)
    program = (
        "import sys, pathlib; from treeeagle_edge.tokenizer.codec import load_tokenizer;"
        "load_tokenizer(pathlib.Path(sys.argv[1])).render([{'role': 'user', 'content': 'a'}]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
