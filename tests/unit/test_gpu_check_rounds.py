"""The GPU check's section about rounds: what its rows say on a CPU, and verdicts that can go either way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from treeeagle_edge.drafting.lookup import Lookup
from treeeagle_edge.gpu_check import branches
from treeeagle_edge.gpu_check import rounds as subject
from treeeagle_edge.gpu_check.answers import HOST
from treeeagle_edge.gpu_check.probe import Finding, Probe
from treeeagle_edge.gpu_check.sizes import SIZES
from treeeagle_edge.gpu_check.timing import EAGER, GRAPH

CPU = torch.device("cpu")
TEST = replace(SIZES["test"], bits=32)  # nothing here is about a width


def test_rows_on_a_cpu() -> None:
    finding = Finding()
    subject.check_rounds(Probe(CPU, TEST, triton=False), finding)
    *others, host, eager, graph = finding.rows
    assert [row["how"] for row in (host, eager, graph)] == [HOST, EAGER, GRAPH]
    assert host["result"] == eager["result"] == "ok"
    assert host["tokens/round"] == eager["tokens/round"] == 3
    assert eager["same text"] == "yes" and eager["round us"] > 0
    assert graph["result"] == "not on this device: CUDA graphs need a CUDA device"
    drafts = [(row["drafts"], row["how"]) for row in others]
    assert drafts == [(name, how) for name in ("tree and branch", "branch") for how in (EAGER, GRAPH)]
    # what is counted again is always right: a branch's rows, and the token after them
    branch_rows, counted = (
        (TEST.tree.nodes // 2, TEST.tree.nodes),
        TEST.answer - 1,
    )  # the first is the prompt's
    for row, rows in zip(others[::2], branch_rows, strict=True):
        assert row["result"] == "ok" and row["same text"] == "yes"
        assert row["looked up"] > row["right"] > 0
        assert row["tokens/round"] == counted / -(-counted // (rows + 1))
    assert others[1]["result"] == others[3]["result"] == graph["result"]
    assert finding.problems == []


def test_branches_must_say_what_plain_decoding_and_the_same_rounds_one_by_one_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Probe(CPU, TEST, triton=False)
    made = subject.engine_led
    monkeypatch.setattr(
        branches, "engine_led", lambda probe, target, how, text: made(probe, target, EAGER, text)
    )
    said: list[int] = []
    for how in (EAGER, GRAPH):
        finding = Finding()
        found = branches.branched(probe, finding, "reference", how, branches.ALONE, said)
        assert "result" not in found and finding.problems == [] and len(said) == 2 * TEST.answer
    said[-1] += 1
    found = branches.branched(probe, finding, "reference", GRAPH, branches.ALONE, said)
    assert found["result"].startswith("FAILED: graphs and the same rounds")

    monkeypatch.setattr(Lookup, "match", lambda self, most: None)
    finding = Finding()
    found = branches.branched(probe, finding, "reference", EAGER, branches.ALONE, said)
    assert found["result"].startswith("FAILED: no looked-up token was right")

    monkeypatch.undo()
    engine, prompt = subject._led(probe, EAGER)
    ids = [4, 3, 2]
    assert branches._compared(finding, engine, prompt, ids, ids, strict=False) == "yes"
    verdict = branches._compared(finding, engine, prompt, ids, [4, prompt[-1] + 1, 2], strict=False)
    assert verdict.startswith("FAILED: branch and plain decoding part at token 1")
    monkeypatch.setattr(engine, "tie_margin", lambda ids, a, b: 0.1)
    verdict = branches._compared(finding, engine, prompt, ids, [4, 1, 2], strict=False)
    assert verdict == "a tie that rounding decides, at token 1"
    assert branches._compared(finding, engine, prompt, ids, [4, 1, 2], strict=True).startswith("FAILED")


def test_graphs_must_say_what_the_same_operations_say_and_the_host_may_round_otherwise() -> None:
    finding, texts = Finding(), {HOST: [1, 2, 3], EAGER: [1, 2, 4], GRAPH: [1, 2, 4]}
    assert subject._compared(finding, HOST, texts) == "nothing to compare with"
    assert "part at token 2" in subject._compared(finding, EAGER, texts)
    assert subject._compared(finding, GRAPH, texts) == "yes"
    assert finding.problems == []
    verdict = subject._compared(finding, GRAPH, {**texts, GRAPH: [1, 5, 4]})
    assert verdict.startswith("FAILED") and "part at token 1" in finding.problems[0]


def test_many_rounds_are_counted_and_growth_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, finding = Probe(CPU, TEST, triton=False), Finding()
    engine, prompt = subject._led(probe, EAGER)
    counts = iter([{"allocated": 100, "blocks": 1}, {"allocated": 100, "blocks": 1}])
    monkeypatch.setattr(subject, "allocator", lambda device: next(counts))
    found = subject._watched(probe, finding, engine, prompt, float("inf"))
    assert found["rounds"] >= TEST.rounds and found["new bytes"] == 0 and finding.problems == []
    counts = iter([{"allocated": 100, "blocks": 1}, {"allocated": 164, "blocks": 1}])
    monkeypatch.setattr(subject, "allocator", lambda device: next(counts))
    found = subject._watched(probe, finding, engine, prompt, float("inf"))
    assert found["new bytes"] == 64 and "allocated" in finding.problems[0]
