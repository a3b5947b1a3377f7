"""What a run becomes on a machine: profile, options on top, what is refused, and what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import machine, made_run

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.planning.alternatives import alternatives, require_fit
from treeeagle_edge.planning.memory_profile import load_profile
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.demo_model import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("native_kernels")


def test_need_is_known_and_refused_before_loading():
    """Expectations row 45: memory need unknown before loading. The refusal comes from shapes, with what would fit."""
    run = RunSettings(model="meta-llama/Llama-3.1-8B-Instruct", context=32_768)
    here = machine(card=8)
    made = made_run(run, here)
    assert not made.model.on_disk, "no file of the model was needed"
    with pytest.raises(CannotRunError, match=r"needs 1\d\.\d GB, and 8\.0 GB are free on cuda:0") as error:
        require_fit(made, run, here)
    assert "--model" in error.value.hint and "--device cpu" in error.value.hint
    require_fit(made_run(RunSettings(model=run.model), machine(card=12)), run, machine(card=12))


def test_alternatives_do_fit():
    run = RunSettings(model="meta-llama/Llama-3.1-8B-Instruct", bits=8)
    here = machine(card=10)
    made = made_run(replace(run, context=8192), here)
    assert not made.memory.fits
    options = alternatives(made, run, here)
    assert "--bits 4" in options
    assert made_run(replace(run, bits=4, context=8192), here).memory.fits
    shorter = [option for option in options if option.startswith("--context")]
    for option in shorter:
        assert made_run(replace(run, context=int(option.split()[1])), here).memory.fits
    for option in options:
        if option.startswith("--model"):
            assert made_run(RunSettings(model=option.split()[1], bits=4), here).memory.fits


def test_a_default_context_is_shortened_and_a_given_one_is_kept():
    here = machine(card=9)
    short = made_run(RunSettings(model="Qwen/Qwen3-8B"), here)
    assert 1024 <= short.context < 8192 and short.memory.fits
    assert short.context == short.memory.longest_context
    kept = made_run(RunSettings(model="Qwen/Qwen3-8B", context=8192), here)
    assert kept.context == 8192 and not kept.memory.fits
    vicuna = made_run(RunSettings(model="lmsys/vicuna-7b-v1.3"), machine(card=12))
    assert vicuna.context == 2048, "capped by the model"


def test_options_win_over_the_profile():
    made = made_run(RunSettings(bits=32, context=512, depth=2, nodes=3), machine())
    assert (made.bits, made.context) == (32, 512)
    assert made.tree == TreeShape(2, load_profile("cpu").tree.branching, 3)
    assert made_run(RunSettings(speculate=False), machine()).tree is None
    assert made_run(RunSettings(head="none"), machine()).model.head is None


def test_a_damaged_demo_model_is_planned_for_as_one_to_fetch(monkeypatch, tmp_path):
    """Its file is ours: whoever loads fetches it again, which nobody comes to where the plan reads it first."""
    monkeypatch.setenv("TREEEAGLE_CACHE", str(tmp_path))
    DEMO_MODEL.path.parent.mkdir(parents=True)
    DEMO_MODEL.path.write_bytes(b"GGUF, and no more")
    made = made_run(RunSettings(), machine())
    assert (made.model.name, made.model.on_disk) == ("smollm2-135m", False)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 5000])
def test_a_name_that_no_file_system_takes_is_unknown(name):
    with pytest.raises(InputError, match="neither on this machine nor among"):
        made_run(RunSettings(model=name), machine())
    with pytest.raises(InputError, match=r"no such file or folder|no head is named"):
        made_run(RunSettings(head=name), machine())


def test_a_head_for_another_model_is_refused():
    with pytest.raises(InputError, match="belongs to a target of width 4096"):
        made_run(RunSettings(head="AngelSlim/Qwen3-8B_eagle3"), machine())


@pytest.mark.parametrize("name", ["nobody/unheard-of-7b", "/no/such/folder"])
def test_an_unknown_model_cannot_be_planned_for(name):
    with pytest.raises(InputError, match="neither on this machine nor among") as error:
        made_run(RunSettings(model=name), machine())
    assert error.value.hint.startswith("check the name or path")


def test_a_head_that_is_not_here_cannot_be_planned_for():
    with pytest.raises(InputError, match="its shapes are not known") as error:
        made_run(RunSettings(head="nobody/unheard-of-head"), machine())
    assert "--head none" in error.value.hint
