"""docs/replay_controller.py: what it plays are the rounds that the models have, at the costs that it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_models import tiny_engine

from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.errors import InputError
from treeeagle_edge.kernels.native.loader import problem
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams

needs_native = pytest.mark.skipif(problem() is not None, reason=f"no native kernels: {problem()}")
Script = Callable[[str], ModuleType]
PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8), (16, 18, 33, 9, 8)]
RECORDED = TreeShape(depth=5, branching=4, nodes=68)  # 4 children of the root, and 16 of each level
COSTS = CostTable((1, 8, 64), (1.0, 1.2, 6.0), 0.05, 0.03)
QUIET = {"other": 0.1, "noise": 0.0, "seed": 0}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine() -> Any:
    """A random model, whose head is right now and then."""
    return tiny_engine(shape=TreeShape(depth=5, branching=4, nodes=64))


def recorded(
    script: Script, engine: Any, prompt: tuple[int, ...], **params: Any
) -> tuple[Any, SamplingParams]:
    chosen = SamplingParams(max_tokens=48, **params)
    case = script("measuring.runs").PromptIds("chat", "a", prompt)
    return script("measuring.drafts").record(engine.target, engine.head, case, chosen, RECORDED), chosen


def trees(rounds: tuple[Round, ...]) -> list[tuple[Any, ...]]:
    return [(each.tree.tokens, each.tree.parents, each.walked, each.ids) for each in rounds if each.tree]


def test_fixed_trees_are_played_as_the_engine_has_them(script: Script, engine: Any) -> None:
    decode, arm = script("measuring.timing").decode, script("measuring.replay").Arm
    walked = 0
    for prompt in PROMPTS:
        answer, params = recorded(script, engine, prompt)
        assert answer.text == decode(engine, prompt, params, speculate=False).ids
        for depth, nodes in ((1, 1), (3, 3), (4, 8), (5, 16)):
            shape = TreeShape(depth, 4, nodes)
            real = decode(engine, prompt, params, tree=shape)
            played = arm(shape, COSTS, **QUIET).answer(answer, params)
            assert trees(played.rounds) == trees(real.rounds)
            assert played.tokens_per_round == real.tokens_per_round
            walked += sum(each.accepted for each in played.rounds)
    assert walked > 0


def test_an_answer_ends_at_the_same_stop_token(script: Script, engine: Any) -> None:
    decode, arm = script("measuring.timing").decode, script("measuring.replay").Arm
    whole, _ = recorded(script, engine, PROMPTS[0])
    answer, params = recorded(script, engine, PROMPTS[0], stop_ids=frozenset({whole.text[20]}))
    assert len(answer.text) <= 21
    shape = TreeShape(4, 4, 8)
    real = decode(engine, PROMPTS[0], params, tree=shape)
    played = arm(shape, COSTS, **QUIET).answer(answer, params)
    assert trees(played.rounds) == trees(real.rounds)
    assert played.ids == answer.text


@pytest.mark.parametrize("lookup", [True, False])
def test_adaptive_trees_are_played_as_the_models_have_them(script: Script, engine: Any, lookup: bool) -> None:
    """At the same assumed costs, with a controller that learns from one answer to the next."""
    play, arm = script("measuring.clock").play, script("measuring.replay").Arm
    shape = TreeShape(5, 4, 32, adaptive=True, lookup=lookup)
    real, played = (arm(shape, COSTS, other=0.1, noise=0.05, seed=3) for _ in range(2))
    nodes = looked_up = 0
    for prompt in PROMPTS * 2:
        answer, params = recorded(script, engine, prompt)
        one = play(engine.target, engine.head, prompt, params, shape, real.clock, real.controller)
        other = played.answer(answer, params)
        assert trees(one.rounds) == trees(other.rounds)
        assert one.decode_s == other.decode_s
        nodes += sum(each.drafted for each in one.rounds)
        looked_up += sum(each.looked_up_accepted for each in one.rounds)
    assert nodes > 0
    assert (looked_up > 0) is lookup
    assert real.clock.levels == played.clock.levels


def test_children_that_were_not_recorded_are_counted(script: Script, engine: Any) -> None:
    answer, params = recorded(script, engine, PROMPTS[0])
    few = [tree.part(range(1, 3)) for tree in answer.trees]
    arm = script("measuring.replay").Arm(TreeShape(4, 4, 8), COSTS, **QUIET)
    found = arm.answer(type(answer)(answer.case, answer.text, tuple(few)), params)
    assert found.ids == answer.text
    assert 0 < arm.unknown <= arm.asked


def test_a_round_takes_what_the_costs_say(script: Script, engine: Any) -> None:
    answer, params = recorded(script, engine, PROMPTS[1])
    arm = script("measuring.replay").Arm(TreeShape(2, 4, 7), COSTS, **QUIET)
    arm.repeat("chat", [answer], params)
    ((found,),) = arm.answers["chat"]
    *full, _ = [each for each in found.rounds if each.drafted]
    for each in full:
        assert (each.draft_s, each.verify_s, each.sample_s) == pytest.approx((0.08, 1.2, 0.1))
    rounds = found.rounds
    assert found.decode_s == sum(each.draft_s + each.verify_s + each.sample_s for each in rounds)
    assert arm.means("chat")["tokens"] == found.tokens_per_round
    levels = [{0.0: 0, 0.05: 1, 0.08: 2}[round(each.draft_s, 9)] for each in rounds]
    assert arm.means("chat")["levels"] == sum(levels) / len(rounds)


def test_a_recording_is_read_as_it_was_written(script: Script, engine: Any, tmp_path: Path) -> None:
    drafts = script("measuring.drafts")
    answers = tuple(recorded(script, engine, prompt)[0] for prompt in PROMPTS)
    made = drafts.Recording("tiny", 32, 48, frozenset({0, 2}), RECORDED, COSTS, answers)
    drafts.save(tmp_path / "drafts.npz", made)
    assert drafts.load_recording(tmp_path / "drafts.npz") == made


@needs_native
def test_recorded_checked_and_played(
    run: Callable, demo_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "drafts.npz"
    options = (
        "--bits",
        "8",
        "--tokens",
        "10",
        "--threads",
        "1",
        "--per-scenario",
        "1",
        "--check",
        "4x3,adaptive",
    )
    code, found = run("replay_controller", "--record", str(file), "--fixed", "2x2", *options)
    assert code == 0
    assert [row[0] for row in found["What is played and what the models do"]] == ["4x3", "adaptive"]
    assert found["results"][0]["value"] == 0
    assert set(found["costs"]) == {"rows", "verify", "extend", "step", "steady"}
    assert "| geometric mean " in capsys.readouterr().out

    def played(verify: str) -> dict[str, Any]:
        costs = ("--verify", verify, "--draft", "0.2,0.1", "--fixed", "2x2,8x4", "--repetitions", "2")
        code, found = run("replay_controller", "--play", str(file), *costs)
        assert code == 0
        return found["Replayed, 8 bits"]

    free, dear = played("1:2.4,64:2.4"), played("1:2.4,2:24,64:2400")
    assert played("1:2.4,64:2.4") == free  # seeded
    assert list(free["scenarios"]) == ["chat", "code", "summary", "question answering", "maths"]
    for scenario, row in free["scenarios"].items():
        assert set(row["speeds"]) == {"plain", "adaptive", "no lookup", "2x2", "8x4"}
        assert row["speeds"]["plain"] == pytest.approx(1000 / (2.4 + 0.1))
        assert row["share"] == pytest.approx(row["speeds"]["adaptive"] / row["speeds"][row["best"]])
        assert len(row["by_repetition"]["adaptive"]) == 2
        assert row["rounds"]["adaptive"]["nodes"] > dear["scenarios"][scenario]["rounds"]["adaptive"]["nodes"]
        assert dear["scenarios"][scenario]["best"] == "plain"
    assert free["means"]["share"] > dear["means"]["share"]


def test_prompts_that_cannot_be_recorded_are_refused(script: Script, engine: Any) -> None:
    """The engine's context is 128 tokens. An answer that ends at once has no round."""
    drafts, case = script("measuring.drafts"), script("measuring.runs").PromptIds("chat", "long", PROMPTS[0])

    def empty(tokens: int) -> Any:
        return drafts.Recording("tiny", 32, tokens, frozenset(), RECORDED, COSTS)

    with pytest.raises(InputError, match="long has 8 tokens; with 121 of an answer they are more than 128"):
        drafts.record_all(engine, [case], empty(121))
    with pytest.raises(InputError, match="no answer has more than one token"):
        drafts.record_all(engine, [case], empty(1))
    assert len(drafts.record_all(engine, [case], empty(120)).answers[0].text) == 120


def test_what_cannot_be_played_is_refused(
    run: Callable, script: Script, engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "drafts.npz", tmp_path / "other.txt"
    drafts = script("measuring.drafts")
    answers = (recorded(script, engine, PROMPTS[0])[0],)
    drafts.save(file, drafts.Recording("tiny", 32, 48, frozenset(), RECORDED, COSTS, answers))
    other.write_text("drafts", encoding="utf-8")
    for options, code, words in (
        (("--play", str(other)), 1, "holds no recorded drafts"),
        (("--play", str(file), "--fixed", "8x6"), 2, "the tree 8x6 is larger than the recorded ones"),
        (("--play", str(file), "--costs", str(other)), 1, "holds no costs of passes"),
        (("--play", str(file), "--verify", "1:2"), 2, "--verify and --draft belong together"),
        (("--play", str(file), "--verify", "2:2", "--draft", "1,1"), 2, "are no costs in milliseconds"),
        (("--play", str(file), "--verify", "1:x", "--draft", "1,1"), 2, "are no costs in milliseconds"),
    ):
        assert run("replay_controller", *options)[0] == code
        assert words in capsys.readouterr().err
