"""The C library's heap."""

from __future__ import annotations

import ctypes
import sys

import psutil
import pytest

from treeeagle_edge.heap import give_back_freed

MB = 1 << 20


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="the C library has no malloc_trim",
)
def test_freed_memory_below_what_is_still_used_goes_back() -> None:
    """One block in use at the heap's end keeps all that was freed below it, whatever thresholds say."""
    resident = psutil.Process().memory_info
    blocks = [b"x" * (100 << 10) for _ in range(1000)]  # each below the least size that gets pages of its own
    last = b"x" * (100 << 10)
    del blocks
    before = resident().rss
    give_back_freed()
    assert before - resident().rss > 60 * MB
    assert last[-1:] == b"x"


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("no library is asked"))
    give_back_freed()
