"""`treeeagle eval-head` as a person meets it: transcripts over a small engine."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from bench_fakes import fake_runtime

from treeeagle_edge.bench import plot as bench_plot
from treeeagle_edge.cli.app import main
from treeeagle_edge.rounds import Round
from treeeagle_edge.tree import DraftTree


class ChainEngine:
    """Drafts three tokens in a row, each with probability 0.85. Of them 1 is taken with 4 nodes, 3 with more.

    `quiet` makes the prefill the only round, `failing` a head that gives no scores. Ctrl-C comes at a call.
    """

    context, kv_nbytes, speculates = 1000, 1, True

    def __init__(self) -> None:
        self.settings: list = []
        self.calls: list = []
        self.has_head, self.quiet, self.failing = True, False, False
        self.interrupt_at: int | None = None

    def generate(self, prompt_ids, params, *, reuse_prefix=True, tree=None):
        self.calls.append((params, tree))
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        accepted = 0 if self.failing else 1 if tree.nodes == 4 else 3
        done = 1
        yield self._round((65,), "prefill", None, 0, "length" if self.quiet else None)
        while done < params.max_tokens and not self.quiet:
            done += accepted + 1
            log_probs = tuple(level * math.log(0.85) for level in range(4))
            chain = DraftTree((65, 66, 67, 68), (-1, 0, 1, 2), (0, 1, 2, 3), log_probs)
            drafted = DraftTree.root_only(65) if self.failing else chain
            reason = "length" if done >= params.max_tokens else None
            yield self._round((65,) * (accepted + 1), "tree", drafted, accepted, reason)

    def _round(self, ids, kind, tree, accepted, reason) -> Round:
        return Round(
            ids=ids,
            kind=kind,
            drafted=tree.num_nodes if tree else 0,
            accepted=accepted,
            tree=tree,
            walked=tuple(range(accepted + 1)),
            next_token=65,
            draft_s=0.0,
            verify_s=0.0,
            sample_s=0.0,
            finish_reason=reason,
            draft_failures=int(self.failing and kind != "prefill"),
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ChainEngine:
    fake = ChainEngine()
    module = ModuleType("treeeagle_edge.runtime")

    def load_runtime(settings, *, progress=None):
        fake.settings.append(settings)
        progress("loading fake-1m")
        return fake_runtime(fake, bits=settings.bits or 16)

    module.load_runtime = load_runtime
    monkeypatch.setitem(sys.modules, "treeeagle_edge.runtime", module)
    return fake


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [{"question_id": 7, "category": "chat", "turns": ["hello", "more"]}, {"turns": ["run"]}]
    Path("mine.jsonl").write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return "mine.jsonl"


def run(*arguments: str) -> int:
    return main(["eval-head", *arguments])


def test_transcript(engine: ChainEngine, questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: with 4 nodes a round settles 2 tokens, with 8 nodes 4. All nodes of the 8 are accepted, at 0.85 each."""
    assert run("--prompts", questions, "--budgets", "8,4", "--depth", "3", "--max-tokens", "9") == 0
    out, err = capsys.readouterr()
    assert out == (
        "fake-1m · 16-bit · head fake-head, 16-bit · cpu (2 cores, avx2) · depth 3, branching 4 · greedy"
        " · answers of at most 9 tokens\n"
        "\n"
        "Tokens per round, by the nodes of the tree:\n"
        "\n"
        "| prompts    | questions | tokens | 4 nodes | 8 nodes |\n"
        "| ---------- | --------: | -----: | ------: | ------: |\n"
        "| mine.jsonl |         2 |     18 |    2.00 |    4.00 |\n"
        "| all        |         2 |     18 |    2.00 |    4.00 |\n"
        "\n"
        "Acceptance with 8 nodes. First token: the share of trees whose likeliest first token the target took."
        " Depth: the share of rounds whose walk got there.\n"
        "\n"
        "| prompts    | rounds | first token | depth 1 | depth 2 | depth 3 |\n"
        "| ---------- | -----: | ----------: | ------: | ------: | ------: |\n"
        "| mine.jsonl |      4 |     100.0 % | 100.0 % | 100.0 % | 100.0 % |\n"
        "| all        |      4 |     100.0 % | 100.0 % | 100.0 % | 100.0 % |\n"
        "\n"
        "The same over all prompts, by the nodes of the tree:\n"
        "\n"
        "| nodes | rounds | first token | depth 1 | depth 2 | depth 3 |\n"
        "| ----- | -----: | ----------: | ------: | ------: | ------: |\n"
        "| 4     |      8 |     100.0 % | 100.0 % |   0.0 % |   0.0 % |\n"
        "| 8     |      4 |     100.0 % | 100.0 % | 100.0 % | 100.0 % |\n"
        "\n"
        "Calibration with 8 nodes: of drafted nodes whose parent was accepted, the head's probability for them and"
        " the share accepted:\n"
        "\n"
        "| probability | nodes | predicted | accepted |\n"
        "| ----------- | ----: | --------: | -------: |\n"
        "| 0.0 to 0.1  |     0 |         - |        - |\n"
        "| 0.1 to 0.2  |     0 |         - |        - |\n"
        "| 0.2 to 0.3  |     0 |         - |        - |\n"
        "| 0.3 to 0.4  |     0 |         - |        - |\n"
        "| 0.4 to 0.5  |     0 |         - |        - |\n"
        "| 0.5 to 0.6  |     0 |         - |        - |\n"
        "| 0.6 to 0.7  |     0 |         - |        - |\n"
        "| 0.7 to 0.8  |     0 |         - |        - |\n"
        "| 0.8 to 0.9  |    12 |     0.850 |    1.000 |\n"
        "| 0.9 to 1.0  |     0 |         - |        - |\n"
        "\n"
        "Expected calibration error: 0.150\n"
    )
    assert err == "loading fake-1m\nquestion 1 of 2: mine.jsonl, 7\nquestion 2 of 2: mine.jsonl, line-2\n"


def test_json_is_one_object(engine: ChainEngine, questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompts", questions, "--builtin", "--limit", "1", "--max-tokens", "9", "-o", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["schema", "environment", "settings", "rows", "summary", "notes"]
    assert document["schema"] == "treeeagle-eval-head/1"
    assert document["environment"]["device"] == "cpu (2 cores, avx2)"
    assert document["settings"] == {
        "model": "fake-1m",
        "head": "fake-head",
        "bits": 16,
        "head_bits": 16,
        "lm_head_bits": 16,
        "kernels": "native",
        "context": 1000,
        "threads": None,
        "profile": None,
        "depth": 5,
        "branching": 4,
        "budgets": [4, 8, 16, 32],
        "max_tokens": 9,
        "temperature": 0.0,
        "seed": 0,
        "limit": 1,
    }
    assert [(row["name"], row["questions"]) for row in document["rows"]] == [
        ("mine.jsonl", 1),
        *((f"built-in {name}", 1) for name in ("chat", "code", "summary", "question answering", "maths")),
    ]
    summary = document["summary"]
    assert (summary["name"], summary["questions"]) == ("all", 6)
    assert summary["budgets"][0] == {
        "nodes": 4,
        "tokens": 54,
        "rounds": 24,
        "accepted": 24,
        "tokens_per_round": 2.0,
        "first_token_acceptance": 1.0,
        "acceptance_by_depth": [1.0, 0.0, 0.0, 0.0, 0.0],
    }
    calibration = summary["calibration"]
    assert (calibration["nodes"], calibration["judged"]) == (32, 36)
    assert calibration["expected_calibration_error"] == pytest.approx(0.15)
    assert [(item["from"], item["to"], item["nodes"]) for item in calibration["bins"][7:9]] == [
        (0.7, 0.8, 0),
        (0.8, 0.9, 36),
    ]
    assert calibration["bins"][7]["predicted"] is None
    assert calibration["bins"][8]["predicted"] == pytest.approx(0.85)


def test_options_reach_the_engine(engine: ChainEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """One load with slots for the largest tree, and every budget in its own shape."""
    assert run(
        "--limit", "1", "--budgets", "2,40,2", "--depth", "3", "--branching", "6", "--max-tokens", "5", "--bits",
        "8", "--threads", "1", "--kernels", "native", "--context", "900", "--temperature", "0.7", "--seed", "5",
        "--head", "some/head", "--model", "m", "--head-bits", "8", "--lm-head-bits", "16",
    ) == 0  # fmt: skip
    (settings,) = engine.settings
    assert (settings.nodes, settings.depth, settings.branching) == (40, 3, 6)
    assert (settings.model, settings.head, settings.bits) == ("m", "some/head", 8)
    assert (settings.threads, settings.kernels, settings.context) == (1, "native", 900)
    assert (settings.head_bits, settings.lm_head_bits) == (8, 16)
    assert [tree.nodes for _, tree in engine.calls] == [2, 40] * 5
    assert {(tree.depth, tree.branching) for _, tree in engine.calls} == {(3, 6)}
    params = engine.calls[0][0]
    assert (params.temperature, params.seed, params.max_tokens) == (0.7, 5, 5)
    assert params.stop_ids == {0, 1}  # the tokenizer's and the model's
    assert "· temperature 0.7, seed 5 ·" in capsys.readouterr().out


def test_answers_without_a_round_are_shown_as_not_measured(
    engine: ChainEngine, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.quiet = True
    assert run("--prompts", questions, "--budgets", "4") == 0
    out = capsys.readouterr().out
    assert "| all        |         2 |      2 |       - |\n" in out
    assert "| all        |      0 |           - |\n" in out
    assert out.endswith("Expected calibration error: -\n")


def test_a_failing_head_is_told(
    engine: ChainEngine, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.failing = True
    arguments = ("--prompts", questions, "--budgets", "4", "--max-tokens", "5", "--limit", "1")
    note = "4 rounds fell back to plain decoding because the head gave non-finite scores"
    assert run(*arguments) == 0
    assert capsys.readouterr().out.endswith(f"Expected calibration error: -\n\n- {note}\n")
    assert run(*arguments, "-o", "json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["notes"] == [note]
    assert f"note: {note}\n" in err


def test_ctrl_c_keeps_whole_questions_and_exits_with_130(
    engine: ChainEngine, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupt_at = 4  # the second question's second budget
    assert (
        run("--prompts", questions, "--builtin", "--budgets", "4,8", "--max-tokens", "9", "-o", "json") == 130
    )
    document = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["questions"]) for row in document["rows"]] == [("mine.jsonl", 1)]
    assert [entry["tokens"] for entry in document["summary"]["budgets"]] == [9, 9]
    assert document["notes"] == ["interrupted: the figures hold 1 of 22 questions"]


def test_a_target_without_a_head_is_one_sentence(
    engine: ChainEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.has_head = False
    assert run() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: there is no draft head for fake-1m on this machine\n hint: name one with --head\n" in err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_plot_is_drawn_and_told(
    engine: ChainEngine, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompts", questions, "--max-tokens", "9", "--plot", "head.svg") == 0
    assert "<svg" in Path("head.svg").read_text(encoding="utf-8")
    assert capsys.readouterr().err.endswith("drawn to head.svg\n")


def test_a_missing_matplotlib_is_said_before_anything_is_loaded(
    engine: ChainEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: None)
    assert run("--plot", "head.svg") == 2
    assert "error: --plot needs matplotlib, which is not installed" in capsys.readouterr().err
    assert engine.settings == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-o", "csv"), 2, "error: --output 'csv' is not a format of eval-head\n hint: use md or json\n"),
        (
            ("--budgets", "4,x"),
            2,
            "error: --budgets '4,x' is not a list of whole numbers\n hint: use numbers",
        ),
        (("--budgets", ""), 2, "error: --budgets '' is not a list of whole numbers"),
        (("--budgets", "0,4"), 2, "error: nodes is 0, which is out of range\n hint: use 1 to 256\n"),
        (("--budgets", "4,300"), 2, "error: nodes is 300, which is out of range\n hint: use 1 to 256\n"),
        (("--depth", "0"), 2, "error: depth is 0, which is out of range\n hint: use 1 to 32\n"),
        (("--branching", "65"), 2, "error: branching is 65, which is out of range\n hint: use 1 to 64\n"),
        (("--limit", "0"), 2, "error: --limit is 0, which is out of range\n hint: use 1 or more\n"),
        (("--max-tokens", "0"), 2, "error: max-tokens is 0, which is out of range\n hint: use 1 or more\n"),
        (("--temperature", "-1"), 2, "error: temperature is -1.0, which is out of range"),
        (("--bits", "5"), 2, "error: --bits is 5"),
        (("--head", "none"), 2, "error: --head none leaves nothing to evaluate"),
        (("--plot", "head.pdf"), 2, "error: --plot head.pdf is neither PNG nor SVG"),
        (("--prompts", "absent.jsonl"), 1, "error: cannot read the prompts absent.jsonl"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    engine: ChainEngine,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert engine.settings == []
