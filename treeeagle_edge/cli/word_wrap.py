"""Breaks lines between words while a text streams to a terminal, which itself would break them inside words.

Each letter is shown as it comes. Where a word turns out too long for its line, the line is written once more without
it, and the word begins the next one, below the text of a list item. Code blocks and rows of tables keep their lines.
"""

from __future__ import annotations

import re
from itertools import takewhile
from unicodedata import category

from wcwidth import wcwidth

from treeeagle_edge.cli.console import NARROWEST
from treeeagle_edge.cli.markdown_lines import MARKERS, Fence

_TAB = 8
_KEPT = re.compile(
    MARKERS.pattern + r"(?:\||```|~~~)"
)  # how a line of a table, or one that opens code, begins
_MAY_BE_KEPT = re.compile(MARKERS.pattern + r"\S{0,4}")  # a marker of a list item has four letters at most
_JOINER = "\u200d"  # makes one picture of several
_AS_PICTURE = "\ufe0f"  # some terminals then draw a narrow letter in two columns
_KEYCAP = "\u20e3"
_HALF_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]")  # two of these letters make a flag


class WordWrap:
    """What to send to a terminal for pieces of a text that begins in the first column."""

    def __init__(self) -> None:
        self._columns = 0  # of the terminal, as it was when the last piece came; 0 where that is not known
        self._row = ""  # what stands in the terminal's row
        self._column = 0  # where the next letter goes
        self._word = (
            0  # where in the row its last word begins; 0: where the text of each row does, so it stays
        )
        self._first = True  # the row is the first one of a line of the text
        self._hang = 0  # the column in which that line's text begins, and that of its other rows
        self._full = False  # a space fell on the border, so what follows begins a row
        self._lost = False  # the terminal was resized: what stands in the row is not known until it ends
        self._begun = ""  # the line of the text, as long as it may be one that is kept as it is
        self._fence = Fence()

    def feed(self, text: str, columns: int) -> str:
        """The same text with line breaks moved, for a terminal that is now so wide; 0 where that is not known."""
        columns = columns if columns >= NARROWEST else 0
        if columns != self._columns:
            self._columns, self._lost = columns, bool(self._column)
        return "".join(map(self._take, text))

    def _take(self, letter: str) -> str:
        if letter == "\n":
            self._end_line()
            return letter
        if self._is_kept(letter):
            return letter
        if letter in " \t":
            return self._space(letter)
        return self._letter(letter)

    def _space(self, letter: str) -> str:
        width = _TAB - self._column % _TAB if letter == "\t" else 1
        if self._columns and (self._lost or self._column + width >= self._columns):
            self._full = True
            return ""
        self._row += letter
        self._column += width
        if self._first and MARKERS.fullmatch(self._row):
            self._hang = self._column
        else:
            self._word = len(self._row)
        return letter

    def _letter(self, letter: str) -> str:
        width = _width(letter, after=self._row[-1:])
        before = self._next_row() if self._full else ""
        if self._may_break_before(letter, width):
            self._word = len(self._row)
        if self._columns and not self._lost:
            # the last column stays empty: what a terminal does after it depends on the terminal
            if self._word and self._column + width >= self._columns:
                before += self._move_word()
            elif (
                self._column + width > self._columns
            ):  # a word longer than a row: the terminal goes on in the next
                self._row, self._column, self._first = "", 0, False
        self._row += letter
        self._column += width
        return before + letter

    def _move_word(self) -> str:
        """Take the last word from its row and begin the next one with it."""
        kept, word = self._row[: self._word], self._row[self._word :]
        again = f"\r{kept}{' ' * _width(word)}" if word else ""
        moved = again + self._next_row() + word
        self._row += word
        self._column += _width(word)
        return moved

    def _next_row(self) -> str:
        """Go on below the text of the row, where that leaves room for some."""
        hang = self._hang if 2 * self._hang <= self._columns else 0
        self._start_row(" " * hang)
        return f"\n{self._row}"

    def _start_row(self, begins_with: str) -> None:
        self._row, self._column, self._word = begins_with, len(begins_with), 0
        self._first = self._full = self._lost = False

    def _may_break_before(self, letter: str, width: int) -> bool:
        """Whether a letter begins a word where no space is before it: beside wide ones, but for their punctuation."""
        last = self._row[-1:]
        if not last or last in " \t" or width == 0 or last == _JOINER or letter == _AS_PICTURE:
            return False
        if _HALF_FLAG.match(letter) and self._ends_in_half_flag():
            return False
        wide = width == 2 or wcwidth(last) == 2 or last in (_AS_PICTURE, _KEYCAP)
        closes = category(letter) in ("Pe", "Pf", "Po", "Sk")  # Sk: a skin's colour
        return wide and not closes and category(last) not in ("Ps", "Pi")

    def _ends_in_half_flag(self) -> bool:
        halves = takewhile(_HALF_FLAG.match, reversed(self._row))
        return len(list(halves)) % 2 == 1

    def _is_kept(self, letter: str) -> bool:
        """Whether `letter` belongs to a code block, to the line that opens one, or to a row of a table."""
        if self._fence.opened_by or _MAY_BE_KEPT.fullmatch(self._begun) or _KEPT.match(self._begun):
            self._begun += letter
        return bool(self._fence.opened_by or _KEPT.match(self._begun))

    def _end_line(self) -> None:
        self._fence.take(self._begun)
        self._begun = ""
        self._start_row("")
        self._first, self._hang = True, 0


def _width(text: str, after: str = "") -> int:
    """Columns of `text`, which stands `after` another letter. Where terminals disagree, the larger number: a row that
    is shorter than it could be harms nobody, one that went on in the next would be written over.
    """
    columns = 0
    for before, letter in zip((after or " ") + text, text, strict=False):
        widens = letter == _AS_PICTURE and before != " " and wcwidth(before) == 1
        columns += 1 if widens else max(wcwidth(letter), 0)
    return columns
