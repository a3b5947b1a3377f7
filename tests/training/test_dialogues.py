"""Scripts of dialogues, played by hand and on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from chat_fakes import END, OTHER_END, START, ByteCodec
from tiny_models import VOCAB, tiny_target

from treeeagle_edge.kernels.view import BatchView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.training.data_file import GivenDialogue, read_dialogues, scripts_from_file
from treeeagle_edge.training.dialogues import ANSWER_TOKENS, DialogueToken, Script, Wish, retold, self_written
from treeeagle_edge.training.generate import DialogueWriter
from treeeagle_edge.training.pieces import ChatPieces, chat_pieces
from treeeagle_edge.training.starters import Starter

STOP = 1
PIECES = ChatPieces(opening=(30, 31), reply=(STOP, 32, 33), again=(STOP, 34, 31), stop_ids=frozenset({STOP}))
STARTERS = (Starter(ids=(20, 21), weight=1.0, follow_up=1.0, tokens=6),)


def played(script: Script, choose) -> list[DialogueToken]:
    said, current = [], next(script)
    while True:
        said.append(current)
        try:
            current = script.send(None if current.wish is None else choose(len(said), current.wish))
        except StopIteration:
            return said


def test_turns_are_put_between_what_the_template_writes() -> None:
    words = iter([5, 6, 7, STOP, 8, 9, STOP])
    script = retold(PIECES, [([5, 6], []), ([7], [])], regenerate=Wish(0.0))
    said = played(script, lambda *_: next(words))
    given = [30, 31, 5, 6, STOP, 32, 33]
    assert [say.token for say in said[: len(given)]] == given
    answer = [say.token for say in said if say.in_answer]
    assert answer == [5, 6, 7, STOP, 8, 9, STOP]  # the end token is the target's choice too
    assert [say.token for say in said][-1] == STOP


def test_what_a_file_says_is_text_also_where_it_spells_control_tokens() -> None:
    codec = ByteCodec()
    given = GivenDialogue("<|im_start|>be brief", (("hi<|im_end|>", "no<|endoftext|>"),))
    scripts = scripts_from_file([given], codec, chat_pieces(codec), 1, regenerate=False)
    (script,) = scripts(0, [np.random.default_rng(0)])
    tokens = [said.token for said in played(script, lambda *_: 1 / 0)]
    assert [token for token in tokens if token in (START, END, OTHER_END)] == [
        START,
        END,
        START,
        END,
        START,
        END,
    ]
    assert codec.decode(tokens, skip_special=False).startswith(
        "<|im_start|>system\n<|im_start|>be brief<|im_end|>\n<|im_start|>user\nhi<|im_end|><|im_end|>"
    )


def test_a_given_answer_is_learnt_and_nothing_is_asked_for() -> None:
    said = played(retold(PIECES, [([5], [6, 7]), ([8], [9])]), lambda *_: 1 / 0)
    assert [say.token for say in said] == [
        30,
        31,
        5,
        STOP,
        32,
        33,
        6,
        7,
        STOP,
        34,
        31,
        8,
        STOP,
        32,
        33,
        9,
        STOP,
    ]
    assert [say.token for say in said if say.in_answer] == [6, 7, STOP, 9, STOP]


def test_a_persons_turn_does_not_end_at_once_and_is_cut_at_its_limit() -> None:
    asked: list[Wish] = []

    def choose(at: int, wish: Wish) -> int:
        asked.append(wish)
        return 9

    said = played(self_written(PIECES, STARTERS, np.random.default_rng(0)), choose)
    assert [say.token for say in said[:4]] == [30, 31, 20, 21]
    assert [wish.may_stop for wish in asked[:4]] == [False, False, False, True]
    assert [say.token for say in said[4:13]] == [9] * 6 + [STOP, 32, 33]
    assert not any(say.in_answer for say in said[:13])


def test_an_answer_that_goes_round_in_circles_is_cut_and_ends_the_dialogue() -> None:
    said = played(self_written(PIECES, STARTERS, np.random.default_rng(0)), lambda *_: 9)
    answer = [say for say in said if say.in_answer]
    assert 36 <= len(answer) < ANSWER_TOKENS
    assert all(say.token == 9 for say in answer)  # it was cut: no end token is made up
    assert said[-1].in_answer


def test_a_long_answer_without_circles_reaches_its_limit() -> None:
    rng = np.random.default_rng(1)
    said = played(
        self_written(PIECES, STARTERS, np.random.default_rng(0)), lambda *_: int(rng.integers(2, 20_000))
    )
    assert sum(say.in_answer for say in said) == ANSWER_TOKENS


def test_a_dialogue_is_what_the_target_says_alone() -> None:
    """Greedy, features and all, whatever is written beside it."""
    target = tiny_target(context=64)
    writer = DialogueWriter(target, (1, 3), dialogues=3, length=24)
    prompts = ([3, 4, 5], [6], [7, 8])
    scripts = [retold(PIECES, [(ids, [])], regenerate=Wish(0.0)) for ids in prompts]
    rngs = [np.random.default_rng(i) for i in range(3)]
    for ids, dialogue in zip(prompts, writer.write(scripts, rngs, PIECES.stop_ids), strict=True):
        tokens = dialogue.tokens.long()
        begin = len(PIECES.opening) + len(ids) + len(PIECES.reply)
        assert tokens[:begin].tolist() == [*PIECES.opening, *ids, *PIECES.reply]
        assert not dialogue.in_answer[:begin].any()
        assert dialogue.in_answer[begin:].all()
        logits, features, hidden = _alone(target, tokens)
        assert torch.equal(logits.argmax(-1).int(), dialogue.best)
        assert torch.equal(dialogue.best[begin - 1 : -1], dialogue.tokens[begin:])  # greedy
        torch.testing.assert_close(dialogue.features.float(), features, rtol=1e-2, atol=1e-2)  # kept as bf16
        torch.testing.assert_close(dialogue.hidden.float(), hidden, rtol=1e-2, atol=1e-2)


def _alone(target, tokens: torch.Tensor):
    config = target.config
    store = KVStore.allocate(
        config.num_layers, 64, config.num_kv_heads, config.head_dim, torch.float32, target.device
    )
    rows = []
    for at, token in enumerate(tokens):
        one = torch.tensor([at])
        view = BatchView(torch.tensor([0]), one + 1)
        rows.append(target.forward(token[None], one, one, view, store, (1, 3, config.num_layers)))
    features = torch.cat([row.features for row in rows])
    width = 2 * config.hidden_size
    return torch.cat([row.logits for row in rows]), features[:, :width], features[:, width:]


def test_sampled_tokens_depend_on_their_own_seed_only() -> None:
    target = tiny_target(context=64)

    def once(seeds: list[int]) -> list[list[int]]:
        writer = DialogueWriter(target, (1,), dialogues=len(seeds), length=20)
        scripts = [retold(PIECES, [([3], [])], regenerate=Wish(1.0)) for _ in seeds]
        rngs = [np.random.default_rng(seed) for seed in seeds]
        return [dialogue.tokens.tolist() for dialogue in writer.write(scripts, rngs, PIECES.stop_ids)]

    one, two, three = once([1, 2, 3])
    assert once([3, 1]) == [three, one]
    assert two not in (one, three)
    assert all(token < VOCAB for token in one)


def test_a_line_separator_in_a_message_does_not_end_its_line(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "one\u2028two"}, {"role": "assistant", "content": "three\x85"}]
    path = tmp_path / "said.jsonl"
    path.write_text(
        json.dumps({"messages": said}, ensure_ascii=False) + "\r\n\n", encoding="utf-8", newline=""
    )
    assert read_dialogues(path) == (GivenDialogue(None, (("one\u2028two", "three\x85"),)),)
