"""The program around the commands: help, version, complaints, exit codes."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from treeeagle_edge import __version__
from treeeagle_edge.cli.app import main
from treeeagle_edge.cli.options import MachineOptions, TreeOptions, run_settings
from treeeagle_edge.cli.sampling_options import SamplingChoices, stop_strings
from treeeagle_edge.errors import UsageError
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.widths import choose_widths

RUN = [sys.executable, "-m", "treeeagle_edge.cli.app"]


def test_help_is_quick_and_imports_nothing_heavy():
    """Well under half a second of work: neither torch nor transformers, nor anything else that takes its time."""
    heavy = {
        "torch",
        "transformers",
        "numpy",
        "rich",
        "prompt_toolkit",
        "pydantic_core",
        "jinja2",
        "tokenizers",
        "gguf",
    }
    code = (
        "import sys; from treeeagle_edge.cli.app import main; assert main(['--help']) == 0; "
        "sys.stderr.write(' '.join(sorted(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # seconds of work
    assert "chat" in run.stdout
    assert "profile" in run.stdout
    assert "bench" in run.stdout
    assert not heavy & set(run.stderr.split())


@pytest.mark.parametrize("command", ["chat", "bench", "eval-head", "profile"])
def test_help_of_each_command(command, capsys):
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert "--model" in out
    assert err == ""
    assert "\033" not in out


def test_alone_it_shows_help(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_help_cuts_no_summary_short(capsys):
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.split("Commands:\n")[1]
    assert "..." not in commands
    assert all(line.endswith(".") for line in commands.splitlines())


def test_a_folder_that_was_removed_under_the_program(tmp_path):
    """PyTorch's libraries would end the program with a riddle about themselves."""
    gone = tmp_path / "gone"
    gone.mkdir()
    run = subprocess.run(
        ["sh", "-c", 'cd "$1" && rmdir "$1" && shift && exec "$@"', "sh", str(gone), *RUN, "chat", "-p", "x"],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (3, "")
    assert run.stderr == "error: the folder this was started in is gone\n hint: change to one that is there\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"treeeagle {__version__}\n"


AT_BOTH_ENDS = [
    pytest.param("sys.meta_path.insert(0, Early())", 130, "", id="while it is imported"),
    pytest.param("app.main = lambda: Late() and 0", 0, "", id="while a model is given back"),
    pytest.param(
        "app.main = lambda: Faulty() and 0", 0, "ZeroDivisionError", id="but a fault there is shown"
    ),
]


@pytest.mark.parametrize(("prepare", "code", "shown"), AT_BOTH_ENDS)
def test_ctrl_c_at_either_end_shows_no_traceback(prepare, code, shown):
    program = f"""
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Early:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Faulty:
    def __del__(self):
        1 / 0

if "app" in {prepare!r}:
    from treeeagle_edge.cli import app
{prepare}
runpy.run_module("treeeagle_edge", run_name="__main__")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == code
    assert shown in run.stderr if shown else run.stderr == ""


def test_help_says_the_widths_that_are_chosen(capsys):
    assert main(["chat", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    usual, native, floats = (
        choose_widths(bits, "cpu", native=kernels) for bits, kernels in ((8, False), (8, True), (32, False))
    )
    on_card = choose_widths(8, "cuda:0", native=False)
    assert (
        f"The draft head. [default: {usual.head}; {native.head} on native kernels; {floats.head} at --bits 32]"
        in text
    )
    assert (
        f"output matrix. [default: {on_card.lm_head}; {usual.lm_head} on the CPU at --bits 4 or 8;"
        f" {floats.lm_head} at --bits 32]" in text
    )


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["caht"], "there is no command caht", "did you mean chat?"),
        (["xyzzy"], "there is no command xyzzy", "use one of chat, pull, profile, bench"),
        (["chat", "--temprature", "1"], "there is no option --temprature", "did you mean --temperature?"),
        (["chat", "--zzz"], "there is no option --zzz", "treeeagle chat --help lists the options"),
        (["--zzz"], "there is no option --zzz", "treeeagle --help lists the options"),
        (["chat", "hello"], "got unexpected extra argument", "a prompt goes behind -p"),
        (["chat", "-p"], "option '-p' requires an argument", "treeeagle chat --help lists the options"),
        (["bench", "--prompts"], "option '--prompts' requires an argument", "treeeagle bench --help lists"),
        (["profile", "--model"], "option '--model' requires an argument", "treeeagle profile --help lists"),
        (["chat", "--temperature", "hot"], "--temperature takes a number", "treeeagle chat --help"),
        (["chat", "--threads", "999999"], "--threads is 999999, which is out of range", "use 1 to 256"),
        (["chat", "--nodes", "-1"], "nodes is -1, which is out of range", "256, or 0 to have it chosen"),
        (["chat", "--bits", "x"], "--bits takes a whole number", "treeeagle chat --help lists the options"),
        (["chat", "--kernels", "cuda"], "there are no kernels named 'cuda'", "use native or torch"),
        (["bench", "--kernels", "cuda"], "there are no kernels named 'cuda'", "use native or torch"),
        (["chat", "--bits", "5"], "--bits is 5, which is not a width we run", "use 4, 8, 16 or 32"),
        (["chat", "--top-p", "2"], "top-p is 2.0, which is out of range", "use 0 to 1"),
        (
            ["chat", "--repetition-penalty", "0"],
            "repetition-penalty is 0.0, which is out of range",
            "use 0.1 to 10",
        ),
        (["chat", "--max-tokens", "0"], "max-tokens is 0, which is out of range", "use 1 or more"),
        (
            ["chat", "--top-k", str(2**64 + 1)],
            f"top-k is {2**64 + 1}, which is out of range",
            "use 0 (off) or a positive number below 2^31",
        ),
        (["bench", "--max-tokens", "1"], "--max-tokens is 1, which leaves nothing to time", "use 2 or more"),
        (
            ["eval-head", "--max-tokens", "1"],
            "--max-tokens is 1, which leaves nothing to draft",
            "use 2 or more",
        ),
        (["chat", "--nodes", "257"], "nodes is 257, which is out of range", "256, or 0 to have it chosen"),
        (["chat", "--context", "1"], "--context is 1, which is out of range", "use 2 or more"),
        (["chat", "--threads", "0"], "--threads is 0, which is out of range", "use 1 to 256"),
        (["chat", "--model", ""], "--model is empty", "give a value, or leave the option out"),
        (["bench", "--head", " "], "--head is empty", "give a value, or leave the option out"),
        (["profile", "--profile", ""], "--profile is empty", "give a value, or leave the option out"),
        (["chat", "--stop", ""], "--stop is empty", "give the text to stop at"),
        (["chat", "--raw", "--system", "x"], "--system has no place in --raw", "leave one of them out"),
        (
            ["chat", "--json", "--markdown", "-p", "x"],
            "--json and --markdown exclude",
            "leave one of them out",
        ),
    ],
)
def test_a_wrong_command_line_gets_a_sentence_and_a_hint(arguments, sentence, hint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    if "--stop" in arguments:
        arguments = [*arguments, "-p", "x"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith(f"error: {sentence}")
    assert not first.endswith(".")
    assert second.startswith(" hint: ")
    assert hint in second
    assert "\033" not in err


@pytest.mark.parametrize(
    ("option", "value", "sentence", "hint"),
    [
        ("--tokens", "0", "--tokens is 0, which is out of range", "use 1 or more"),
        ("--tokens", "-5", "--tokens is -5, which is out of range", "use 1 or more"),
        ("--batch-tokens", "0", "--batch-tokens is 0, which is out of range", "use 1 or more"),
        (
            "--dialogues",
            "1",
            "--dialogues is 1, which leaves none to judge the head by",
            "use 2 or more",
        ),
        (
            "--draft-vocab",
            "1",
            "--draft-vocab is 1, which leaves too little to draft",
            "use 64 or more",
        ),
        ("--draft-vocab", "-1", "--draft-vocab is -1, which leaves too little to draft", "use 64 or more"),
        ("--unroll", "0", "--unroll is 0, which is out of range", "use 1 to 16"),
        ("--unroll", "17", "--unroll is 17, which is out of range", "use 1 to 16"),
        ("--length", "31", "--length is 31, which is too short for a dialogue", "use 32 or more"),
        ("--seed", "-1", "--seed is -1, which is out of range", "use 0 to 9223372036854775807"),
        ("--save-every", "0", "--save-every is 0, which is out of range", "use more than 0"),
        ("--save-every", "-3", "--save-every is -3, which is out of range", "use more than 0"),
        ("--passes", "nan", "--passes is nan, which is out of range", "use more than 0"),
        ("--minutes", "inf", "--minutes is inf, which is out of range", "use more than 0"),
        ("--learning-rate", "nan", "--learning-rate is nan, which is out of range", "use 0.0003 to 0.003"),
        ("--target", "", "--target is empty", "name the model to train a head for"),
        ("--init", " ", "--init is empty", "name a head, or leave the option out"),
    ],
)
def test_training_refuses_what_cannot_be_before_anything_is_done(
    option, value, sentence, hint, tmp_path, capsys
):
    """Before PyTorch is imported, let alone a model loaded; `--out` stays as it was."""
    out = tmp_path / "head"
    assert main(["train", "--target", "toy", "--out", str(out), option, value]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {sentence}"
    assert second.startswith(f" hint: {hint}")
    assert not out.exists()


def test_it_runs_as_a_program():
    run = subprocess.run([*RUN, "caht"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")


def test_settings_keep_what_was_not_said_open():
    settings = run_settings(MachineOptions(bits=8), TreeOptions(nodes=0))
    assert (settings.bits, settings.nodes, settings.depth, settings.speculate) == (8, 0, None, True)
    assert run_settings(MachineOptions(), TreeOptions(no_spec=True)).speculate is False
    assert [
        run_settings(MachineOptions(kernels=name)).kernels for name in (None, "auto", "native", "torch")
    ] == [
        *(None, None),
        *("native", "torch"),
    ]


def test_choices_lie_over_defaults():
    chosen = SamplingChoices(temperature=0.0, seed=3).resolve(
        SamplingParams(temperature=0.6, top_p=0.9, seed=1)
    )
    assert (chosen.temperature, chosen.top_p, chosen.seed) == (0.0, 0.9, 3)
    with pytest.raises(UsageError):
        SamplingChoices(min_p=3.0)
    assert stop_strings(["a", "b"]) == ("a", "b")
