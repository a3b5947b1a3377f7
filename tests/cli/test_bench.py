"""`treeeagle bench` as a person meets it: transcripts over a small engine, and the real demo model once."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bench_fakes import FakeClock, FakeEngine, FakeWatch, fake_runtime

from treeeagle_edge.bench import run as bench_module
from treeeagle_edge.cli.app import main
from treeeagle_edge.units import GB


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The bench meets this engine, a clock that only it moves, and memory that stands still."""
    clock = FakeClock()
    fake = FakeEngine(clock)
    module = ModuleType("treeeagle_edge.runtime")
    fake.settings = []

    def load_runtime(settings, *, progress=None):
        fake.settings.append(settings)
        progress("loading fake-1m")
        return fake_runtime(fake, bits=settings.bits or 16)

    module.load_runtime = load_runtime
    monkeypatch.setitem(sys.modules, "treeeagle_edge.runtime", module)
    monkeypatch.setattr(bench_module, "MemoryWatch", lambda device="cpu": FakeWatch())
    monkeypatch.setattr(bench_module, "perf_counter", clock)
    return fake


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "chat", "turns": ["hello", "more"]},
        {"category": "code", "turns": ["run"]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def run(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_transcript(engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--prompts", str(questions), "--max-tokens", "9", "--repetitions", "2") == 0
    out, err = capsys.readouterr()
    assert out == (
        "fake-1m · 16-bit · head fake-head, 16-bit · cpu (2 cores, avx2)"
        " · tree 4 nodes, depth 2, branching 2 · 9 tokens x 2\n"
        "\n"
        "| scenario | tokens | plain tok/s |  tree tok/s |      speedup | tokens/round | accepted |  ttft | peak memory | parity |\n"  # noqa: E501
        "| -------- | -----: | ----------: | ----------: | -----------: | -----------: | -------: | ----: | ----------: | ------ |\n"  # noqa: E501
        "| chat     |     18 | 100.0 ± 0.0 | 133.3 ± 0.0 | 1.33x ± 0.00 |         2.00 |     50 % | 11 ms |     2.00 GB | same   |\n"  # noqa: E501
        "| code     |     18 | 100.0 ± 0.0 | 133.3 ± 0.0 | 1.33x ± 0.00 |         2.00 |     50 % |  9 ms |     2.00 GB | same   |\n"  # noqa: E501
        "| all      |     36 | 100.0 ± 0.0 | 133.3 ± 0.0 | 1.33x ± 0.00 |         2.00 |     50 % | 10 ms |     2.00 GB | same   |\n"  # noqa: E501
    )
    assert err == (
        "loading fake-1m\n"
        "warm-up, plain arm\n"
        "warm-up, tree arm\n"
        "repetition 1, prompt 1 of 2: chat, 1\n"
        "repetition 1, prompt 2 of 2: code, line-2\n"
        "repetition 2, prompt 1 of 2: chat, 1\n"
        "repetition 2, prompt 2 of 2: code, line-2\n"
    )
    assert engine.calls[4:] == ["plain", "tree", "tree", "plain", "tree", "plain", "plain", "tree"]


def test_quick_asks_one_prompt_of_each_scenario(engine: FakeEngine, capsys: pytest.CaptureFixture[str]):
    assert run("--quick", "-o", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["scenarios"]] == [
        "chat",
        "code",
        "summary",
        "question answering",
        "maths",
    ]
    assert document["settings"]["max_tokens"] == 64
    assert document["settings"]["repetitions"] == 3
    assert len(document["summary"]["samples"]) == 5 * 2 * 3
    assert engine.clock.now < 60


def test_quick_on_a_slow_machine_takes_fewer_tokens(engine: FakeEngine, capsys: pytest.CaptureFixture[str]):
    engine.slowness = 8  # 80 ms a plain token, 8 ms a prompt token
    assert run("--quick", "-o", "json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["max_tokens"] < 64
    assert engine.clock.now < 90


def test_without_quick_all_prompts_are_asked_three_times(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
):
    assert run("-o", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["max_tokens"] == 256
    assert len(document["summary"]["samples"]) == 20 * 2 * 3
    assert document["summary"]["parity"] == "same"
    assert document["environment"]["device"] == "cpu (2 cores, avx2)"
    assert document["schema"] == "treeeagle-bench/1"


def test_csv_goes_to_stdout_alone(engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--prompts", str(questions), "--max-tokens", "9", "-o", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["scenario"], row["plain_tps"], row["speedup"]) for row in rows] == [
        ("chat", "100", "1.33333"),
        ("code", "100", "1.33333"),
        ("all", "100", "1.33333"),
    ]


def test_several_formats_follow_each_other(
    engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]
):
    widths = ("--head-bits", "8", "--lm-head-bits", "16")
    assert run("--prompts", str(questions), "--max-tokens", "9", "-o", "csv,json", *widths) == 0
    assert (engine.settings[0].head_bits, engine.settings[0].lm_head_bits) == (8, 16)
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    assert table.startswith("scenario,tokens")
    assert json.loads(rest)["settings"]["prompts"] == str(questions)


def test_a_difference_is_shown_and_only_strict_makes_it_an_error(
    engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]
):
    """Expectations row 28: where the arms differ, the place and the tie margin are reported."""
    engine.slip = 5
    arguments = ("--prompts", str(questions), "--max-tokens", "9", "--repetitions", "1")
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert out.count("| differs @ token 5 (margin 0.013)") == 3
    assert "- 2 answers differ: a tie within 0.013 logits, which rounding decides" in out
    assert run(*arguments, "--strict") == 1
    assert run(*arguments, "--bits", "32") == 0
    assert "- FAILURE: 2 answers differ, which must not happen at 32 bits" in capsys.readouterr().out


def test_strict_is_content_with_equal_answers(engine: FakeEngine, questions: Path):
    assert run("--prompts", str(questions), "--max-tokens", "9", "--strict") == 0


def test_a_target_without_a_head_runs_the_plain_arm_and_says_so(
    engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]
):
    engine.speculates = False
    assert run("--prompts", str(questions), "--max-tokens", "9", "-o", "csv") == 0
    out, err = capsys.readouterr()
    assert set(engine.calls) == {"plain"}
    assert next(csv.DictReader(io.StringIO(out)))["tree_tps"] == ""
    assert "note: only the plain arm ran, so there is no speedup and no parity to show\n" in err


def test_turns_all_and_memory_analysis(
    engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--prompts", str(questions), "--turns", "all", "--max-tokens", "3", "--memory-analysis") == 0
    out = capsys.readouterr().out
    assert "<u>hello<a>abc<u>more<a>" in engine.prompts
    assert "| weights (16-bit), embedding, lm_head |   269.0 MB |   270.0 MB |" in out
    assert "| total                                | 2,030.0 MB | 2,000.0 MB |" in out


def test_compare_and_plot(
    engine: FakeEngine, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    arguments = ("--prompts", str(questions), "--max-tokens", "9", "--repetitions", "1")
    assert run(*arguments, "-o", "json") == 0
    old = tmp_path / "old.json"
    old.write_text(capsys.readouterr().out, encoding="utf-8")
    picture = tmp_path / "speed.svg"
    engine.slowness = 2
    assert run(*arguments, "--compare", str(old), "--plot", str(picture)) == 0
    out, err = capsys.readouterr()
    assert "| chat      |       0.50x |      0.50x |   1.00x |            1.00x |" in out
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert f"drawn to {picture}" in err


def test_an_interrupt_prints_what_there_is(
    engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]
):
    engine.interrupt_at_call = 4 + 5  # behind the warm-up, in the second repetition
    assert run("--prompts", str(questions), "--max-tokens", "9") == 130
    assert "- interrupted: the figures hold 1 complete of 3 repetitions" in capsys.readouterr().out


def test_settings_sampling_and_prompt_reach_the_engine(
    engine: FakeEngine, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    system = tmp_path / "system.txt"
    system.write_text("be brief", encoding="utf-8")
    options = (
        "--bits",
        "8",
        "--threads",
        "1",
        "--kernels",
        "torch",
        "--temperature",
        "0.7",
        "--seed",
        "5",
        "--system",
        f"@{system}",
    )
    code = run("--prompts", str(questions), "--max-tokens", "5", "--show-prompt", "-o", "json", *options)
    assert code == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (engine.settings[0].threads, engine.settings[0].kernels) == (1, "torch")
    assert document["settings"]["bits"] == 8
    assert document["settings"]["kernels"] == "native"
    assert document["settings"]["sampling"]["temperature"] == 0.7
    assert document["settings"]["sampling"]["seed"] == 5
    assert "<s>be brief<u>hello<a>\n" in err
    assert engine.params.seed == 5
    assert engine.params.stop_ids == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-o", "xml"), 2, "error: --output 'xml' is not a format of the bench\n hint: use md, csv, json\n"),
        (
            ("--turns", "two"),
            2,
            "error: --turns is two, which is neither of its values\n hint: use first or all\n",
        ),
        (
            ("--repetitions", "0"),
            2,
            "error: --repetitions is 0, which is out of range\n hint: use 1 to 100\n",
        ),
        (("--bits", "5"), 2, "error: --bits is 5"),
        (("--top-p", "1.5"), 2, "error: top-p is 1.5, which is out of range\n hint: use 0 to 1\n"),
        (("--stop", ""), 2, "error: --stop is empty"),
        (("--plot", "speed.pdf"), 2, "error: --plot speed.pdf is neither PNG nor SVG"),
        (
            ("--prompts", "absent.jsonl"),
            1,
            "error: cannot read the prompts absent.jsonl: no such file or directory",
        ),
        (("--compare", "absent.json"), 1, "error: cannot read absent.json: no such file or directory"),
        (("--quik",), 2, "error: there is no option --quik\n hint: did you mean --quick?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
):
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert engine.settings == []


def test_a_prompt_longer_than_the_context_is_named(
    engine: FakeEngine, questions: Path, capsys: pytest.CaptureFixture[str]
):
    engine.context = 12
    assert run("--prompts", str(questions)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: the prompt 1 has 11 tokens, which leaves no room for an answer in a context of 12\n" in err


@pytest.mark.slow
def test_the_demo_model_gives_the_same_text_in_both_arms(
    demo_gguf: Path, questions: Path, capsys: pytest.CaptureFixture[str]
):
    code = run(
        "--model", str(demo_gguf), "--head", "smollm2-135m-eagle3", "--bits", "32", "--context", "1024",
        "--prompts", str(questions), "--max-tokens", "24", "--repetitions", "1", "--strict", "-o", "json",
            "--nodes", "7",
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    document = json.loads(out)
    summary = document["summary"]
    assert summary["parity"] == "same"
    assert summary["tokens_per_round"] > 1.2  # the head is the demo model's own
    assert 0 < summary["accepted_pct"] < 100
    for item in summary["samples"]:
        if item["arm"] == "plain":
            assert item["rounds"] == len(item["token_ids"]) - 1
    lines = {line["name"].split(" ")[0]: line for line in document["memory"]["lines"]}
    assert lines["weights"]["measured_bytes"] > 100_000_000
    assert document["memory"]["peak_bytes"] < 4 * GB
