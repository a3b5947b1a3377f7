"""How the pieces of an answer reach stdout: as they come, rendered block by block, or not at all."""

from __future__ import annotations

import sys
from typing import Protocol

from treeeagle_edge.cli.console import columns_of, has_cursor, is_terminal, may_style
from treeeagle_edge.cli.markdown_lines import Fence, text_of
from treeeagle_edge.cli.word_wrap import WordWrap

# What a terminal acts upon: escape codes in their one-byte form too, bells, and what would write over the line.
_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t\r"},  # shown as ␛ and the like
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
    ord("\r"): None,
}


def harmless(text: str) -> str:
    """`text` with nothing in it that a terminal would act upon but line ends and tabs."""
    return text.translate(_CONTROLS)


class Printer(Protocol):
    """Takes pieces of text and, in the end, knows that there are no more."""

    def write(self, piece: str) -> None:
        """Show a piece now or later."""

    def finish(self) -> None:
        """Show what is left and end the line."""


class PlainPrinter:
    """Text as it comes. On a terminal, a model cannot send control codes, and lines are broken between words."""

    def __init__(self, *, wrap: bool = False) -> None:
        """`wrap`: break lines between words, where stdout is a terminal that can write a line again."""
        self._ends_line = False
        self._terminal = is_terminal(sys.stdout)
        self._wrap = WordWrap() if wrap and has_cursor(sys.stdout) else None

    def write(self, piece: str) -> None:
        """Show `piece` at once."""
        text = harmless(piece) if self._terminal else piece
        sys.stdout.write(self._wrap.feed(text, columns_of(sys.stdout)) if self._wrap else text)
        sys.stdout.flush()
        self._ends_line = piece.endswith("\n")

    def finish(self) -> None:
        """End the last line."""
        if not self._ends_line:
            sys.stdout.write("\n")
        sys.stdout.flush()


class MarkdownPrinter:
    """Renders each block once it is complete, so that an answer still streams. A list item is complete where a line
    after it is not indented: paragraphs and code of its own may follow its first line.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False)
        self._block: list[str] = []
        self._line = ""
        self._fence = Fence()
        self._may_go_on = False  # the block has a list item in it, and ends in a blank line

    def write(self, piece: str) -> None:
        """Show the blocks that `piece` completes."""
        *lines, self._line = (self._line + piece).split("\n")
        for line in lines:
            self._end_item(line)
            self._fence.take(line)
            self._block.append(line)
            if line.strip() or self._fence.opened_by:
                continue
            self._may_go_on = any(text_of(each) != each for each in self._block)
            if not self._may_go_on:
                self._show()
        self._end_item(self._line)

    def finish(self) -> None:
        """Show the last block."""
        self._block.append(self._line)
        self._line, self._fence = "", Fence()
        self._show()

    def _end_item(self, line: str) -> None:
        """Show a list item where `line`, or what has come of it, does not belong to it."""
        if self._may_go_on and line[:1].strip() and not self._fence.opened_by:
            self._show()

    def _show(self) -> None:
        from rich.markdown import Markdown

        text = harmless("\n".join(self._block))
        self._block.clear()
        self._may_go_on = False
        if text.strip():
            self._console.print(Markdown(text))
            sys.stdout.flush()


class SilentPrinter:
    """Shows nothing: the answer comes as one object afterwards."""

    def write(self, piece: str) -> None:
        """Drop `piece`."""

    def finish(self) -> None:
        """Nothing is left."""


def choose_printer(*, markdown: bool, wrap: bool, silent: bool = False) -> Printer:
    """Markdown is rendered only where stdout may carry escape codes."""
    if silent:
        return SilentPrinter()
    return MarkdownPrinter() if markdown and may_style(sys.stdout) else PlainPrinter(wrap=wrap)
