"""Statistics, the document, its three forms, and the comparison with an earlier one, by hand arithmetic."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from bench_fakes import FakeClock, FakeEngine, FakeTokenizer, FakeWatch, fake_runtime

from treeeagle_edge.bench.arms import Bench
from treeeagle_edge.bench.compare import read_document, with_comparison
from treeeagle_edge.bench.document import build_document, divergence_note, parity_text
from treeeagle_edge.bench.memory import MemoryUse, memory_document
from treeeagle_edge.bench.prompts import BenchPrompt
from treeeagle_edge.bench.report import render
from treeeagle_edge.bench.samples import BenchRun, Divergence, Limits, Sample
from treeeagle_edge.bench.stats import bench_row, scenario_rows
from treeeagle_edge.errors import InputError
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.planning.memory_plan import PlanLine
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.units import GB

SETTINGS = {
    "model": "m",
    "head": "h",
    "bits": 16,
    "max_tokens": 9,
    "repetitions": 2,
    "tree": None,
    "exact": False,
}
ENVIRONMENT = {"device": "cpu (2 cores, avx2)"}


def sample(arm: str, repetition: int, tokens: int, decode_s: float, **changes: object) -> Sample:
    values: dict[str, object] = {
        "scenario": "chat",
        "prompt": "one",
        "turn": 1,
        "arm": arm,
        "repetition": repetition,
        "prompt_tokens": 10,
        "ids": tuple(range(tokens)),
        "finish_reason": "length",
        "ttft_s": 0.05,
        "decode_s": decode_s,
        "rounds": tokens - 1,
        "drafted": 0,
        "accepted": 0,
        "offered": (),
        "reached": (),
        "draft_s": 0.0,
        "verify_s": 0.0,
        "sample_s": 0.0,
        "draft_failures": 0,
        "peak_bytes": GB,
    }
    return Sample(**{**values, **changes})


def tree(repetition: int, tokens: int, decode_s: float, **changes: object) -> Sample:
    defaults: dict[str, object] = {
        "rounds": 4,
        "accepted": 6,
        "drafted": 40,
        "offered": (4, 4, 2),
        "reached": (3, 2, 1),
    }
    return sample("tree", repetition, tokens, decode_s, **{**defaults, **changes})


def run_of(*samples: Sample, divergences: tuple[Divergence, ...] = (), repetitions: int = 2) -> BenchRun:
    arms = tuple(dict.fromkeys(item.arm for item in samples))
    return BenchRun(arms, Limits(9, repetitions), repetitions, samples, divergences)


TWO_REPETITIONS = (
    sample("plain", 0, 101, 1.0),  # 100 tok/s
    tree(0, 101, 0.5, ttft_s=0.06),  # 200 tok/s
    tree(1, 101, 0.4, ttft_s=0.08),  # 250 tok/s
    sample("plain", 1, 101, 0.8),  # 125 tok/s
)


def test_speeds_are_tokens_after_the_first_by_seconds_after_the_first():
    row = bench_row("chat", TWO_REPETITIONS, [])
    assert row.plain_tps.mean == pytest.approx((100 + 125) / 2)
    assert row.plain_tps.deviation == pytest.approx(stdev([100, 125]))
    assert row.tree_tps.mean == pytest.approx((200 + 250) / 2)
    assert row.speedup.mean == pytest.approx(225 / 112.5)
    assert row.speedup.deviation == pytest.approx(0, abs=1e-9)  # twice as fast in both repetitions
    assert row.tokens == 202
    assert row.ttft_ms.mean == pytest.approx(70)


def test_tokens_a_round_and_accepted_share_are_different_things():
    row = bench_row("chat", TWO_REPETITIONS, [])
    assert row.tokens_per_round == pytest.approx((12 + 8) / 8)  # accepted + 1, by verify passes
    assert row.accepted_pct == pytest.approx(100 * 12 / 20)  # by the levels the trees offered
    assert row.acceptance_by_depth == pytest.approx((6 / 8, 4 / 8, 2 / 8))  # by all trees, so it never rises
    assert sum(row.acceptance_by_depth) == pytest.approx(row.tokens_per_round - 1)


def test_a_repetition_is_pooled_over_its_prompts():
    row = bench_row("all", [sample("plain", 0, 101, 1.0), sample("plain", 0, 11, 0.4)], [])
    assert row.plain_tps.mean == pytest.approx(110 / 1.4)
    assert row.plain_tps.deviation is None
    assert row.tree_tps is row.speedup is row.tokens_per_round is row.accepted_pct is None


def test_an_answer_of_one_token_has_no_speed():
    row = bench_row(
        "chat",
        [sample("plain", 0, 1, 0.0), tree(0, 1, 0.0, rounds=0, accepted=0, offered=(), reached=())],
        [],
    )
    assert row.plain_tps is row.tree_tps is row.speedup is row.tokens_per_round is None
    assert parity_text(row) == "same"


def test_rows_come_in_the_order_they_ran():
    samples = (sample("plain", 0, 5, 1.0, scenario="code"), sample("plain", 0, 5, 1.0, scenario="chat"))
    assert [row.name for row in scenario_rows(run_of(*samples))] == ["code", "chat"]


def difference(token: int, margin: float | None, repetition: int = 0) -> Divergence:
    return Divergence("chat", "one", 1, repetition, token, 5, 6, margin)


def test_parity_names_the_earliest_difference():
    row = bench_row("chat", TWO_REPETITIONS, [difference(40, 0.5), difference(12, 0.0213, 1)])
    assert parity_text(row) == "differs @ token 12 (margin 0.021), 2 of 2 answers"
    assert parity_text(bench_row("chat", TWO_REPETITIONS[:2], [difference(3, None)])) == "differs @ token 3"
    assert parity_text(bench_row("chat", TWO_REPETITIONS[:1], [])) is None


def test_the_note_on_a_difference_depends_on_the_bits():
    tie, defect = (difference(3, 0.01),), (difference(3, 2.5),)
    assert divergence_note(tie, {"bits": 32}).startswith("FAILURE")
    assert divergence_note(tie, {"bits": 16, "exact": True}).startswith("FAILURE")
    assert "a tie within 0.010 logits" in divergence_note(tie, {"bits": 16})
    assert "a large one is a defect" in divergence_note(defect, {"bits": 16})
    assert "2 answers differ" in divergence_note((*tie, *defect), {"bits": 16})


def document_of(run: BenchRun, **settings: object) -> dict:
    memory = {
        "lines": [{"name": "head (16-bit)", "planned_bytes": 5_000_000, "measured_bytes": None, "note": ""}]
    }
    return build_document(run, environment=ENVIRONMENT, settings={**SETTINGS, **settings}, memory=memory)


def test_the_json_holds_the_promised_keys_and_every_sample():
    document = json.loads(render(document_of(run_of(*TWO_REPETITIONS)), "json"))
    assert {"schema", "environment", "settings", "scenarios", "memory", "summary"} <= set(document)
    promised = {
        "name",
        "tokens",
        "plain_tps",
        "tree_tps",
        "speedup",
        "tokens_per_round",
        "accepted_pct",
        "ttft_ms",
    }
    for entry in (*document["scenarios"], document["summary"]):
        assert promised | {"parity", "samples"} <= set(entry)
    assert document["scenarios"][0].keys() == document["summary"].keys()
    samples = document["scenarios"][0]["samples"]
    assert [(item["arm"], item["repetition"]) for item in samples] == [
        ("plain", 0),
        ("tree", 0),
        ("tree", 1),
        ("plain", 1),
    ]
    assert samples[1]["tps"] == pytest.approx(200)
    assert samples[1]["token_ids"] == list(range(101))
    assert document["scenarios"][0]["repetitions"] == [
        {"plain_tps": pytest.approx(100), "tree_tps": pytest.approx(200)},
        {"plain_tps": pytest.approx(125), "tree_tps": pytest.approx(250)},
    ]


def test_the_table_shows_mean_deviation_and_units():
    text = render(document_of(run_of(*TWO_REPETITIONS)), "md")
    assert text == (
        "m · 16-bit · head h · cpu (2 cores, avx2) · 9 tokens x 2\n"
        "\n"
        "| scenario | tokens |  plain tok/s |   tree tok/s |      speedup | tokens/round | accepted |  ttft | peak memory | parity |\n"  # noqa: E501
        "| -------- | -----: | -----------: | -----------: | -----------: | -----------: | -------: | ----: | ----------: | ------ |\n"  # noqa: E501
        "| chat     |    202 | 112.5 ± 17.7 | 225.0 ± 35.4 | 2.00x ± 0.00 |         2.50 |     60 % | 70 ms |     1.00 GB | same   |\n"  # noqa: E501
        "| all      |    202 | 112.5 ± 17.7 | 225.0 ± 35.4 | 2.00x ± 0.00 |         2.50 |     60 % | 70 ms |     1.00 GB | same   |"  # noqa: E501
    )


def test_the_csv_has_one_row_a_scenario_and_one_over_all():
    rows = list(csv.DictReader(io.StringIO(render(document_of(run_of(*TWO_REPETITIONS)), "csv"))))
    assert [row["scenario"] for row in rows] == ["chat", "all"]
    assert float(rows[0]["plain_tps"]) == 112.5
    assert float(rows[0]["accepted_pct"]) == 60
    assert rows[0]["parity"] == "same"


def test_memory_is_shown_where_asked_for():
    document = document_of(run_of(*TWO_REPETITIONS))
    assert "5.0 MB" not in render(document, "md")
    assert "| head (16-bit) |  5.0 MB |        - |" in render(document, "md", memory_analysis=True)
    assert render(document, "csv", memory_analysis=True).endswith("\nhead (16-bit),5000000,,")


def test_a_scenario_with_a_bar_in_its_name_does_not_break_the_table():
    text = aligned_table(("a",), [["x"]])
    assert text == "| a |\n| - |\n| x |"
    samples = [sample("plain", 0, 5, 1.0, scenario="a|b")]
    assert "| a\\|b " in render(document_of(run_of(*samples)), "md")


def test_notes_say_what_the_table_cannot():
    """Expectations row 32: acceptance is shown, and a speculation that does not pay says so."""
    slow = run_of(sample("plain", 0, 101, 0.5), tree(0, 101, 1.0, draft_failures=2))
    notes = document_of(slow)["notes"]
    assert any("slower than plain" in item for item in notes)
    assert any(item.startswith("2 rounds fell back to plain decoding") for item in notes)
    assert any(
        "only the plain arm" in item for item in document_of(run_of(sample("plain", 0, 5, 1.0)))["notes"]
    )
    cut = BenchRun(("plain", "tree"), Limits(9, 3), 1, TWO_REPETITIONS[:2], (), interrupted=True)
    assert "interrupted: the figures hold 1 complete of 3 repetitions" in document_of(cut)["notes"]


def test_comparison_shows_new_by_old_and_what_changed(tmp_path: Path):
    old = document_of(run_of(*TWO_REPETITIONS))
    new = document_of(run_of(sample("plain", 0, 101, 1.0), tree(0, 101, 0.25)), bits=8)
    path = tmp_path / "old.json"
    path.write_text(render(old, "json"), encoding="utf-8")
    compared = with_comparison(new, read_document(path), "old.json")
    ratio = compared["compare"]["ratios"][0]
    assert ratio["name"] == "chat"
    assert ratio["plain_tps"] == pytest.approx(100 / 112.5)
    assert ratio["tree_tps"] == pytest.approx(400 / 225)
    assert "compared with old.json, which ran with other settings: bits 16, now 8" in compared["notes"]
    unknown = with_comparison({**new, "settings": {**new["settings"], "head_bits": 8}}, old, "old.json")
    assert unknown["notes"] == compared["notes"], "an older document says nothing of the head's width"
    narrower = with_comparison(
        document_of(run_of(*TWO_REPETITIONS), head_bits=8),
        document_of(run_of(*TWO_REPETITIONS), head_bits=16),
        "old.json",
    )
    assert any("other settings: head_bits 16, now 8" in note for note in narrower["notes"])
    assert render(narrower, "md").startswith("m · 16-bit · head h, 8-bit · cpu")
    text = render(compared, "md")
    assert "| new / old | plain tok/s | tree tok/s | speedup | tokens per round |" in text
    assert "| chat      |       0.89x |      1.78x |   2.00x |            1.00x |" in text
    same = with_comparison(old, old, "old.json")
    assert same["notes"] == old["notes"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[1]", "is not the result of a bench"),
        ('{"schema": "treeeagle-bench/99"}', "has the schema treeeagle-bench/99"),
        ('{"schema": "treeeagle-bench/1"}', "not a complete result"),
        (
            '{"schema": "treeeagle-bench/1", "scenarios": [{"name": "chat"}], "summary": {}}',
            "not a complete result",
        ),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_document(path)
    assert "bench -o json" in str(caught.value.hint)


def test_memory_lines_stand_beside_the_plan():
    plan = fake_runtime(FakeEngine(FakeClock())).plan
    held = {"weights": 270, "head": 50, "KV": 90}
    use = MemoryUse(
        held, program=400, loading_peak=900, loaded=800, answering_peak=1000, source="peak resident memory"
    )
    document = memory_document(plan, use)
    measured = {line["name"]: line["measured_bytes"] for line in document["lines"]}
    assert measured == {
        "weights (16-bit), embedding, lm_head": 270,
        "head (16-bit)": 50,
        "KV, 8,465 slots": 90,
        "workspace": 200,
        "reserve": 400,
        "total": 1000,
        "loading": 900,
    }
    planned = [line["planned_bytes"] for line in document["lines"][:-2]]
    assert sum(planned) == document["lines"][-2]["planned_bytes"] == plan.total
    assert document["lines"][0]["planned_bytes"] == 269_000_000
    assert (document["used_bytes"], document["peak_bytes"], document["within_plan"]) == (600, 1000, True)


def test_what_graphs_hold_stands_beside_their_line():
    plan = fake_runtime(FakeEngine(FakeClock())).plan
    plan = replace(plan, lines=(*plan.lines, PlanLine("CUDA graphs", 200)))
    use = MemoryUse({"CUDA graphs": 150}, 0, 900, 800, 1000, "peak of the CUDA allocator")
    (line,) = [line for line in memory_document(plan, use)["lines"] if line["name"] == "CUDA graphs"]
    assert (line["planned_bytes"], line["measured_bytes"]) == (200, 150)


def test_columns_follow_from_the_samples_of_a_real_run():
    """Every figure of a row, worked out again from the samples in the JSON."""
    clock = FakeClock()
    prompts = (BenchPrompt("chat", "one", ("hello",)), BenchPrompt("chat", "two", ("hi",)))
    bench = Bench(
        FakeEngine(clock), FakeTokenizer(), prompts, SamplingParams(), watch=FakeWatch(), clock=clock
    )
    entry = document_of(bench.run(Limits(20, 3)))["scenarios"][0]
    for arm in ("plain", "tree"):
        speeds = []
        for repetition in range(3):
            mine = [
                item for item in entry["samples"] if (item["arm"], item["repetition"]) == (arm, repetition)
            ]
            speeds.append(
                sum(len(item["token_ids"]) - 1 for item in mine) / sum(item["decode_s"] for item in mine)
            )
        assert entry[f"{arm}_tps"] == pytest.approx(sum(speeds) / 3)
    assert entry["plain_tps"] == pytest.approx(100)  # 10 ms a token
    trees = [item for item in entry["samples"] if item["arm"] == "tree"]
    rounds = sum(item["rounds"] for item in trees)
    accepted = sum(item["accepted"] for item in trees)
    assert entry["tokens_per_round"] == pytest.approx((accepted + rounds) / rounds)
    assert entry["accepted_pct"] == pytest.approx(100 * accepted / (2 * rounds))  # two levels a tree
    assert entry["speedup"] == pytest.approx(entry["tree_tps"] / entry["plain_tps"])
    assert entry["tokens"] == 2 * 3 * 20
