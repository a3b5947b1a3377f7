"""Which dialogues are learnt from, in which batches, and what lies on disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.training.corpus import Entry, batches, collate, draft_vocabulary, open_corpus
from treeeagle_edge.training.overlap import Excluded, Seen
from treeeagle_edge.training.processes import Place
from treeeagle_edge.training.shards import Dialogue, Shard, shard_path, write_shard


def dialogue(tokens: list[int], prompt: int = 2) -> Dialogue:
    count = len(tokens)
    return Dialogue(
        torch.tensor(tokens, dtype=torch.int32),
        torch.arange(count) >= prompt,
        torch.tensor(tokens, dtype=torch.int32),
        torch.arange(count * 6, dtype=torch.bfloat16).view(count, 6),
        torch.full((count, 2), 0.5, dtype=torch.bfloat16),
    )


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def test_a_shard_gives_back_what_was_written(tmp_path: Path) -> None:
    written = [dialogue([1, 2, 3, 4]), dialogue([5, 6, 7])]
    write_shard(tmp_path / "one", written)
    shard = Shard(tmp_path / "one")
    assert len(shard) == 2
    for index, expected in enumerate(written):
        got = shard.dialogue(index)
        for part in ("tokens", "in_answer", "best", "features", "hidden"):
            assert torch.equal(getattr(got, part), getattr(expected, part)), part
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_damaged_shard_and_a_full_disk_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad").write_bytes(b"not a shard")
    with pytest.raises(InputError, match="damaged"):
        Shard(tmp_path / "bad")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("treeeagle_edge.training.shards.save_file", full)
    with pytest.raises(CannotRunError, match="cannot be written"):
        write_shard(tmp_path / "one", [dialogue([1, 2, 3])])
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_near_duplicates_and_judged_questions_are_left_out(tmp_path: Path) -> None:
    fresh = list(range(100, 140))
    judged = list(range(200, 240))
    write_shard(
        shard_path(tmp_path, 0),
        [
            dialogue([9, 9, 1, 2]),
            dialogue(fresh),
            dialogue(judged),
            dialogue([7, *fresh]),
            dialogue([1, 2, 3]),
        ],
    )
    corpus = open_corpus(tmp_path, 1, words, Excluded([words(judged[10:18])]))
    assert (corpus.repeated, corpus.excluded) == (1, 1)
    assert [entry.index for entry in corpus.train] == [1]
    assert corpus.counts[100] == 0  # of the prompt
    assert corpus.counts[102] == 1


def test_seven_words_in_common_are_no_overlap() -> None:
    excluded = Excluded(["One two, three four five six seven eight nine."])
    assert excluded.overlaps("so: TWO three four five six seven eight nine")
    assert not excluded.overlaps("two three four five six seven eight")


def test_seen_wants_more_than_half_repeated() -> None:
    seen = Seen()
    assert not seen.is_repeated(list(range(40)))
    assert not seen.is_repeated([*range(20), *range(900, 940)])
    assert seen.is_repeated(list(range(5, 40)))


def test_the_draft_vocabulary_holds_what_is_used_most() -> None:
    ids = draft_vocabulary(Counter({7: 5, 3: 9, 4: 1}), 3, 10, frozenset({2}))
    assert ids.tolist() == [2, 3, 7]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_share_every_batch_and_no_dialogue_is_lost(count: int) -> None:
    entries = [Entry(0, i, 10 + i, 5 + i % 7) for i in range(50)]
    alone = list(batches(entries, tokens=40, seed=3, epoch=1, place=Place(0, 1)))
    assert sorted(entry.index for batch in alone for entry in batch) == list(range(50))
    parts = [list(batches(entries, tokens=40, seed=3, epoch=1, place=Place(i, count))) for i in range(count)]
    for batch, *shares in zip(alone, *parts, strict=True):
        assert {entry for share in shares for entry in share} == set(batch)
    other = list(batches(entries, tokens=40, seed=3, epoch=2, place=Place(0, 1)))
    assert other != alone


def test_padding_is_never_an_answer() -> None:
    batch = collate([dialogue([1, 2, 3, 4, 5]), dialogue([6, 7, 8])])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert batch.in_answer.tolist()[1] == [False, False, True, False, False]
    assert batch.features.shape == (2, 5, 6)
