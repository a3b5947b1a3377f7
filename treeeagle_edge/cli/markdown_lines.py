"""What single lines say about the blocks of a Markdown text: markers of list items, and fences around code."""

from __future__ import annotations

import re

# What is before the text of a line: indentation, and the markers of the list items that begin in it
MARKERS = re.compile(r"[ \t]*(?:(?:[-*+•]|\d{1,3}[.)])[ \t]+)*")
_FENCE = re.compile(r"(`{3,}|~{3,})(.*)", re.DOTALL)


def text_of(line: str) -> str:
    """The line without what is before its text."""
    return MARKERS.sub("", line, count=1)


class Fence:
    """Follows a text line by line, and knows whether code has begun."""

    def __init__(self) -> None:
        self.opened_by = ""  # "" outside of code

    def take(self, line: str) -> None:
        """Take note of the next line. A fence may stand behind a list item's marker, but ends on a line of its own."""
        found = _FENCE.fullmatch(line.lstrip() if self.opened_by else text_of(line))
        if found is None:
            return
        if not self.opened_by and not (found[1][0] == "`" and "`" in found[2]):
            self.opened_by = found[1]
        elif self.opened_by and found[1].startswith(self.opened_by) and not found[2].strip():
            self.opened_by = ""
