"""Ids become text byte-safely, and stop strings are cut exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_fakes import ByteCodec
from hypothesis import given, settings
from hypothesis import strategies as st

from treeeagle_edge.chat.stream import StopFilter, TextStream, first_stop

HARD = "a👩‍👩‍👧 漢字かな e\u0301 \u200d🏳️‍🌈 नमस्ते Ω\u0338 \ufffd end"  # joined emoji, CJK, combining marks


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, rest, turn = [], list(ids), itertools.cycle(sizes)
    while rest:
        size = next(turn)
        chunks.append(rest[:size])
        rest = rest[size:]
    return chunks


def streamed(codec, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    stream = TextStream(codec.decode)
    return [*(stream.push(chunk) for chunk in chunked(ids, sizes)), stream.flush()]


@pytest.mark.parametrize("size", range(1, 9))
def test_hard_text_streams_whole_at_every_step_size(size):
    """Expectations row 34: the pieces joined equal the decoding of all ids, 1 to 8 tokens a step."""
    ids = list(HARD.encode())
    pieces = streamed(ByteCodec(), ids, [size])
    assert "".join(pieces) == HARD
    held = [piece for piece in pieces if "\ufffd" in piece]
    assert len(held) == 1  # the one that is in the text; no half character was ever shown


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 267), max_size=60), st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_any_ids_stream_to_their_decoding(ids, sizes):
    """Expectations row 34, with any bytes at all, valid or not, and special tokens between them."""
    codec = ByteCodec()
    assert "".join(streamed(codec, ids, sizes)) == codec.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_nothing_half_is_shown(text, sizes):
    """Expectations row 34: whatever was shown so far is a prefix of the text."""
    shown = ""
    for piece in streamed(ByteCodec(), list(text.encode(errors="replace")), sizes):
        shown += piece
        assert text.encode(errors="replace").decode().startswith(shown)


def test_a_space_that_only_the_first_token_loses_is_kept():
    """Expectations row 34, for tokenizers that strip the space of the first token they decode."""

    def decode(ids: Sequence[int]) -> str:
        text = "".join({1: " one", 2: " two", 3: " ", 4: ""}[token] for token in ids)
        return text.removeprefix(" ")

    stream = TextStream(decode)
    ids = [1, 2, 4, 3, 2, 1, 4, 4, 2]
    assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == decode(ids)


def test_only_a_window_is_decoded():
    """Streaming stays quick: no step decodes the whole text."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    stream = TextStream(decode)
    for token in ("wörd 漢 " * 300).encode():
        stream.push([token])
    assert longest <= 8


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_the_demo_tokenizer_streams_whole(demo_tokenizer, text, sizes):
    """Expectations row 34, with the demo model's own tokenizer."""
    ids = demo_tokenizer.encode(text + HARD)
    assert "".join(streamed(demo_tokenizer, ids, sizes)) == demo_tokenizer.decode(ids)


@pytest.fixture(scope="module")
def demo_tokenizer(demo_gguf: Path):
    from treeeagle_edge.tokenizer.codec import load_tokenizer

    return load_tokenizer(demo_gguf)


# --- stop strings ---


def filtered(text: str, stops: Sequence[str], cuts: Sequence[int]) -> tuple[list[str], bool]:
    """`text` in pieces that end at `cuts`."""
    gate = StopFilter(stops)
    borders = [0, *sorted(cuts), len(text)]
    shown = [gate.push(text[a:b]) for a, b in itertools.pairwise(borders)]
    return [*shown, gate.flush()], gate.stopped


@pytest.mark.parametrize("stop", ["\n\nUser:", "</s>", "aab", "x"])
def test_a_stop_string_split_anywhere_is_cut_exactly(stop):
    """Expectations row 12: split over pieces at every pair of offsets, it is found and nothing of it is shown."""
    text = f"aaa before{stop}after"
    cut = text.index(stop)
    for cuts in itertools.combinations(range(len(text) + 1), 2):
        shown, stopped = filtered(text, [stop], cuts)
        assert stopped
        assert "".join(shown) == text[:cut]


def test_what_only_looked_like_a_stop_string_comes_in_the_end():
    """Expectations row 12: text held back is shown once it cannot be one."""
    gate = StopFilter(["STOP"])
    assert gate.push("go ST") == "go "
    assert gate.push("AY") == "STAY"
    assert gate.push("ST") == ""
    assert gate.flush() == "ST"


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abc", max_size=24),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 24), max_size=6),
)
def test_the_cut_does_not_depend_on_the_pieces(text, stops, cuts):
    """Expectations row 12: a piece a character and several at once give the same text and the same end."""
    inside = [min(cut, len(text)) for cut in cuts]
    shown, stopped = filtered(text, stops, inside)
    one_by_one, also = filtered(text, stops, range(len(text)))
    assert ("".join(shown), stopped) == ("".join(one_by_one), also)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in "".join(shown) for stop in stops)


def test_the_stop_string_that_is_complete_first_wins():
    """Expectations row 13: the earliest event wins, also among stop strings."""
    assert first_stop("abX", ["abX", "b"]).start == 1
    assert first_stop("ab", ["b", "ab"]).start == 0
    assert first_stop("zz", ["a"]) is None
