"""Expectations row 31: a target whose quantisation rotated the hidden states, from files to answers."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import head_tensors
from torch import Tensor

from treeeagle_edge.cli.app import main
from treeeagle_edge.config.reader import read_config
from treeeagle_edge.hardware.detection import detect
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.profiling.checks import check_choices
from treeeagle_edge.settings import RunSettings

BASE = ["--kernels", "torch", "--bits", "32", "--context", "256", "--threads", "1"]
ONCE = ["-p", "one two three", "--max-tokens", "12", "--temperature", "0", "--json"]
WARNING = "has rotated hidden states (is_rot_used in quant_model_description.json)"


def rotated(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """QuaRot's residual rotation folded into the weights: norms into what reads them, then an orthogonal matrix."""
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    q = torch.linalg.qr(
        torch.randn(hidden, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ).Q
    made = {name: tensor.double() for name, tensor in tensors.items()}
    reads = {"model.norm.weight": ["lm_head.weight"]}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        reads[start + "input_layernorm.weight"] = [f"{start}self_attn.{w}_proj.weight" for w in "qkv"]
        reads[start + "post_attention_layernorm.weight"] = [
            f"{start}mlp.{w}_proj.weight" for w in ("gate", "up")
        ]
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            made[start + name] = q.T @ made[start + name]
    for norm, matrices in reads.items():
        for name in matrices:
            made[name] = (made[name] * made[norm]) @ q
        made[norm] = torch.ones(hidden, dtype=torch.float64)
    made["model.embed_tokens.weight"] = made["model.embed_tokens.weight"] @ q
    return {name: tensor.float().contiguous() for name, tensor in made.items()}


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small Llama ("plain"), the same with rotated hidden states and the file that says so, and a head for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("models")
    plain, turned, head = root / "plain", root / "turned", root / "head"
    shutil.copytree(tiny_checkpoint, plain)
    config = LlamaConfig.from_pretrained(tiny_checkpoint, num_hidden_layers=6, tie_word_embeddings=False)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    LlamaForCausalLM(config).float().save_pretrained(plain)
    torch.set_rng_state(state)
    shutil.copytree(plain, turned)
    save_file(
        rotated(load_file(plain / "model.safetensors"), 6), turned / "model.safetensors", {"format": "pt"}
    )
    said = {"model_quant_type": "FLOAT", "is_rot_used": True, "model.embed_tokens.weight": "FLOAT"}
    (turned / "quant_model_description.json").write_text(json.dumps(said))
    head.mkdir()
    save_file(head_tensors(read_config(plain)), head / "model.safetensors")
    (head / "config.json").write_text(json.dumps({"num_attention_heads": 4, "rms_norm_eps": 1e-5}))
    return {"plain": plain, "turned": turned, "head": head}


@pytest.fixture
def own_head(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models are known, with a head that is on this machine and goes with them where nothing else is asked."""
    from treeeagle_edge.planning import model_shapes
    from treeeagle_edge.planning.known_models import KnownModel

    config = read_config(models["plain"])
    known = KnownModel(config=config, head_name=str(models["head"]), head=None)
    monkeypatch.setattr(model_shapes, "find_known", lambda name: known)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


def answer(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> tuple[dict[str, Any], str]:
    assert main(["chat", "--model", str(model), *BASE, *ONCE, *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), " ".join(err.split())


def made_plan(model: Path, **options: Any) -> RunPlan:
    settings = RunSettings(model=str(model), kernels="torch", bits=32, context=256, **options)
    hardware = detect("cpu")
    profile = pick_profile(settings, hardware)
    return plan_run(settings, profile, hardware, planned_model(settings, profile))


def test_it_answers_plainly_with_one_warning(
    models: dict[str, Path], own_head: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expectations row 31: the same text as the model before it was rotated, no head loaded, and why."""
    before, quiet = answer(capsys, models["plain"])
    found, talk = answer(capsys, models["turned"])
    assert before["speculation"]["enabled"] and before["head"] and "rotated hidden" not in quiet
    assert (found["head"], found["speculation"]["enabled"], found["speculation"]["drafted"]) == (
        None,
        False,
        0,
    )
    assert found["token_ids"] == before["token_ids"]
    assert talk.count(WARNING) == 1 and "so it decodes plainly; --head with a head" in talk
    assert "no draft head for" not in talk


@pytest.mark.parametrize("asked", [("--nodes", "4"), ("--depth", "2"), ("--branching", "2"), ("--head",)])
def test_who_asks_for_the_tree_gets_it_with_a_warning(
    models: dict[str, Path], own_head: None, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    """Expectations row 31: an explicit head or shape of a tree wins, and changes no text."""
    plain, _ = answer(capsys, models["turned"])
    asked = (*asked, str(models["head"])) if asked == ("--head",) else asked
    found, talk = answer(capsys, models["turned"], *asked)
    assert found["speculation"]["enabled"] and found["speculation"]["drafted"] > 0
    assert talk.count(WARNING) == 1 and "it drafts as asked; watch tokens/round" in talk
    assert found["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("options", [("--no-spec",), ("--head", "none")])
def test_who_asks_for_plain_decoding_is_not_warned(
    models: dict[str, Path], own_head: None, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    found, talk = answer(capsys, models["turned"], *options)
    assert found["speculation"]["drafted"] == 0 and "rotated hidden" not in talk


def test_the_bench_measures_the_plain_arm_and_says_why(
    models: dict[str, Path], own_head: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Expectations row 31: one arm by default, two where the tree is asked for; the warning is among the notes."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"category": "chat", "turns": ["one two three"]}))
    command = [
        "bench",
        "--model",
        str(models["turned"]),
        *BASE,
        "--prompts",
        str(prompts),
        "--max-tokens",
        "4",
    ]
    arms = {}
    for options in ((), ("--nodes", "4")):
        assert main([*command, "--repetitions", "1", "-o", "json", *options]) == 0
        document = json.loads(capsys.readouterr().out)
        arms[options] = document["settings"]["arms"]
        assert [WARNING in note for note in document["notes"]].count(True) == 1
    assert arms == {(): ["plain"], ("--nodes", "4"): ["plain", "tree"]}


def test_a_plan_has_no_head_unless_it_is_asked_for(models: dict[str, Path], own_head: None) -> None:
    """Expectations row 31: a plan counts what will run, and `treeeagle profile` shows the warning."""
    plan = made_plan(models["turned"])
    assert plan.model.head is None and plan.tree is None
    checks = [check for check in check_choices(plan) if check.name == "rotation"]
    assert [check.status for check in checks] == ["warn"] and WARNING in checks[0].text
    asked = made_plan(models["turned"], nodes=4)
    assert asked.model.head is not None and asked.tree is not None and asked.tree.nodes == 4
    assert made_plan(models["turned"], speculate=False).rotation is None
    assert made_plan(models["plain"]).rotation is None
