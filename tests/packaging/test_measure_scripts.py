"""The scripts in docs/ that reproduce claims: each runs end to end on tiny settings, and its sums are right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape
from treeeagle_edge.kernels.native.loader import problem
from treeeagle_edge.rounds import TreeShape

needs_native = pytest.mark.skipif(problem() is not None, reason=f"no native kernels: {problem()}")
Script = Callable[[str], ModuleType]
FEW = ("--threads", "1", "--per-scenario", "1")


def test_every_arm_runs_once_a_turn_and_the_order_turns_round(script: Script) -> None:
    timing = script("measuring.timing")
    orders = [timing.turned("abc", turn) for turn in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) == 6
    assert timing.in_turn({"x": lambda: 1, "y": lambda: 2}, 1) == {"y": 2, "x": 1}


def test_a_ratio_is_taken_pair_by_pair(script: Script) -> None:
    timing = script("measuring.timing")
    assert timing.ratio([2, 40, 6], [1, 10, 2]).median == 3
    assert timing.Spread.of([5.0]).text(1, "x") == "5.0x (5.0-5.0)"


@needs_native
def test_cpu_passes_and_turns(run: Callable, demo_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--rows",
        "1,3",
        "--prefix",
        "8",
        "--pass-repetitions",
        "2",
        "--chats",
        "1",
        "--first-answer",
        "6",
    )
    code, found = run("measure_cpu", "--parts", "verify,turn", "--bits", "8", *options, *FEW)
    assert code == 0
    assert set(found["Verify pass by rows"]) == {"8-bit, 1", "8-bit, 3"}
    (read_again,) = found["First token of a second turn"]["8"]["read_again"]
    assert 0 < read_again < 40  # the first turn was not read again
    assert "| rows |" in capsys.readouterr().out


@needs_native
def test_cpu_decoding_and_prefill_beside_llama(
    run: Callable,
    script: Script,
    demo_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """llama.cpp is stood for by an arm of known speed: 100 tokens a second in both parts."""
    timing, llama = script("measuring.timing"), script("measuring.llama")

    class Arm:
        def __init__(self, path: Path, **options: object) -> None: ...

        def prefill(self, ids: tuple[int, ...]) -> float:
            return len(ids) / 100

        def answer(self, ids: tuple[int, ...], tokens: int) -> object:
            return timing.Decoded(tuple(range(tokens)), 1.0, (tokens - 1) / 100)

    monkeypatch.setattr(llama, "library", lambda: SimpleNamespace(__version__="0"))
    monkeypatch.setattr(llama, "LlamaArm", Arm)
    options = ("--tokens", "4", "--repetitions", "1", "--prefill", "40", "--prefill-repetitions", "1")
    code, found = run("measure_cpu", "--parts", "decode,prefill", "--bits", "4", *options, *FEW)
    assert code == 0
    speeds = found["Decoding"]["tokens_per_second"]
    assert {name: len(values) for name, values in speeds.items()} == {
        "plain 4": 5,
        "tree 4": 5,
        "llama.cpp 4": 5,
    }
    assert speeds["llama.cpp 4"] == pytest.approx([100] * 5)
    assert found["Prefill"]["llama.cpp 4"] == [0.4]
    assert "| tree 4 / llama.cpp 4 " in capsys.readouterr().out


def test_without_llama_a_sentence_says_how_to_get_it(
    run: Callable, demo_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert run("measure_cpu", "--parts", "decode")[0] == 1
    assert "pip install llama-cpp-python" in capsys.readouterr().err
    assert run("measure_cpu", "--parts", "speed")[0] == 2
    assert "no part named speed" in capsys.readouterr().err


@needs_native
def test_memory_of_a_fresh_process(run: Callable, demo_gguf: Path) -> None:
    options = ("--bits", "4", "--context", "256", "--fill", "16", "--tokens", "4", "--threads", "1")
    _, (found,) = run("measure_memory", *options)
    assert 0 < found["held"] < found["answering"]
    assert found["bar"] == int(1.25 * found["held"]) + found["imports"]
    assert found["imports"] < found["loaded"]


@needs_native
def test_exactness_counts_and_reports(
    run: Callable,
    script: Script,
    demo_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--bits", "8", "--count", "6", "--tokens", "8", *FEW)
    code, found = run("check_exactness", *options)
    assert code == 0
    greedy = found["Exactness"]["8-bit, greedy"]
    assert (greedy["answers"], greedy["tokens"], greedy["differences"]) == (6, 48, [])
    assert greedy["accepted"] > 0
    module = script("check_exactness")
    honest = module.decode

    def broken(*given: object, speculate: bool = True, tree: object = None) -> object:
        answer = honest(*given, speculate=speculate, tree=tree)
        return script("measuring.timing").Decoded(
            (*answer.ids[:-1], -1 if speculate else 0), 0, 1, answer.rounds
        )

    monkeypatch.setattr(module, "decode", broken)
    assert run("check_exactness", "--bits", "8", "--count", "1", "--tokens", "3", *FEW)[0] == 1
    assert "8-bit, greedy: balcony, token 2: plain (0,), tree (-1,)" in capsys.readouterr().out


def test_made_up_prompts_continue_given_ones(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    module, runs = script("check_exactness"), script("measuring.runs")
    drawn = []

    def decode(engine: object, ids: tuple[int, ...], params: object, *, speculate: bool) -> object:
        drawn.append(params)
        return script("measuring.timing").Decoded((9,) * params.max_tokens, 0, 1)

    monkeypatch.setattr(module, "decode", decode)
    base = [runs.PromptIds("chat", "a", (1, 2)), runs.PromptIds("chat", "b", (3,))]
    cases = [case for case, _ in zip(module.made_up(object(), base), range(3), strict=False)]
    assert [case.ids[:2] for case in cases] == [(1, 2), (3, 9), (1, 2)]
    assert len({len(case.ids) for case in cases}) == 3
    assert len({params.seed for params in drawn}) == len(drawn)


def test_quality_sums(script: Script) -> None:
    module = script("measure_quality")
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    written = torch.tensor([0, 2])
    alike = module.Cost.of([module.loss(exact, exact, written)] * 2)
    assert (alike.ratio, alike.error, alike.divergence, alike.same) == pytest.approx((1, 0, 0, 1))
    other = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    cost = module.Cost.of([module.loss(exact, other, written)])
    assert cost.ratio == pytest.approx(2**0.5)  # half as likely at one of two tokens
    assert cost.divergence == pytest.approx(0.25 * torch.tensor(2.0).log().item() / 2)
    assert cost.same == 0.5


def test_quality_of_a_tiny_model(
    run: Callable, script: Script, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heads are too narrow for native kernels, so PyTorch's stand for them; fp32 against itself costs nothing."""
    arms = {"8-bit native": (32, "torch"), "bf16": (16, "torch")}
    monkeypatch.setattr(script("measure_quality"), "ARMS", arms)
    monkeypatch.setattr(script("measure_quality"), "CONTEXT", 512)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["Why is the sky blue?"]}\n{"turns": ["Count."]}\n', encoding="utf-8")
    options = ("--prompts", str(questions), "--per-scenario", "0", "--tokens", "5", "--threads", "1")
    code, found = run("measure_quality", "--model", str(tiny_checkpoint), *options)
    assert code == 0
    whole = found["What the bits cost"]
    assert len(whole["bf16"]) == 4  # two questions, greedy and sampled
    assert sum(abs(item["extra"]) for item in whole["8-bit native"]) < 1e-3
    assert sum(item["divergence"] for item in whole["bf16"]) > 0


@needs_native
def test_controller_by_scenario(run: Callable, demo_gguf: Path) -> None:
    options = ("--bits", "8", "--tokens", "6", "--repetitions", "1", "--fixed", "2x2", *FEW)
    _, found = run("measure_controller", *options)
    chat = found["Controller, 8 bits"]["chat"]
    assert set(chat["speeds"]) == {"plain", "adaptive", "2x2"}
    assert chat["best"] in ("plain", "2x2")
    assert chat["share"] == pytest.approx(chat["speeds"]["adaptive"] / chat["speeds"][chat["best"]])
    assert [item["met"] for item in found["results"]] == [item["value"] >= 0.95 for item in found["results"]]


def test_branches_at_assumed_costs(run: Callable, script: Script, demo_gguf: Path) -> None:
    module = script("estimate_branches")
    tree = TreeShape(4, 4, 16)
    assert module.cost(PLAIN, 0.2, 0.1) == 1.0
    assert module.cost(RoundShape(None, 15), 0.2, 0.1) == pytest.approx(1.1)
    assert module.cost(RoundShape(tree), 0.2, 0.1) == module.cost(RoundShape(tree, 7), 0.2, 0.1)
    assert module.cost(RoundShape(tree), 0.2, 0.1) == pytest.approx(1.0 + 4 * 0.2 + 2 * 0.1)
    _, found = run("estimate_branches", "--tokens", "10", "--level", "0.2", *FEW)
    rows = found["Tokens a unit of cost, a level at 0.2"]
    assert len(rows) == 5
    for row in rows.values():
        for arm in (module.WITHOUT, module.WITH):
            assert 0 < row[arm]["tokens"] < 10
        assert row[module.WITH]["cost"] >= sum(row["rounds"].values()) > 0
        assert row["ratio"] == pytest.approx(row[module.WITH]["speed"] / row[module.WITHOUT]["speed"])


@needs_native
def test_round_splits_its_time(run: Callable, demo_gguf: Path) -> None:
    from treeeagle_edge.kernels.native.library import library

    own = library().te_forward
    _, found = run("measure_round", "--bits", "8", "--tokens", "5", *FEW)
    assert library().te_forward is own
    parts = found["Where a round's time goes"]
    assert set(parts) == {"plain 8", "tree 8"}
    for split in (*parts["plain 8"], *parts["tree 8"]):
        named = sum(split[key] for key in ("target", "head", "drafting", "verifying", "sampling"))
        assert 0 < split["target"] < named < split["whole"]
    assert all(split["head"] == 0 for split in parts["plain 8"])
    assert any(split["head"] > 0 for split in parts["tree 8"])


@needs_native
def test_scale_on_a_trial_of_few_layers(run: Callable, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = ("--layers", "6", "--vocab", "256", "--draft-vocab", "128", "--prefix", "8", "--turns", "1")
    picture = tmp_path / "scale.svg"
    options = ("--models", "Qwen2-0.5B", "--bits", "4", "--threads", "1", "--plot", str(picture), *small)
    code, found = run("measure_scale", *options)
    assert code == 0
    assert picture.stat().st_size > 1000
    title = "Speed-up by nodes (a trial: fewer layers or tokens than the model has)"
    assert set(found[title]["Qwen2-0.5B, 4-bit"]) == {"least", "2 tokens", "3 tokens", "4 tokens"}


def test_acceptance_grows_with_nodes_and_costs_decide(script: Script) -> None:
    acceptance = script("measuring.acceptance")
    for wanted in (2, 3, 4):
        first = acceptance.first_for(wanted)
        assert acceptance.tokens(first, 16) == pytest.approx(wanted)
        settled = [acceptance.tokens(first, nodes) for nodes in (0, 1, 2, 4, 8, 16, 31)]
        assert settled == sorted(settled)
        assert settled[:2] == pytest.approx([1, 1 + first])
    free = CostModel(CostTable((1, 64), (1.0, 1.0), 1e-9, 1e-9))
    best = acceptance.best_tree(free, first, 16)
    assert (best.speedup, best.tokens) == pytest.approx((4, 4), rel=1e-6)
    dear = CostModel(CostTable((1, 64), (1.0, 64.0), 1.0, 1.0))
    assert max(acceptance.best_tree(dear, first, nodes).speedup for nodes in (1, 4, 16)) < 1
    assert acceptance.least_acceptance(free, (1, 4)) < 1.1
    assert acceptance.least_acceptance(dear, (1, 4)) is None


def test_random_blocks_are_what_a_gguf_holds(script: Script) -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    models = script("measuring.random_models")
    for bits in (8, 4):
        name, blocks = models.random_blocks(64, 96, bits)
        values = dequantize(blocks, GGMLQuantizationType[name])
        assert values.shape == (64, 96)
        assert abs(values.mean()) < 0.002
        assert values.std() == pytest.approx(0.02, rel=0.05)
