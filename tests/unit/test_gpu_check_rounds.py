"""The GPU check's section about rounds: what its rows say on a CPU, and verdicts that can go either way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from treeeagle_edge.gpu_check import rounds as subject
from treeeagle_edge.gpu_check.probe import Finding, Probe
from treeeagle_edge.gpu_check.sizes import SIZES
from treeeagle_edge.gpu_check.timing import EAGER, GRAPH

CPU = torch.device("cpu")
TEST = replace(SIZES["test"], bits=32)  # nothing here is about a width


def test_rows_on_a_cpu() -> None:
    finding = Finding()
    subject.check_rounds(Probe(CPU, TEST, triton=False), finding)
    host, eager, graph = finding.rows
    assert [row["how"] for row in finding.rows] == [subject.HOST, EAGER, GRAPH]
    assert host["result"] == eager["result"] == "ok"
    assert host["tokens/round"] == eager["tokens/round"] == 3
    assert eager["same text"] == "yes" and eager["round us"] > 0
    assert graph["result"] == "not on this device: CUDA graphs need a CUDA device"
    assert finding.problems == []


def test_graphs_must_say_what_the_same_operations_say_and_the_host_may_round_otherwise() -> None:
    finding, texts = Finding(), {subject.HOST: [1, 2, 3], EAGER: [1, 2, 4], GRAPH: [1, 2, 4]}
    assert subject._compared(finding, subject.HOST, texts) == "nothing to compare with"
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
