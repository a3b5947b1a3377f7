"""Slash commands of the chat, as transcripts over a scripted engine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from chat_fakes import ScriptEngine, script
from chat_typed import prompt_text

from treeeagle_edge.chat.answer import Speculation
from treeeagle_edge.chat.history import last_session_path, load_session
from treeeagle_edge.cli.line_input import complete_slash
from treeeagle_edge.cli.slash import COMMANDS, by_name, help_lines
from treeeagle_edge.cli.stats import totals_lines
from treeeagle_edge.errors import InputError
from treeeagle_edge.rounds import TreeShape


@pytest.mark.parametrize(
    ("entry", "sentence", "hint"),
    [
        ("/halp", "there is no command /halp", "did you mean /help?"),
        ("/usr/bin", "there is no command /usr/bin", "// sends a message that begins with a slash"),
        ("/", "there is no command /", "/help lists the commands"),
        ("/clear all", "/clear takes no argument", "type /clear alone"),
        ("/set temprature 1", "there is no setting temprature", "did you mean temperature?"),
        ("/set temperature", "a value for temperature is missing", "use /set temperature VALUE"),
        ("/set temperature hot", "temperature is 'hot', which is not a number", "use /set temperature"),
        ("/set temperature 99", "temperature is 99.0, which is out of range", "use 0 to 10"),
        ("/set top-k 1.5", "top-k is '1.5', which is not a whole number", "use /set top-k"),
        ("/set nodes 17", "17 nodes need more slots than the 16 reserved", "use at most 16"),
        ("/set nodes 0", "the tree was not started adaptive", "start with --nodes 0"),
        ("/set nodes 999", "nodes is 999, which is out of range", "use 1 to 256\n"),
        ("/set depth 0", "depth is 0, which is out of range", "use 1 to 32"),
        ("/set spec maybe", "spec is 'maybe', which is no switch", "use /set spec on or /set spec off"),
        ("/set wrap maybe", "wrap is 'maybe', which is no switch", "use /set wrap on or /set wrap off"),
        ("/stats maybe", "/stats does not know 'maybe'", "use /stats, /stats on or /stats off"),
        ("/retry", "there is no message to try again", "write one first"),
        ("/undo", "there is nothing to take back", "write a message first"),
        ("/tree", "there is no round to draw yet", "write a message first"),
        ("/save", "a file name is missing", "use /save FILE"),
        ("/save " + 300 * "a", 300 * "a" + " cannot be written: file name too long", "choose another place"),
        ("/load nowhere.json", "nowhere.json cannot be read", "check the path"),
        ("/read nowhere.txt", "nowhere.txt cannot be read", "check the path"),
        ("/read ~nobody-of-this-name/x", "~nobody-of-this-name/x cannot be read", "check the path"),
        ("/save ~nobody-of-this-name/x", "there is no folder ~nobody-of-this-name", "choose another place"),
        ("/system caf\udce9", "the system prompt is not valid UTF-8", "check the terminal's encoding"),
        ("/read 'half", "the quotes around the file name do not match", "use /read FILE"),
        ("/system @nowhere.txt", "nowhere.txt cannot be read", "check the path"),
    ],
)
def test_a_wrong_command_is_an_error_line(repl, entry, sentence, hint):
    """It is never sent to the model, and the chat goes on."""
    result = repl(entry, "hello")
    assert f"error: {sentence}" in result.err
    assert hint in result.err
    assert len(result.engine.prompts) == 1
    assert result.code == 0


def test_help_and_completion_come_from_the_table(repl):
    result = repl("/help")
    for command in COMMANDS:
        assert f"/{command.name}" in result.err
        assert command.help in result.err
    assert set(by_name()) >= {
        "help",
        "exit",
        "bye",
        "quit",
        "clear",
        "retry",
        "undo",
        "system",
        "set",
        "stats",
    }
    assert set(by_name()) >= {"save", "load", "read", "info", "tree"}
    assert [word for word, _, _ in complete_slash("/")] == [f"/{name}" for name in by_name()]
    assert [word for word, _, _ in complete_slash("/re")] == ["/retry", "/read"]
    assert [word for word, _, _ in complete_slash("/set te")] == ["temperature"]
    assert [word for word, _, _ in complete_slash("/SET te")] == ["temperature"]
    assert [word for word, _, _ in complete_slash("/stats o")] == ["on", "off"]
    assert not list(complete_slash("hello /"))
    assert max(map(len, help_lines())) <= 100


def test_clear_keeps_the_system_prompt_and_the_old_file(repl):
    """Expectations row 43: what was cleared from the screen is still on disk."""
    result = repl("/system Be brief.", "hello", "/clear", "again")
    assert prompt_text(result).count("<|im_start|>user") == 1
    assert "Be brief." in prompt_text(result)
    files = sorted(last_session_path().parent.iterdir())
    assert sorted(load_session(path).turns[0].user for path in files) == ["again", "hello"]


def test_retry_asks_the_same_again(repl):
    result = repl("hello", "/retry", "/set seed 5", "/retry", "/set temperature 0", "/retry")
    assert [prompt_text(result, n) for n in (1, 2, 3)] == [prompt_text(result, 0)] * 3
    assert result.engine.params[0].seed != result.engine.params[1].seed
    assert result.engine.params[2].seed == 5
    assert "note: the seed is fixed" in result.err
    assert "note: temperature is 0" in result.err
    assert len(result.conversation.session.turns) == 1


def test_a_retry_that_fails_keeps_the_old_answer(repl):
    class Failing(ScriptEngine):
        def generate(self, prompt_ids, params, **options):
            if self.prompts:
                raise InputError("the engine cannot", "try something else")
            return super().generate(prompt_ids, params, **options)

    result = repl("hello", "/retry", engine=Failing([script("first")]))
    assert "error: the engine cannot\n hint: try something else" in result.err
    assert [turn.answer for turn in result.conversation.session.turns] == ["first"]


def test_undo_takes_back_message_and_answer(repl):
    result = repl("one", "two\nlines", "/undo", "three")
    assert "took back: two\n" in result.err
    assert [turn.user for turn in result.conversation.session.turns] == ["one", "three"]


def test_system_is_shown_set_and_removed(repl, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text("From a file.\n")
    result = repl(
        "/system", "/system Be brief.", "/system", f"/system @{rules}", "hi", "/system off", "/undo", "hi"
    )
    assert "there is no system prompt" in result.err
    assert "Be brief.\n" in result.err
    assert "From a file." in prompt_text(result, 0)
    assert "From a file." not in prompt_text(result, 1)


def test_settings_change_the_next_answer(repl):
    result = repl(
        "/set temperature 0.2", "/set TOP_K=40", "/set max-tokens 3", "/set nodes 4", "/set spec off", "/set", "hi",
        "/set max-tokens default", "/set spec on", "/set nodes default", "hi",
    )  # fmt: skip
    first, second = result.engine.params
    assert (first.temperature, first.top_k, first.max_tokens) == (0.2, 40, 3)
    assert second.max_tokens is None
    assert result.out.splitlines()[0] == "fir"
    assert "cut at --max-tokens" in result.err
    assert re.search(r"seed \d+\n", result.err)
    listed = result.err.split("spec is off\n")[1]
    assert re.search(r"temperature +0\.2\n", listed)
    assert re.search(r"top-p +0\.95 \(default\)\n", listed)
    assert re.search(r"seed +drawn for each answer \(default\)\n", listed)
    assert re.search(r"nodes +4\n", listed)
    assert re.search(r"spec +off\n", listed)
    assert result.conversation.tree == ScriptEngine.tree


def test_a_tree_that_is_chosen_each_round_says_so(repl):
    class Roomy(ScriptEngine):
        def check_shape(self, shape):
            """Has room for the largest tree that is chosen."""

    adaptive = TreeShape(depth=4, branching=2, nodes=32, adaptive=True)
    entries = ("/set nodes 4", "/set nodes 0", "/set depth 3", "/set nodes 999", "/set nodes 8")
    result = repl(*entries, "/set nodes default", tree=adaptive, engine=Roomy([script("hi")]))
    assert [line for line in result.err.splitlines() if re.match("nodes|depth| hint", line)] == [
        "nodes is 4",
        "nodes is at most 32, chosen each round",
        "depth is at most 3, chosen each round",
        " hint: use 1 to 256, or 0 to have it chosen",
        "nodes is 8",
        "nodes is at most 32, chosen each round",
    ]


def test_wrapping_is_a_setting(repl):
    result = repl("/set wrap off", "/set")
    assert not result.conversation.wrap
    assert re.search(r"wrap is off\n", result.err)
    assert re.search(r"wrap +off\n", result.err)
    assert repl("/set wrap off", "/set wrap on").conversation.wrap


def test_a_tree_needs_a_head(repl):
    result = repl("/set nodes 4", "/set spec on", "hi", "/info", head_name=None, tree=None)
    assert "error: nodes shapes a tree, and there is no head to draft one" in result.err
    assert "error: there is no head to draft with" in result.err


def test_stats_show_totals_and_can_be_silenced(repl):
    """Expectations row 5: rounds that fell back because the head's scores were not finite are counted and shown."""
    result = repl("hi", "/stats off", "hi", "/stats", "/stats on", "hi")
    assert result.err.count("tok/s") == 2
    assert re.search(r"answers +2\ntokens +27\nrounds +9\ntokens/round +2\.\d\d\n", result.err)
    assert re.search(
        r"accepted +16 nodes\nlooked up +0 of the nodes, .*; 0 of them accepted\ndraft failures 0\n",
        result.err,
    )


def test_a_speedup_is_shown_where_both_ways_were_measured(repl):
    """Expectations row 32: no figure is claimed from one way of decoding alone."""
    result = repl("hi", "/stats", answers=["x" * 90])
    assert "speedup        not measured: treeeagle bench compares both ways of decoding\n" in result.err
    both = Speculation(
        rounds=24, settled=56, tree_rounds=20, draft_s=0.02, verify_s=0.1, plain_rounds=4, plain_s=0.012
    )
    assert "speedup        1.30x, against the plain steps of this chat" in totals_lines(2, 60, both)


def test_no_speedup_is_claimed_beyond_the_tokens_of_a_round(repl):
    """Plain steps that were slow by chance are no measure: a tree cannot gain more than the tokens it settles."""
    slow = Speculation(
        rounds=24, settled=44, tree_rounds=20, draft_s=0.02, verify_s=0.1, sample_s=0.02, plain_rounds=4,
        plain_s=0.035,
    )  # fmt: skip
    shown = next(line for line in totals_lines(2, 44, slow) if line.startswith("speedup"))
    assert shown == (
        "speedup        at most 1.71x: the plain steps of this chat were slower than checks of a tree"
    )  # 40 tokens in 0.14 s, against 6 ms for verifying and sampling alone
    assert "speedup        1.71x, against the plain steps of this chat" in totals_lines(
        2, 44, replace(slow, plain_s=0.0239)
    )
    assert slow.gain is not None and slow.gain < (slow.settled - slow.plain_rounds) / slow.tree_rounds


def test_the_text_of_a_command_may_begin_in_its_second_line(repl, tmp_path: Path):
    (tmp_path / "note.txt").write_text("Owls fly.")
    result = repl("/system\nBe brief.\nBe kind.", f"/read {tmp_path / 'note.txt'}\nWhat does it say?")
    assert result.conversation.session.system == "Be brief.\nBe kind."
    assert "What does it say?\n\nOwls fly." in prompt_text(result)


def test_off_is_off_in_capitals_too(repl):
    result = repl("/system Be brief.", "/system OFF", "/stats Off", "/set spec OFF", "hello")
    assert result.conversation.session.system is None
    assert not result.conversation.show_stats
    assert not result.conversation.speculate


def test_a_setting_taken_back_says_what_it_is_now(repl):
    result = repl(
        "/set temperature default", "/set max-tokens default", "/set seed default", "/set top-p 0.5"
    )
    assert result.err.splitlines()[-4:] == [
        "temperature is 0.7 (default)",
        "max-tokens is up to the context (default)",
        "seed is drawn for each answer (default)",
        "top-p is 0.5",
    ]


def test_info_says_what_runs_where_and_why(repl):
    """Expectations row 46."""
    result = repl("hi", "/info")
    assert "cpu (2 cores, avx2); cpu: no NVIDIA driver was found" in result.err
    assert re.search(r"tree +8 nodes, depth 4, branching 2\n", result.err)
    assert re.search(r"kernels +native\n", result.err)
    assert re.search(r"kernels +PyTorch's\n", repl("/info", kernels="torch").err)
    assert re.search(r"model +toy-model, 8-bit\n +head +toy-head, 8-bit\n", result.err)
    assert re.search(r"model +toy-model, 4-bit, lm_head 8-bit\n", repl("/info", bits=4).err)
    assert re.search(r"plan +0\.15 of 23\.40 GB", result.err)
    assert str(last_session_path()) in result.err


def test_the_last_tree_is_drawn_where_the_last_round_had_none(repl):
    class PlainAtTheEnd(ScriptEngine):
        def generate(self, *arguments, **options):
            *rounds, last = super().generate(*arguments, **options)
            yield from rounds
            yield replace(last, kind="plain", tree=None, walked=(), drafted=0)

    result = repl("hi", "/tree", engine=PlainAtTheEnd([script("first answer")]))
    assert "round 4 · 3 nodes · walked 2 · after w" not in result.err
    assert "round 3 · 3 nodes · walked 2" in result.err
    result = repl("hi", "/set spec off", "/tree", engine=PlainAtTheEnd([script("ab", end=False)]))
    assert "round 1 · decoded plainly" in result.err


def test_the_last_round_is_drawn(repl):
    result = repl("hi", "/tree", answers=["first answer"])
    lines = result.err.splitlines()[-3:]
    assert lines[0] == "round 4 · 3 nodes · walked 2 · after w"
    assert lines[1].startswith("─┬─ e ── r")
    assert lines[1].endswith("✓ e ✓ r → <|im_end|>")
    assert lines[2] == " └─ ?"
