"""What config.json says of weights that come quantised, and what a plan makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from treeeagle_edge.config.reader import model_config_from_json
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.planning.alternatives import alternatives
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.planning.torch_bytes import block_bytes, linear_bytes
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def config_of(said: dict[str, object]) -> ModelConfig:
    return model_config_from_json({**CONFIG, "quantization_config": said}, Path("somewhere"))


@pytest.mark.parametrize(
    ("said", "bits", "name"),
    [
        (NF4, 4, "NF4"),
        ({"load_in_4bit": True}, 4, "FP4"),  # what bitsandbytes takes where neither type nor method is named
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, 4, "FP4"),
        (INT8, 8, "LLM.int8"),
    ],
)
def test_width_and_kind_are_read(said: dict[str, object], bits: int, name: str) -> None:
    stored = config_of(said).stored
    assert stored is not None and (stored.bits, stored.name, stored.plain) == (bits, name, ())


def test_floats_have_no_stored_width() -> None:
    assert model_config_from_json(CONFIG, Path("somewhere")).stored is None


@pytest.mark.parametrize(
    ("skipped", "plain"),
    [
        (["lm_head"], []),
        (["lm_head", "model.layers.1.mlp.down_proj"], ["1.mlp.down_proj"]),
        (["model.layers.3.self_attn"], [f"3.self_attn.{which}_proj" for which in "qkvo"]),
        (["k_proj"], [f"{layer}.self_attn.k_proj" for layer in range(4)]),
        (["model.layers.1"], [f"1.self_attn.{w}_proj" for w in "qkvo"]
         + [f"1.mlp.{w}_proj" for w in ("gate", "up", "down")]),
        (["layers.11"], []),
    ],
)  # fmt: skip
def test_modules_left_as_floats(skipped: list[str], plain: list[str]) -> None:
    stored = config_of({**NF4, "llm_int8_skip_modules": skipped}).stored
    assert stored is not None and list(stored.plain) == [f"model.layers.{name}" for name in plain]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "4 or 8 bits"),
        ({**INT8, "load_in_4bit": True}, "4 or 8 bits"),
        ({**NF4, "bnb_4bit_quant_type": "af4"}, "af4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, "unknown"),
        ("nf4", "wrong kind"),
    ],
)
def test_what_is_not_read_is_refused(said: object, named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        config_of(said)  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_plan_counts_floats_among_quantised_layers() -> None:
    every = config_of(NF4)
    some = config_of({**NF4, "llm_int8_skip_modules": ["model.layers.1.mlp.down_proj"]})
    assert block_bytes(every, 4) == block_bytes(replace(every, stored=None), 4)
    more = linear_bytes(2048, 8192, 16) - linear_bytes(2048, 8192, 4)
    assert block_bytes(some, 4) - block_bytes(every, 4) == more


def made_run(
    tmp_path: Path, said: dict[str, object], *, card: bool, ram: int = 24 * GB, **asked: object
) -> RunPlan:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": said}))
    run = RunSettings(model=str(tmp_path), head="none", **asked)  # type: ignore[arg-type]
    here = machine(card=card, ram=ram)
    profile = pick_profile(run, here)
    return plan_run(run, profile, here, planned_model(run, profile))


def machine(*, card: bool, ram: int = 24 * GB) -> Hardware:
    gpus = (Gpu(0, "a card", 12 * GB, 12 * GB, usable=True),) if card else ()
    cpu = Cpu("a processor", 2, 2, ("avx2",))
    return Hardware("cuda:0" if card else "cpu", "for a test", cpu, Ram(ram, ram, False), gpus)


@pytest.mark.parametrize(("said", "bits", "line"), [(NF4, 4, "NF4"), (INT8, 8, "LLM.int8")])
def test_a_card_runs_the_stored_width(tmp_path: Path, said: dict[str, object], bits: int, line: str) -> None:
    made = made_run(tmp_path, said, card=True)
    assert made.bits == bits and not made.backend.native
    assert made.memory.lines[0].name == f"weights ({line}, as stored)"
    assert made_run(tmp_path, said, card=True, bits=bits).memory == made.memory


@pytest.mark.parametrize(("said", "bits"), [(NF4, 8), (NF4, 16), (INT8, 4), (INT8, 32)])
def test_another_width_is_refused_with_the_stored_one(
    tmp_path: Path, said: dict[str, object], bits: int
) -> None:
    with pytest.raises(
        UsageError, match=f"--bits is {bits}, and the model is stored at {8 if said is INT8 else 4}"
    ):
        made_run(tmp_path, said, card=True, bits=bits)


def test_native_kernels_convert_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits unless 4 are asked for: 4-bit blocks round a second time."""
    monkeypatch.setattr(loader, "problem", lambda: None)
    for said in (NF4, INT8):
        made = made_run(tmp_path, said, card=False)
        assert (made.bits, made.backend.native) == (8, True)
        assert made.note is not None and "converted to 8-bit blocks" in made.note.text
    four = made_run(tmp_path, NF4, card=False, bits=4)
    assert four.note is not None and "second time" in four.note.text and "8 bits" in four.note.hint
    with pytest.raises(UsageError, match="stored at 4 bits"):
        made_run(tmp_path, NF4, card=False, bits=16)


def test_without_native_kernels_the_stored_width_stays(tmp_path: Path) -> None:
    made = made_run(tmp_path, NF4, card=False, kernels="torch")
    assert (made.bits, made.backend.native, made.note) == (4, False, None)
    assert made_run(tmp_path, INT8, card=False, kernels="torch").bits == 8


def test_alternatives_name_no_width_that_would_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "problem", lambda: None)
    run = RunSettings(model=str(tmp_path), head="none")
    on_card = made_run(tmp_path, INT8, card=True)
    assert not any("--bits 4" in option and "--model" not in option
                   for option in alternatives(on_card, run, machine(card=True)))  # fmt: skip
    native = made_run(tmp_path, NF4, card=False, ram=3 * GB)
    assert "--bits 4" in alternatives(native, run, machine(card=False))
