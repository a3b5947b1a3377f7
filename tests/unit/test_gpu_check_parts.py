"""What the sections of the GPU check are made of: a scripted head, timing, and verdicts that can go either way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treeeagle_edge.device.cuda_graphs import CudaCapture
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check import kernels as gpu_check_kernels
from treeeagle_edge.gpu_check import memory as gpu_check_memory
from treeeagle_edge.gpu_check import parity as gpu_check_parity
from treeeagle_edge.gpu_check import served as gpu_check_served
from treeeagle_edge.gpu_check import timing as gpu_check_timing
from treeeagle_edge.gpu_check.answers import answer, engine_of, prompt_of, script_of, tokens_per_round
from treeeagle_edge.gpu_check.inputs import Case
from treeeagle_edge.gpu_check.models import FREE, LED, RandomModel, ScriptedHead, random_head
from treeeagle_edge.gpu_check.probe import Finding, Probe
from treeeagle_edge.gpu_check.sizes import SIZES
from treeeagle_edge.gpu_check.speed import by_arithmetic
from treeeagle_edge.gpu_check.timing import GRAPH, Arm, as_graph, fastest_arm, interleaved
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.target import Target
from treeeagle_edge.planning.known_models import KNOWN_MODELS

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
# 32 bits: nothing here is about a width, and bitsandbytes is slow to import
TEST = replace(SIZES["test"], bits=32)


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return RandomModel.load(TEST.main.config, bits=32, device=CPU)


def head_for(target: Target) -> Head:
    return random_head(TEST.head, target, TEST.slots)


def test_the_full_size_is_that_of_the_models_it_names() -> None:
    full = SIZES["full"]
    assert full.main.config == KNOWN_MODELS["meta-llama/Llama-3.1-8B-Instruct"].config
    assert full.second.config.family == "qwen2" and full.second.config.hidden_size == 3584
    assert full.product_rows == (1, 8, 16, 32, 64) and full.contexts == (1024, 8192, 32_768)
    assert full.tree_rows == 16 and full.rounds == 1000
    for sizes in SIZES.values():  # whole rounds of two, three and four tokens after the first
        assert (sizes.answer - 1) % 12 == 0 and sizes.prompt + sizes.answer < sizes.context


def test_a_led_target_counts_upwards_and_a_free_one_does_not(model: RandomModel) -> None:
    texts = {}
    for scale in (LED, FREE):
        target = model.target(scale, TEST.context)
        engine = engine_of(target, head_for(target), TEST)
        texts[scale], _ = answer(engine, prompt_of(target, 6), 13, speculate=False)
    assert texts[LED] == list(range(11, 24))
    assert texts[FREE] != texts[LED] and len(set(texts[FREE])) > 3


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_script_sets_the_tokens_of_a_round(model: RandomModel, right: int) -> None:
    """Each round settles one token more than the script has right, and the text is the plain one."""
    target = model.target(LED, TEST.context)
    prompt = prompt_of(target, 6)
    head = ScriptedHead(head_for(target), script_of(prompt, target, TEST.context + 9), right)
    ids, rounds = answer(engine_of(target, head, TEST), prompt, 13, speculate=True)
    assert ids == list(range(11, 24))
    assert tokens_per_round(rounds) == right + 1
    assert all(one.drafted == TEST.tree.nodes for one in rounds[1:3])  # whatever is right


def test_a_script_follows_a_text_that_is_no_rule(model: RandomModel) -> None:
    target = model.target(FREE, TEST.context)
    prompt, real = prompt_of(target, 6), head_for(target)
    plain, _ = answer(engine_of(target, real, TEST), prompt, 13, speculate=False)
    script = script_of([*prompt, *plain], target, TEST.context + 9)
    assert script[:19].tolist() == [*prompt, *plain] and len(script) == TEST.context + 9
    ids, rounds = answer(engine_of(target, ScriptedHead(real, script, 2), TEST), prompt, 13, speculate=True)
    assert ids == plain and tokens_per_round(rounds) == 3


def test_random_weights_are_the_same_in_every_run(model: RandomModel) -> None:
    again = RandomModel.load(TEST.main.config, bits=32, device=CPU)
    assert torch.equal(model.weights.embedding, again.weights.embedding)
    layers = zip(model.weights.layers, again.weights.layers, strict=True)
    ones, x = torch.eye(64), torch.randn(2, 64)
    for ours, theirs in layers:
        assert torch.equal(ours.qkv(ones), theirs.qkv(ones))
    assert not torch.equal(model.weights.layers[0].qkv(x), model.weights.layers[1].qkv(x))


def test_calls_are_timed_in_turn_and_stop_when_time_is_over() -> None:
    called: list[str] = []
    arms = {name: Arm(lambda name=name: called.append(name), per=4) for name in "ab"}  # type: ignore[misc]
    times = interleaved(arms, CPU, 5, time.perf_counter() + 60)
    assert called == list("ab") * 6  # one to warm up
    assert times["a"].samples == 5 and 0 < times["a"].fastest_us <= times["a"].us
    assert interleaved(arms, CPU, 50, time.perf_counter() - 1)["b"].samples == 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of CUDA to capture and to time, in words."""
    log: list[str] = []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        log.append("capture")
        call()
        return lambda: log.append("replay")

    def event(*, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(
            record=lambda: log.append("record"), synchronize=lambda: None, elapsed_time=lambda end: 2.0
        )

    monkeypatch.setattr(
        gpu_check_timing, "CudaCapture", lambda device: capture if device == CUDA else CudaCapture(device)
    )
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    return log


def test_a_graph_follows_itself_when_it_is_timed(cuda: list[str]) -> None:
    arm = replace(as_graph(lambda: cuda.append("call"), CUDA), per=3)
    assert cuda == ["capture", "call"] and arm.how == GRAPH
    cuda.clear()
    timed = interleaved({"it": arm}, CUDA, 1, 0.0)["it"]
    assert cuda == ["replay", "synchronize", "replay", "record", "replay", "record"]
    assert timed.us == pytest.approx(2000 / 3) and timed.how == GRAPH


def test_what_cannot_be_captured_is_timed_as_it_is_with_the_reason(cuda: list[str]) -> None:
    def waits() -> None:
        if cuda[-1] == "capture":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    arm, reason = fastest_arm(waits, CUDA)
    assert (arm.call, arm.per, arm.how) == (waits, 1, "eager")
    assert reason == "not captured: operation not permitted when stream is capturing"
    with pytest.raises(CannotRunError, match="need a CUDA device"):
        as_graph(waits, CPU)
    assert fastest_arm(waits, CPU)[1] == "CUDA graphs need a CUDA device"


def a_case(ours: Callable[[], Tensor], dtype: torch.dtype = torch.float32) -> Case:
    expected = torch.tensor([1.0, float("nan"), -4.0])
    return Case("a kernel", dtype, lambda: (ours(),), lambda: (expected,))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([1.0, float("nan"), -4.0], "ok"),
        ([1.0, float("nan"), -4.2], "FAILED: a kernel is 5.0e-02 from the reference"),
        ([1.0, 0.0, -4.0], "FAILED: a kernel is inf from the reference"),
        ([float("nan")] * 3, "FAILED: a kernel is inf from the reference"),
    ],
)
def test_kernels_are_judged_by_their_largest_error_nan_for_nan(
    ours: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = judged(a_case(lambda: torch.tensor(ours)), monkeypatch)
    assert [row["result"] for row in finding.rows] == [said]
    assert bool(finding.problems) is (said != "ok")


def judged(case: Case, monkeypatch: pytest.MonkeyPatch) -> Finding:
    monkeypatch.setattr(gpu_check_kernels, "cases", lambda device, small: [case])
    probe, finding = Probe(CPU, TEST), Finding()
    monkeypatch.setattr(probe, "triton_problem", lambda: None)
    gpu_check_kernels.check_kernels(probe, finding)
    return finding


def test_a_kernel_that_gives_other_bits_the_second_time_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def unsteady() -> Tensor:
        runs.append(1)
        return torch.tensor([1.0, float("nan"), -4.0 - 1e-6 * (len(runs) > 1)])

    (row,) = judged(a_case(unsteady), monkeypatch).rows
    assert row["result"] == "FAILED: a kernel gives other bits when run again" and row["error"] == 0


def test_kernels_are_left_out_with_the_reason() -> None:
    for triton, reason in ((False, "left out after two sections"), (True, "need a CUDA device")):
        probe, finding = Probe(CPU, TEST, triton=triton), Finding()
        gpu_check_kernels.check_kernels(probe, finding)
        assert finding.rows[0]["result"].startswith("not on this device: ") and probe.backends() == (
            "reference",
        )
        assert reason in finding.rows[0]["result"]
        unserved = Finding()
        gpu_check_served.check_served(probe, unserved)
        assert [row["result"] for row in unserved.rows] == [finding.rows[0]["result"]]


@pytest.mark.parametrize(
    ("launches", "reasons", "optional", "said"),
    [
        (4, [], False, "ok"),
        (4, ["triton fails: no ptxas"] * 2, False, "FAILED: a kernel: triton fails: no ptxas"),
        (0, [], False, "FAILED: a kernel passed its trial and is missing from a pass"),
        (0, [], True, "ok: where there is no launch, bitsandbytes multiplies without unpacking"),
    ],
)
def test_a_kernel_that_serves_no_pass_is_told(
    launches: int, reasons: list[str], optional: bool, said: str
) -> None:
    """One pass without it is enough; only the product may be bitsandbytes' own everywhere."""
    finding = Finding()
    row = {"kernel": "a kernel", "decode": launches, "verify": 4, "extend": 1, "step": 1}
    assert gpu_check_served._judge(finding, row, reasons, optional=optional) == {"result": said}
    assert bool(finding.problems) is said.startswith("FAILED")


@pytest.mark.parametrize(
    ("bits", "margin", "said"),
    [
        (4, 0.02, "ok: a tie that rounding decides"),
        (4, 0.9, "FAILED: the texts differ by 0.90 logits, more than rounding explains"),
        (32, 0.02, "FAILED: the texts differ, which must not happen here"),
    ],
)
def test_texts_that_differ_are_told_with_their_margin(
    bits: int, margin: float, said: str, model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expectations row 28: on divergence the tie margin is reported; in fp32 and exact mode there is no excuse."""

    def slips(engine: Any, prompt: list[int], tokens: int, *, speculate: bool) -> tuple[list[int], list[Any]]:
        ids, rounds = answer(engine, prompt, tokens, speculate=speculate)
        return ([*ids[:5], 7, *ids[6:]] if speculate else ids), rounds

    target = model.target(LED, TEST.context)
    monkeypatch.setattr(target, "bits", bits)
    monkeypatch.setattr(gpu_check_parity, "answer", slips)
    monkeypatch.setattr(gpu_check_parity.engine_of.__globals__["Engine"], "tie_margin", lambda *_: margin)
    finding = Finding()
    gpu_check_parity._Parity(Probe(CPU, TEST), finding, "it", target, head_for(target), "reference").rows()
    plain, *trees = finding.rows
    assert plain["result"] == "ok" and plain["tokens"] == TEST.answer
    for row in trees:
        assert (row["differs at"], row["margin"], row["result"]) == (5, margin, said)
    assert len(trees) == 2 and bool(finding.problems) is said.startswith("FAILED")


def test_memory_that_grows_is_told(model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectations row 26 on CUDA: nothing is asked of the driver after the first answer."""
    steps = iter([(100, 200, 3), (100, 200, 3), (100, 200, 3), (140, 200, 5)])

    def allocator(device: torch.device) -> dict[str, int]:
        return dict(zip(("allocated", "reserved", "blocks"), next(steps), strict=True))

    monkeypatch.setattr(gpu_check_memory, "allocator", allocator)
    probe = Probe(CPU, TEST)
    for said in ("ok", "FAILED: memory grew over 29 rounds: allocated, blocks"):
        finding = Finding()
        gpu_check_memory.check_memory(probe, finding)
        (row,) = finding.rows
        assert row["result"] == said and row["rounds"] == 29
    assert (row["allocated before"], row["allocated after"], row["new blocks"]) == (100, 140, 2)


def test_the_allocator_of_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check_memory.allocator(CPU) is None
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_device_alloc": 3})
    assert gpu_check_memory.allocator(CUDA) == {"allocated": 10, "reserved": 20, "blocks": 3}


def test_arithmetic_needs_all_graphs_and_says_what_it_is() -> None:
    probe = Probe(CPU, SIZES["full"])
    assert by_arithmetic(probe, "triton") == []
    graphs = {"decode": 10_000.0, "verify": 12_000.0, "extend": 1000.0, "step": 1000.0}
    probe.facts |= {f"triton.graph.{name}": us for name, us in graphs.items()}
    plain, two, _, four = by_arithmetic(probe, "triton")
    assert plain["tokens/s"] == pytest.approx(100) and plain["speedup"] == 1
    # a round: one pass over the feature, three drafted levels, one verify pass: 16 ms
    assert two["tokens/s"] == pytest.approx(125) and four["speedup"] == pytest.approx(2.5)
    assert {row["source"] for row in (plain, two, four)} == {"arithmetic on graphs"}


def test_timing_waits_only_where_there_is_something_to_wait_for() -> None:
    gpu_check_timing.wait(CPU)
    assert gpu_check_timing.said(CannotRunError("no card", "buy one")) == "no card"
    assert gpu_check_timing.said(RuntimeError("CUDA error: x\ny")) == "CUDA error: x"
