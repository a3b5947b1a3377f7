"""Memory profiles: the shipped ones hold up under arithmetic, a wrong file is refused with the key and the range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.memory_plan import plan_memory
from treeeagle_edge.planning.memory_profile import (
    SHIPPED,
    MemoryProfile,
    choose_profile,
    load_profile,
    models_that_fit,
    parse_profile,
)
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.units import GB

MIB = 1 << 20
GOOD = """
name: mine
device: cuda
memory_gb: 10
model: Qwen/Qwen3-4B
bits: 4
context: 4096
tree: {depth: 3, branching: 4, nodes: 16}
reserve_gb: 0.5
"""


def card(total_mib: int, name: str = "NVIDIA GeForce RTX 3070") -> Hardware:
    gpu = Gpu(0, name, total_mib * MIB, (total_mib - 512) * MIB, (8, 6), usable=True)
    return Hardware(
        "cuda:0", "for a test", Cpu("cpu", 8, 16, ("avx2",)), Ram(32 * GB, 30 * GB, False), (gpu,)
    )


def fits(profile: MemoryProfile, budget: int, *, native: bool = False) -> bool:
    known = KNOWN_MODELS[profile.model]
    return plan_memory(
        known.config,
        known.head,
        bits=profile.bits,
        context=profile.context,
        tree=profile.tree,
        reserve=profile.reserve,
        budget=budget,
        device=profile.device,
        native=native,
    ).fits


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_fits_the_smallest_device_it_is_for(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.head == KNOWN_MODELS[profile.model].head_name
    assert fits(profile, profile.memory)
    assert profile.device == "cuda" or fits(profile, profile.memory, native=True)


def test_the_shipped_gpu_profiles_leave_room_for_a_desktop():
    """Half a GB is taken by the time a desktop is up: the plan must fit what is free, not what is built in."""
    for name, total_mib in (("gpu-12gb", 12288), ("gpu-16gb", 16376), ("gpu-24gb", 24564)):
        assert fits(load_profile(name), (total_mib - 800) * MIB)


@pytest.mark.parametrize(
    ("total_mib", "name"),
    [
        (12288, "gpu-12gb"),
        (16376, "gpu-16gb"),
        (24564, "gpu-24gb"),
        (81559, "gpu-24gb"),
        (11441, None),
        (8192, None),
    ],
)
def test_the_profile_follows_the_card(total_mib, name):
    """An RTX 3060 or 3080 with 12 GB, an RTX 4080, an RTX 4090, an H100; just under 12 GB, and an 8 GB card."""
    if name is None and total_mib * MIB < 12 * GB:
        with pytest.raises(CannotRunError):
            choose_profile(card(total_mib))
    else:
        assert choose_profile(card(total_mib)).name == (name or "gpu-12gb")


def test_an_8_gb_card_is_refused_with_what_would_fit():
    with pytest.raises(CannotRunError) as error:
        choose_profile(card(8192))
    assert error.value.message == (
        "NVIDIA GeForce RTX 3070 has 8.6 GB, and the smallest profile for a card, gpu-12gb, needs 12.0 GB"
    )
    assert "--model Qwen/Qwen3-4B --bits 4" in error.value.hint and "--device cpu" in error.value.hint
    assert error.value.exit_code == 3


def test_a_named_model_gives_a_small_card_a_chance():
    assert choose_profile(card(8192), model="Qwen/Qwen3-4B").name == "gpu-12gb"


def test_models_that_fit_do_fit_and_come_largest_first():
    here = card(8192)
    names = models_that_fit(here, load_profile("gpu-12gb"))
    assert "Qwen/Qwen3-4B" in names and "Qwen/Qwen3-14B" not in names
    assert names.index("Qwen/Qwen3-4B") < names.index("Qwen/Qwen3-1.7B")
    assert models_that_fit(card(1024), load_profile("gpu-12gb")) == []


def test_the_cpu_gets_the_cpu_profile():
    assert choose_profile(replace(card(8192), device="cpu")).name == "cpu"


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_profile(str(path)) == MemoryProfile(
        name="mine",
        device="cuda",
        memory=10 * GB,
        model="Qwen/Qwen3-4B",
        head=None,
        bits=4,
        context=4096,
        tree=TreeShape(3, 4, 16),
        reserve=GB // 2,
    )


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("context:", "contxt:", "f has an unknown key contxt", "did you mean context?"),
        ("depth: 3", "depht: 3", "f has an unknown key tree.depht", "did you mean tree.depth?"),
        ("name: mine", "name: mine\nzzz: 1", "f has an unknown key zzz", "known keys: name, device"),
        ("bits: 4\n", "", "f lacks the key bits", "add bits: 4, 8, 16 or 32"),
        (
            "nodes: 16",
            "nodes: 999",
            "f has tree.nodes: 999, which is out of range",
            "use a whole number from 0 (chosen while decoding) to 256",
        ),
        ("bits: 4", "bits: 5", "f has bits: 5, which is out of range", "use 4, 8, 16 or 32"),
        ("bits: 4", "bits: true", "f has bits: True, which is of the wrong type", "use 4, 8, 16 or 32"),
        (
            "context: 4096",
            "context: 4k",
            "f has context: '4k', which is of the wrong type",
            "whole number from 64",
        ),
        ("context: 4096", "context: 10", "f has context: 10, which is out of range", "whole number from 64"),
        ("device: cuda", "device: tpu", "f has device: 'tpu', which is out of range", "use cpu or cuda"),
        ("reserve_gb: 0.5", "reserve_gb: -1", "f has reserve_gb: -1, which is out of range", "from 0 to 256"),
        (
            "reserve_gb: 0.5",
            "reserve_gb: .nan",
            "f has reserve_gb: nan, which is out of range",
            "from 0 to 256",
        ),
        ("model: Qwen/Qwen3-4B", "model: ''", "f has model: '', which is out of range", "use text"),
        (
            "model: Qwen/Qwen3-4B",
            "model: [a]",
            "f has model: a block, which is of the wrong type",
            "use text",
        ),
        (
            "{depth: 3, branching: 4, nodes: 16}",
            "7",
            "f has tree: 7, which is of the wrong type",
            "use a block with",
        ),
        (
            "context: 4096",
            "context: 0x" + "f" * 5000,
            "f has context: a huge number, which is out",
            "from 64",
        ),
        ("bits: 4", "bits: " + "4 " * 5000, "f has bits: '4 4 ", "use 4, 8, 16 or 32"),
        *(
            ("name: mine", f"name: {value}", "f is not valid YAML", "one `key: value` a line")
            for value in (
                "2020-13-45",
                "0x_",
                "9" * 5000,
                "1" + ":1" * 400 + ".0",
                "!!int '-'",
                "!!bool x",
                "!!timestamp x",
            )
        ),
        ("name: mine", "name: [", "f is not valid YAML", "one `key: value` a line"),
        ("name: mine", "name: " + "[" * 20_000, "f is not valid YAML", "one `key: value` a line"),
    ],
)
def test_a_wrong_key_is_named_with_what_is_allowed(old, new, message, hint):
    assert old in GOOD
    with pytest.raises(InputError) as error:
        parse_profile(GOOD.replace(old, new), "f")
    assert error.value.message.startswith(message)
    assert len(error.value.message) < 130
    assert hint in error.value.hint


@pytest.mark.parametrize("text", ["", "just words", "- a\n- b\n"])
def test_a_file_without_keys(text):
    with pytest.raises(InputError, match="f holds no keys"):
        parse_profile(text, "f")


def test_an_unknown_profile_and_an_unreadable_file(tmp_path):
    with pytest.raises(InputError, match="profile 'gpu-12bg' is unknown") as error:
        load_profile("gpu-12bg")
    assert error.value.hint.startswith("did you mean gpu-12gb?")
    with pytest.raises(InputError, match="no such file"):
        load_profile(str(tmp_path / "missing.yaml"))
    for name in ("~nobody-of-this-name/x", "x" * 5000):
        with pytest.raises(InputError, match="is unknown"):
            load_profile(name)
    with pytest.raises(InputError, match="is a directory"):
        load_profile(str(tmp_path))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="it is not text"):
        load_profile(str(binary))
