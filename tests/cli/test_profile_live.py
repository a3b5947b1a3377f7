"""`treeeagle profile` without `--fast`: layers, kernels and bandwidth as they are on this machine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from profile_fakes import BARE, describing, run

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.profiling.checks import Check
from treeeagle_edge.rounds import TreeShape


@pytest.fixture
def machine(monkeypatch):
    return describing(monkeypatch)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_everything_runs_on_this_machine(capsys, monkeypatch, kernels):
    """The live checks, shortened: both layers near fp32, backends agree, bandwidth measured and used."""
    if kernels == "native" and loader.problem() is not None:
        pytest.skip("native kernels need a C++ compiler")
    from treeeagle_edge.profiling import live as profile_live

    monkeypatch.setattr(profile_live, "_BANDWIDTH_BYTES", 8 * 2**20)
    monkeypatch.setattr(profile_live, "_BANDWIDTH_SECONDS", 0.01)
    monkeypatch.setattr(profile_live, "_VERIFY_BYTES", 2**20)
    monkeypatch.setattr(profile_live, "_NATIVE_VERIFY_BYTES", 2**20)
    code, out, err = run(capsys, "--json", "--device", "cpu", "--kernels", kernels)
    assert code == 0 and "measuring memory bandwidth" in err
    data = json.loads(out)
    checks = {check["name"]: check for check in data["checks"]}
    for name in ("4-bit layer", "8-bit layer", "kernels", "bandwidth"):
        assert checks[name]["status"] == "ok", checks[name]
    named = "reference, exact, native agree" if kernels == "native" else "reference, exact agree"
    assert named in checks["kernels"]["text"]
    assert ("a native 4-bit layer" in checks["4-bit layer"]["text"]) is (kernels == "native")
    (speed,) = data["speed"]
    assert speed["source"] == "measured" and speed["bandwidth"] > 0 and 1 <= speed["verify_cost"] <= 64
    assert speed["ceiling"] == pytest.approx(speed["bandwidth"] * 1e9 / speed["step_bytes"])


@pytest.mark.parametrize(("copy", "read"), [(50.0, 40.0), (40.0, 50.0)])
def test_the_faster_of_copying_and_reading_is_the_bandwidth(machine, capsys, monkeypatch, copy, read):
    from treeeagle_edge.profiling import live as profile_live

    machine(BARE)
    monkeypatch.setattr(profile_live, "check_layers", lambda *_, **__: iter(()))
    monkeypatch.setattr(profile_live, "check_kernels", lambda *_, **__: iter(()))
    monkeypatch.setattr(profile_live, "measure_verify_cost", lambda *_: 1.2)
    monkeypatch.setattr(profile_live, "measure_bandwidth", lambda _: profile_live.Bandwidth(copy, read))
    (speed,) = json.loads(run(capsys, "--json")[1])["speed"]
    assert (speed["source"], speed["bandwidth"]) == ("measured", 50.0)
    assert profile_live.describe_bandwidth(profile_live.Bandwidth(copy, read), 90.0, "cuda:0").status == "ok"


@pytest.mark.parametrize("full", ["measure_bandwidth", "measure_verify_cost"])
def test_a_card_too_full_to_be_measured_is_a_line_of_the_report(machine, capsys, monkeypatch, full):
    """As with a game open beside it: PyTorch raises, and the report goes on."""
    from treeeagle_edge.profiling import live as profile_live

    def raises(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")

    machine(BARE)
    passes = Check("8-bit layer", "ok", "runs"), Check("4-bit layer", "ok", "runs")
    monkeypatch.setattr(profile_live, "check_layers", lambda *_, **__: iter(passes))
    monkeypatch.setattr(profile_live, "check_kernels", lambda *_, **__: iter(()))
    monkeypatch.setattr(profile_live, "measure_bandwidth", lambda _: profile_live.Bandwidth(50, 40))
    monkeypatch.setattr(profile_live, "measure_verify_cost", lambda *_: 1.2)
    monkeypatch.setattr(profile_live, full, raises)
    code, out, _ = run(capsys, "--json")
    lines = [check for check in json.loads(out)["checks"] if "not measured" in check["text"]]
    assert code == 0 and [line["status"] for line in lines] == ["warn"] and "nvidia-smi" in lines[0]["hint"]


def test_a_layer_that_does_not_run_fails_its_own_width_only(machine, capsys, monkeypatch):
    from treeeagle_edge.profiling import live as profile_live

    def broken(weight, bias, *, bits, device, dtype):
        if bits == 4:
            raise CannotRunError("bitsandbytes cannot be imported", "install it again")
        return lambda x: x.float() @ (weight.T * (1.0 if bits == 8 else 2.0))

    machine(BARE)
    monkeypatch.setattr(profile_live, "make_linear", broken)
    monkeypatch.setattr(profile_live, "_BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(profile_live, "_BANDWIDTH_SECONDS", 0.001)
    monkeypatch.setattr(profile_live, "measure_verify_cost", lambda plan, device: 1.5)
    code, out, _ = run(capsys, "--bits", "8", "--kernels", "torch")
    assert (
        "fail  a 4-bit layer does not run on cpu: bitsandbytes cannot be imported\n      hint: install it again"
        in out
    )
    assert "ok    an 8-bit layer runs on cpu" in out and code == 0
    code, out, _ = run(capsys, "--bits", "4", "--kernels", "torch")
    assert code == 3 and "verdict  cannot run: a 4-bit layer does not run on cpu" in out


def test_a_wrong_kernel_is_caught(monkeypatch):
    import torch

    from treeeagle_edge.kernels import dispatch
    from treeeagle_edge.profiling import live as profile_live

    def wrong(query, keys, values, view, dtype):
        return torch.zeros_like(query)

    monkeypatch.setitem(dispatch._dispatcher.kernels["attention"], "wrong", wrong)
    first, last = list(profile_live.check_kernels(torch.device("cpu"), native=False))
    assert first.status == "fail" and "attention backend wrong is 1.0e+00 from the reference" in first.text
    assert last.text.endswith("reference, exact agree") and last.status == "ok"
    assert dispatch.current_backend() == "reference"


@pytest.mark.skipif(loader.problem() is not None, reason="native kernels need a C++ compiler")
def test_wrong_native_kernels_are_caught(monkeypatch):
    import torch

    from treeeagle_edge.profiling import live as profile_live
    from treeeagle_edge.profiling import native as profile_native

    monkeypatch.setattr(profile_native, "native_attention", lambda query, *rest: query * 0)
    monkeypatch.setattr(profile_native, "native_layer", lambda weight, x, bits: x @ weight.T * (bits / 8))
    first, last = list(profile_live.check_kernels(torch.device("cpu"), native=True))
    assert first.status == "fail" and "attention backend native is 1.0e+00 from the reference" in first.text
    assert last.text.endswith("reference, exact agree")
    four, eight = list(profile_live.check_layers(torch.device("cpu"), native=True))
    assert four.status == "fail" and "a native 4-bit layer runs on cpu, 50.0 % from fp32" in four.text
    assert eight.status == "ok"


def test_on_a_card_passes_are_timed_as_graphs_over_more_than_a_cache_holds(monkeypatch):
    """One by one, a pass over a row and one over a tree would both be as long as their launches."""
    import torch

    from treeeagle_edge.profiling import live as profile_live

    cpu, made, captured = torch.device("cpu"), [], []

    class Layer:
        nbytes = 2**20

        def __call__(self, x):
            return x

    def make(weight, bias, *, bits, device, dtype):
        made.append(device)
        return Layer()

    def capture(call, device):
        captured.append(device)
        return SimpleNamespace(call=call), None

    monkeypatch.setattr(profile_live, "make_linear", make)
    monkeypatch.setattr(profile_live, "fastest_arm", capture)
    monkeypatch.setattr(profile_live, "_time", lambda call, device: call() or 1.0)
    card = SimpleNamespace(type="cuda")  # tensors of this test stay where they are
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    plan = SimpleNamespace(
        tree=TreeShape(2, 2, 3),
        backend=SimpleNamespace(native=False),
        bits=4,
        model=SimpleNamespace(config=SimpleNamespace(intermediate_size=8, hidden_size=4)),
    )
    assert profile_live.measure_verify_cost(plan, card) == 1.0
    assert captured == [card] * 2 and len(made) == 32
    made.clear()
    assert profile_live.measure_verify_cost(plan, cpu) == 1.0
    assert captured == [card] * 2 and len(made) == 8
