"""`treeeagle train` on a tiny target: what it leaves, how it goes on after a stop, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeeagle_edge.checkpoint.head import open_head
from treeeagle_edge.checkpoint.opening import open_checkpoint
from treeeagle_edge.cli.app import main

SMALL = (
    "--bits", "32", "--threads", "1", "--tokens", "16000", "--dialogues", "16", "--length", "224", "--unroll", "3",
    "--draft-vocab", "200", "--batch-tokens", "256", "--passes", "4", "--seed", "5", "--save-every", "1e-6",
)  # fmt: skip


def arguments(target: Path, out: Path, *more: str) -> list[str]:
    return ["train", "--target", str(target), "--out", str(out), *SMALL, *more]


def program(target: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "treeeagle_edge.cli.app", *arguments(target, out, *more)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def unbroken(deep_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "head"
    assert main(arguments(deep_checkpoint, out)) == 0
    return out


@pytest.fixture
def written(unbroken: Path, tmp_path: Path) -> Path:
    """An --out in which the dialogues are written, and nothing else is done."""
    out = tmp_path / "head"
    shutil.copytree(unbroken / "work" / "features", out / "work" / "features")
    shutil.copy(unbroken / "work" / "data.json", out / "work")
    return out


def test_it_leaves_a_head_that_opens_and_a_record(unbroken: Path, deep_checkpoint: Path) -> None:
    opened = open_head(unbroken, open_checkpoint(deep_checkpoint).config)
    assert opened.config.draft_vocab_size == 200
    assert opened.config.taps == (2, 3, 3)
    record = json.loads((unbroken / "training.json").read_text(encoding="utf-8"))
    assert record["training"]["seed"] == 5
    first, last = record["held_out"][0], record["held_out"][-1]
    assert last["loss"][0] < first["loss"][0]  # it learns
    assert (unbroken / "training.png").stat().st_size > 10_000


def test_killed_at_random_points_it_ends_as_if_never_stopped(
    unbroken: Path, deep_checkpoint: Path, tmp_path: Path
) -> None:
    """Expect the same bits: a stop may fall into writing, into reading the corpus, or into training."""
    kills = 0
    out, chance = tmp_path / "head", random.Random(int(time.time()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(5):
        process = subprocess.Popen(program(deep_checkpoint, out), env=environment, stderr=subprocess.PIPE)
        assert process.stderr is not None
        for _ in range(chance.randint(1, 6)):
            process.stderr.readline()  # of progress: it stands somewhere in one of the stages
        time.sleep(chance.uniform(0.0, 0.3))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = subprocess.run(program(deep_checkpoint, out), env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert kills
    assert same(out, unbroken)


def test_ctrl_c_says_how_to_go_on(
    written: Path, deep_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treeeagle_edge.training.run.open_corpus", interrupted)
    assert main(arguments(deep_checkpoint, written)) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_finished_run_is_not_done_again(
    unbroken: Path, deep_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights(unbroken)
    assert main(arguments(deep_checkpoint, unbroken)) == 0
    talk = capsys.readouterr().err
    assert "going on from step" in talk
    assert "dialogues: shard" not in talk
    after = weights(unbroken)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_settings_do_not_mix_with_what_is_there(
    unbroken: Path, deep_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(deep_checkpoint, unbroken, "--seed", "6")) == 1
    assert "features of another run: its seed is 5" in capsys.readouterr().err
    assert main(arguments(deep_checkpoint, unbroken, "--learning-rate", "0.002")) == 1
    assert "other settings" in capsys.readouterr().err


def test_two_processes_take_the_steps_of_one(unbroken: Path, deep_checkpoint: Path, tmp_path: Path) -> None:
    """The batch is shared out, so one process with the whole batch and two with half of it each learn the same."""
    pytest.importorskip("accelerate")
    out = tmp_path / "head"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0"]  # any that is free: two runs of the tests may do this at once
    command = [*launch, "-m", "treeeagle_edge.cli.app", *arguments(deep_checkpoint, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (_record(unbroken)["processes"], _record(out)["processes"]) == (1, 2)
    assert len(_record(out)["loss"]) > 4
    pairs = zip(_record(out)["loss"], _record(unbroken)["loss"], strict=True)
    assert all(step == other and abs(a - b) < 1e-3 * b for (step, a), (other, b) in pairs)


def _record(out: Path) -> dict:
    return json.loads((out / "training.json").read_text(encoding="utf-8"))


def test_it_learns_from_a_file(deep_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "dialogues.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count from {i}."},
                {"role": "assistant", "content": _count(i)},
            ]
        }
        for i in range(70)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out = tmp_path / "head"
    assert main(arguments(deep_checkpoint, out, "--data", str(file), "--passes", "1")) == 0
    record = _record(out)
    assert record["data"]["train_dialogues"] + record["data"]["held_out_dialogues"] > 40
    assert record["data"]["answer_tokens"] > 70


def _count(start: int) -> str:
    return " ".join(str(start * 7 + step) for step in range(5))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not JSON"),
        ("{}", "line 2 has neither messages nor conversations"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "line 2 has the role 'boss'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2 does not take turns"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "line 2 has a message without text"),
    ],
)
def test_a_bad_line_is_named(
    line: str, sentence: str, deep_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    good = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    file.write_text(f"{json.dumps(good)}\n{line}\n", encoding="utf-8")
    assert main(arguments(deep_checkpoint, tmp_path / "head", "--data", str(file))) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--format", "gguf"], "not a layout we write"),
        (["--regenerate"], "--regenerate needs questions"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--length", "8"], "too short for a dialogue"),
        (["--learning-rate", "3"], "out of range"),
    ],
)
def test_options_out_of_range(
    more: Sequence[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, tmp_path / "head", *more)) == 2
    assert sentence in capsys.readouterr().err


def test_dialogues_longer_than_the_target_reads_are_refused_before_anything_is_written(
    deep_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, longest = tmp_path / "head", open_checkpoint(deep_checkpoint).config.max_position
    assert main(arguments(deep_checkpoint, out, "--length", str(longest + 1))) == 2
    assert f"reads {longest:,} tokens at most\n hint: use {longest} or less" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("init", "sentence"),
    [
        ("/nowhere/head", "no such file or folder: /nowhere/head"),
        ("none", "--init none is no head to start from"),
        ("of-other", "fc.weight"),
        ("with-embedding", "has an embedding of its own, which training cannot go on from"),
    ],
)
def test_a_head_that_cannot_be_started_from_is_refused_before_anything_is_written(
    init: str, sentence: str, unbroken: Path, deep_checkpoint: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tensors = weights(unbroken)
    vocabulary, width = load_file(deep_checkpoint / "model.safetensors")["model.embed_tokens.weight"].shape
    more = {
        "with-embedding": {"embed_tokens.weight": torch.ones(vocabulary, width)},
        "of-other": {"fc.weight": torch.ones(width, width)},
    }
    if init in more:
        shutil.copytree(unbroken, tmp_path / init, ignore=shutil.ignore_patterns("work"))
        save_file({**tensors, **more[init]}, tmp_path / init / "model.safetensors")
        init = str(tmp_path / init)
    out = tmp_path / "head"
    assert main(arguments(deep_checkpoint, out, "--init", init)) == 1
    assert sentence in capsys.readouterr().err
    assert not out.exists()


def test_what_is_excluded_is_read_before_anything_is_written(
    deep_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip in its name should not wait for hours of writing."""
    out = tmp_path / "head"
    assert main(arguments(deep_checkpoint, out, "--exclude", str(tmp_path / "nothing.jsonl"))) == 1
    assert "nothing.jsonl: no such file or directory" in capsys.readouterr().err
    assert not out.exists()


def test_a_file_is_no_place_for_a_head(
    deep_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "head").write_text("mine")
    assert main(arguments(deep_checkpoint, tmp_path / "head")) == 2
    assert f"error: --out {tmp_path / 'head'} is no folder\n hint: " in capsys.readouterr().err


def test_it_goes_on_from_a_head(unbroken: Path, written: Path, deep_checkpoint: Path) -> None:
    """The first loss is where the other head stood, not where a fresh one begins."""
    assert main(arguments(deep_checkpoint, written, "--init", str(unbroken), "--passes", "0.1")) == 0
    assert _record(written)["held_out"][0]["loss"][0] < _record(unbroken)["held_out"][0]["loss"][0]


def test_a_full_disk_keeps_the_last_checkpoint(
    unbroken: Path, written: Path, deep_checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    real, saves = torch.save, []

    def full_after_three(*args: object) -> None:
        saves.append(1)
        if len(saves) > 3:
            raise RuntimeError("PytorchStreamWriter failed writing file")
        real(*args)

    monkeypatch.setattr(torch, "save", full_after_three)
    assert main(arguments(deep_checkpoint, written)) == 3
    assert "cannot be written" in capsys.readouterr().err
    assert not list((written / "work").glob("*.part"))
    monkeypatch.setattr(torch, "save", real)
    assert main(arguments(deep_checkpoint, written)) == 0
    assert "going on from step 3" in capsys.readouterr().err
    assert same(written, unbroken)


def test_a_loss_that_is_not_finite_stops_with_a_sentence(
    written: Path, deep_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from treeeagle_edge.training import trainer

    real, calls = trainer.lesson_loss, []

    def spoilt(*args: object) -> torch.Tensor:
        calls.append(1)
        return real(*args) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(trainer, "lesson_loss", spoilt)
    assert main(arguments(deep_checkpoint, written)) == 3
    assert "the loss of step 5 is not finite" in capsys.readouterr().err
    state = torch.load(written / "work" / "training.ckpt", weights_only=True)
    assert state["step"] == 4


def test_too_little_disk_is_said_beforehand(
    deep_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert main(arguments(deep_checkpoint, tmp_path / "head")) == 3
    assert "the features need about" in capsys.readouterr().err
