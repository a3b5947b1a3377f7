"""Lines of a streamed answer on a terminal, as a small terminal shows them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcwidth

from treeeagle_edge.cli.word_wrap import WordWrap

EMOJI_STYLE = "\ufe0f"
PROSE = "The sky looks blue because air scatters short wavelengths of sunlight more than long ones, in all directions."


class Screen:
    """Rows of letters, as a terminal of so many columns builds them from what it is sent."""

    def __init__(self, columns: int, *, emoji_style: bool = False) -> None:
        """`emoji_style`: it draws a narrow letter in two columns where EMOJI_STYLE follows. Some do, some do not."""
        self.columns, self.emoji_style = columns, emoji_style
        self.rows: list[list[str]] = [[]]
        self.at = 0

    def send(self, text: str) -> None:
        for letter in text:
            if letter == EMOJI_STYLE and self.emoji_style and wcwidth(self.rows[-1][self.at - 1][:1]) == 1:
                letter = self._take_back() + letter
                self._put(letter, 2)
                continue
            if letter == "\n":
                self.rows.append([])
                self.at = 0
            elif letter == "\r":
                self.at = 0
            elif letter == "\t":
                self.at = min(self.at - self.at % 8 + 8, self.columns - 1)
            else:
                self._put(letter, max(wcwidth(letter), 0))

    def _take_back(self) -> str:
        """The last letter, to be put again in two columns."""
        self.at -= 1
        return self.rows[-1].pop(self.at)

    def _put(self, letter: str, width: int) -> None:
        if width == 0:
            self.rows[-1][self.at - 1] += letter
            return
        if self.at + width > self.columns:
            self.rows.append([])
            self.at = 0
        row = self.rows[-1]
        row += [" "] * (self.at + width - len(row))
        row[self.at : self.at + width] = [letter, ""][:width]
        self.at += width

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


def shown(text: str, columns: int, size: int = 1, *, emoji_style: bool = False) -> list[str]:
    wrap, screen = WordWrap(), Screen(columns, emoji_style=emoji_style)
    for at in range(0, len(text), size):
        screen.send(wrap.feed(text[at : at + size], columns))
    return screen.lines


def test_a_word_at_the_border_begins_the_next_row() -> None:
    assert shown(PROSE, 30) == [
        "The sky looks blue because",
        "air scatters short",
        "wavelengths of sunlight more",
        "than long ones, in all",
        "directions.",
    ]
    assert shown(PROSE, 200) == [PROSE]


def test_letters_are_shown_as_they_come() -> None:
    wrap, screen = WordWrap(), Screen(30)
    for at, letter in enumerate(PROSE, start=1):
        screen.send(wrap.feed(letter, 30))
        assert " ".join(" ".join(screen.lines).split()) == " ".join(PROSE[:at].split())


@pytest.mark.parametrize("columns", [0, 1, 19])
def test_where_the_width_is_unknown_or_tiny_nothing_is_moved(columns: int) -> None:
    assert WordWrap().feed(PROSE, columns) == PROSE


@pytest.mark.parametrize(
    "block",
    [
        f"```python\n{PROSE}\n{PROSE}\n```\n",
        f"  ~~~\n{PROSE}\n```\n{PROSE}\n~~~~\n",
        f"````markdown\n```\n{PROSE}\n```\n{PROSE}\n````\n",
        f"| {PROSE} | {PROSE} |\n|---|---|\n  | {PROSE} |\n",
        f"1. ```python\n   {PROSE}\n   - ```\n   {PROSE}\n   ```\n",
        f"- 10. ~~~\n{PROSE}\n      ~~~\n",
    ],
)
def test_code_and_tables_keep_their_lines(block: str) -> None:
    wrap = WordWrap()
    assert "".join(wrap.feed(letter, 40) for letter in block) == block
    assert wrap.feed(PROSE, 40) != PROSE  # and prose after it is broken again


@pytest.mark.parametrize(
    "line",
    [
        "`code` " + PROSE,
        "``` not a block``` " + PROSE,
        "a | " + PROSE,
        "-``` " + PROSE,
        "100) a ``` " + PROSE,
    ],
)
def test_what_only_looks_like_a_block_opens_none(line: str) -> None:
    assert WordWrap().feed(f"{line}\n{PROSE}", 40).split("\n")[-1] != PROSE


@pytest.mark.parametrize("begins", ["- ", "*  ", "• ", "1. ", "  12) ", "\t+ ", "- 1. ", "   "])
@pytest.mark.parametrize("size", [1, 7])
def test_the_rows_of_a_list_item_begin_below_its_text(begins: str, size: int) -> None:
    rows = shown(f"{begins}{PROSE}\n{PROSE}", 40, size)
    hang = len(begins.expandtabs(8))
    last = rows.index(next(row for row in rows if row.endswith("directions."))) + 1
    assert rows[0].startswith(begins.expandtabs(8).rstrip())
    assert {row[:hang] for row in rows[1:last]} == {" " * hang}
    assert [row[hang:] for row in rows[:last]] == shown(PROSE, 40 - hang)
    assert rows[last:] == shown(PROSE, 40)


@pytest.mark.parametrize(
    "begins", ["-", "1985. ", "**Note** ", "-5 ", "a) ", "9" * 12 + ". ", " " * 21, "- " * 11]
)
def test_what_is_no_list_item_or_leaves_no_room_hangs_nowhere(begins: str) -> None:
    assert not shown(begins + PROSE, 40)[1].startswith(" ")


def test_a_dash_at_the_begin_of_a_later_row_is_no_marker() -> None:
    rows = ["Every one of these", "- of this one", "sentence"]
    assert shown(" ".join(rows), 20) == rows


def test_a_word_that_fits_below_no_marker_stays_behind_it() -> None:
    """Moving it would leave the marker alone, and gain nothing."""
    link = "https://example.org/" + "path/" * 5
    assert shown(f"- {link} and", 30) == [f"- {link[:28]}", f"{link[28:]} and"]
    assert shown(f"- see {link} and", 30) == ["- see", f"  {link[:28]}", f"{link[28:]} and"]


def test_wide_letters_take_two_columns_and_need_no_space() -> None:
    """A row begins with no closing mark, and ends with no opening one."""
    assert shown("天空看起来是蓝色的因为空气散射短波长的光", 21) == [
        "天空看起来是蓝色的因",
        "为空气散射短波长的光",
    ]
    assert shown("天空看起来是蓝色的因，为空气", 21) == ["天空看起来是蓝色的", "因，为空气"]
    assert shown("天空看起来是蓝色的「因」为空气", 21) == ["天空看起来是蓝色的", "「因」为空气"]
    assert shown("the sky is 空空空空空 blue and wide", 24) == ["the sky is 空空空空空", "blue and wide"]
    family = "👩\u200d👩\u200d👧"
    assert shown(f"a family, {family}{family}{family}", 22)[-1].startswith("👩")
    assert all(line.count("\u200d") % 2 == 0 for line in shown(f"a family, {family}{family}{family}", 22))


@pytest.mark.parametrize("emoji_style", [False, True])
def test_pictures_that_some_terminals_draw_in_two_columns(emoji_style: bool) -> None:
    """What overflows is written over by nothing: each picture is there once, and each row holds what fits."""
    for text in (
        "\u2764\ufe0f " * 40,
        "\u26a0\ufe0f careful, " * 20,
        "\u2714\ufe0f" * 30,
        "1\ufe0f\u20e3 of them " * 9,
    ):
        for columns in range(20, 45):
            lines = shown(text, columns, emoji_style=emoji_style)
            assert "".join("".join(lines).split()) == "".join(text.split())
            if " " in text:
                assert " ".join(lines).split() == text.split()


def test_a_flag_is_not_broken() -> None:
    for columns in range(20, 30):
        for line in shown("flags: " + "\U0001f1e9\U0001f1ea" * 20, columns):
            assert sum(0x1F1E6 <= ord(letter) <= 0x1F1FF for letter in line) % 2 == 0


def test_a_word_longer_than_a_row_is_left_to_the_terminal() -> None:
    link = "https://example.org/" + "path/" * 12
    assert link in WordWrap().feed(f"see {link} for more of it", 30)  # whole, so that a terminal finds it
    rows = ["see", link[:30], link[30:60], f"{link[60:]} for more", "of it"]
    assert shown(f"see {link} for more of it", 30) == rows


def test_a_line_that_ends_at_the_border_makes_no_empty_row() -> None:
    for length in range(15, 26):
        for after in ("\n", " \n", "  next", " next"):
            lines = shown("a" * 10 + " " + "b" * (length - 11) + after + "end", 20)
            assert "" not in lines
            assert " ".join(lines).split() == ("a" * 10 + " " + "b" * (length - 11) + after + "end").split()


texts = st.lists(st.sampled_from([*"ab- \n\t漢。（é\u0301|`", " ", "- ", "1. ", "```\n"]), max_size=60).map(
    "".join
)
words = st.lists(
    st.sampled_from(["a", "of", "letters", "wavelengths", "don't", "e\u0301te\u0301"]), max_size=60
)


@given(words, st.integers(20, 60), st.integers(1, 9))
def test_no_word_is_broken(given: list[str], columns: int, size: int) -> None:
    text = " ".join(given)
    lines = shown(text, columns, size)
    assert " ".join(lines).split() == given
    for line, following in pairwise(lines):  # and no row is shorter than it must be
        assert columns <= wide(line) + 1 + wide(following.split()[0])


@given(texts, st.integers(20, 40), st.integers(1, 9))
def test_nothing_is_lost_however_it_comes(text: str, columns: int, size: int) -> None:
    text = re.sub("^\u0301+|(?<=[\n\t ])\u0301+", "", text)  # nothing to stand on
    lines = shown(text, columns, size)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert lines == shown(text, columns, max(len(text), 1))


@given(st.lists(st.tuples(texts, st.sampled_from([0, 5, 20, 33, 80]))))
def test_a_terminal_may_be_resized_at_any_time(pieces: list[tuple[str, int]]) -> None:
    """Every letter is sent, and the next line is as it should be."""
    wrap = WordWrap()
    for piece, columns in pieces:
        plain = re.sub("[`|]", "", piece)
        assert set("".join(plain.split())) <= set(wrap.feed(plain, columns))
    screen = Screen(40)
    screen.send(wrap.feed(f"\n{PROSE}", 40).partition("\n")[2])
    assert screen.lines == shown(PROSE, 40)


def wide(text: str) -> int:
    return sum(max(wcwidth(letter), 0) for letter in text)
